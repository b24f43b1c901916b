"""Datasets: sources and files, the form of a row, chat templates, rows as tokens, and batches."""
