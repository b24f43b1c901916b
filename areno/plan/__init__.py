"""Makes the plan from which a Trainer starts, from the configuration of a run or the arguments of a script."""
