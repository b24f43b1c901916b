"""A model folder: where it is, and what its config.json says."""
