"""Checks of a run before it starts, on the user's own data and settings: the command `areno check -- COMMAND`.

A check is a function that takes a Subject, the run that is checked, and yields findings. `all_checks.py` lists the
checks. They share no code with what they check below the tokenizer: what is trained comes from the template's text,
log-probabilities come from transformers, and losses from formulas in float64.
"""
