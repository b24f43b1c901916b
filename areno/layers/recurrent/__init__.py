"""Layers that keep a state of each row in the place of keys and values."""
