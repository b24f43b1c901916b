"""The built-in reward functions. Each is declared once, in built_in.py; what imports much has a file of its own."""
