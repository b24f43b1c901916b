"""The command `areno`, with one module for each subcommand."""
