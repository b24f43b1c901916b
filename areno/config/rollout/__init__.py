"""Settings of what samples: completions, agents."""
