"""The state of a run on disk: all tensors that the next optimizer step of each trained role depends on."""
