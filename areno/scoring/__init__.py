"""Score samples: find the reward functions of a run, and call them in separate processes."""
