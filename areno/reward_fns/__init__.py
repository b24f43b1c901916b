"""The built-in reward functions. Each is declared in built_in.py. Code with slow imports is in separate files."""
