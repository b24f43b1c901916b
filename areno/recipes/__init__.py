"""One module for each algorithm: its configuration, the command that runs it, and ALGORITHM, which gives it a name.

torch is imported only when the loss is made and the loop begins, so that --help and --cfg answer at once.
"""
