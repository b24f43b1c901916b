"""Processes that run user code, for reward functions and agents alike."""
