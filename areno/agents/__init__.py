"""Agents: their items and trajectories, environments with tools, and the processes that run the user's agent."""
