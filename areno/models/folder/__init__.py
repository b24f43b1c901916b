"""A model folder: where it is, what its config.json says, and which weight files it has."""
