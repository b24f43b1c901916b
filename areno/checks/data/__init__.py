"""Checks of the rows of a run: their texts, what is trained of them, and their prompts."""
