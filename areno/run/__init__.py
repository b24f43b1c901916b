"""What surrounds a training loop: progress, outputs, evaluation, checkpoints, training states and resuming."""
