"""The built-in reward functions, a file for each. The names of their keyword arguments are those of their settings."""
