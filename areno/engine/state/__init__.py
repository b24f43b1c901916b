"""The state of a run on disk: what the next optimizer step of every trained role depends on."""
