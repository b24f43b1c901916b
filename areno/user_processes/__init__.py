"""Pools and processes that run the user's code: reward functions and agents."""
