"""The settings of a run: dataclasses, with the checks between their fields."""
