"""What a step samples, and the rewards of it."""
