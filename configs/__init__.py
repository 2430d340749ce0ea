"""Configs: one file an experiment, with `VARIANTS`, `EXPERIMENT` and `get_config(variant)`."""
