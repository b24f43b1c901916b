"""Two watched steps of the run that is checked, and the checks that compare them with formulas."""
