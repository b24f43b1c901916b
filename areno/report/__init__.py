"""Reports and tables of runs."""
