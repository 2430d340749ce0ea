"""Runners: one module an experiment, started by `python -m experiments.launch`."""
