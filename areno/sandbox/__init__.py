"""A box for commands that nobody has read, such as programs of a model: their files, signals, limits and network."""
