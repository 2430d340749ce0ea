"""Fewer bits for weights, activations, keys and values."""
