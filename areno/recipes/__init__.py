"""One module for each algorithm: its configuration, its record (ALGORITHM) and the command that runs it.

torch is imported only when the loss is made and the loop begins, so that --help and --cfg answer at once.
"""
