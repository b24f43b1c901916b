"""Processes that run the user's code, which are shared by reward functions and agents."""
