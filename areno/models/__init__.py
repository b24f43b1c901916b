"""Models: the transformer of all families, their configs, weight files, adapters and costs."""
