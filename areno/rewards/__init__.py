"""Rewards of samples: the functions of a run, and the processes that call them."""
