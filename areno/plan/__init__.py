"""Makes the plan from which a Trainer starts. Its source is a run's configuration or a script's arguments."""
