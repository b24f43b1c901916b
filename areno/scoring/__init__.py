"""Scoring of samples: the reward functions of a run, and the processes that call these functions."""
