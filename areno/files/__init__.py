"""Files and signals: atomic writes, paths, small YAML files, functions of the user, and delayed interrupts."""
