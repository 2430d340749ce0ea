"""Pallas kernels for TPU and GPU, one folder an operation, each with a plain JAX reference."""
