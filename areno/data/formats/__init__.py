"""Data files: their bytes, and the rows in them."""
