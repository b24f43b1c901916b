"""A sandbox for untrusted commands, such as programs of a model: it limits files, signals, resources and network."""
