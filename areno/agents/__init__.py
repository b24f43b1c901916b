"""The code that runs the user's agents: environments with tools, agent processes, trajectories, training rows."""
