"""A run around its training loop: progress, outputs, evaluation, checkpoints, states and resuming."""
