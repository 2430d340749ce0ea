"""Judging models: statistics of small samples."""
