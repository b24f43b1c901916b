"""Training: rows to optimizer steps and micro-batches, forward and backward passes, and the update."""
