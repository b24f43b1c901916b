"""The parts that are common to the processes for reward functions and for agents, which run the user's code."""
