"""Checks of settings that defeat a run: each is allowed, and together they leave nothing to learn."""
