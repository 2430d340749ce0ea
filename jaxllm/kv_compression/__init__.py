"""Caches that keep fewer keys and values."""
