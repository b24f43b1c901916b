"""The files that a run leaves of its steps, and which of them belong to a run that goes on."""
