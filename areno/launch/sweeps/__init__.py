"""Sweeps: what their runs came to, and running several at the same time."""
