"""What an agent is: its items, trajectories, environments and processes, above the server that it sends requests to."""
