"""The live display of a run on a terminal: what it knows (board.py), how that looks (view.py), how it gets there."""
