"""The league of algorithms: which take part, the order of their runs, their results as tables."""
