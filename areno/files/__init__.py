"""Files and signals: atomic writes, paths, small YAML files, import of users' functions, and delayed interrupts."""
