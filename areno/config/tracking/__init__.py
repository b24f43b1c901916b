"""Settings of what follows a run."""
