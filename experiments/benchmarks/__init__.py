"""Benchmark suites; each module has `measure(...) -> dict` and is run by experiments.benchmark."""
