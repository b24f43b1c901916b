"""The flags of `areno train`, and their tables on the page of the command line."""
