"""Everything that a run keeps beside its models: progress, outputs, checkpoints, states, resuming."""
