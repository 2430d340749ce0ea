"""Compiling ahead of time for hardware that is not there, and reading what the compiler says."""
