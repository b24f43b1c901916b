"""What a rollout by agents costs."""
