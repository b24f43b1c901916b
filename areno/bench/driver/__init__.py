"""What a step costs outside of rollout and training, with devices that are played."""
