"""The command `areno`: one module for each of its subcommands."""
