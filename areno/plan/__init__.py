"""From a configuration, or the arguments of a script, to the plan from which a Trainer starts."""
