"""Reports, tables and replays of runs."""
