"""One module for each algorithm: what it is made of (ALGORITHM), and the command that runs it.

torch is imported where the loss is made and the loop begins, so that --help and --cfg answer at once.
"""
