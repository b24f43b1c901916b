"""What a script or a configuration gives a Trainer: the checks, and the plan that is made of it."""
