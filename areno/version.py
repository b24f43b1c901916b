"""The version of areno."""

__version__ = "0.1.0"
