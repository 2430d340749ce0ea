"""Kernels at the shapes of real models: compiled for chips that need not be there, and measured."""
