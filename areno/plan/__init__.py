"""From a configuration or the arguments of a script to the plan that a Trainer starts."""
