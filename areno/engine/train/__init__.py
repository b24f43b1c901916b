"""Training: division of rows into optimizer steps and micro-batches, forward and backward passes, and the update."""
