"""One module for each algorithm: what it is made of, and the command that runs it.

A recipe names its configuration class (CONFIG), the --config-name it falls back to (DEFAULT) and `main`, which runs one
experiment and returns its objective. torch is imported inside `main`, so that --help and --cfg answer at once.
"""
