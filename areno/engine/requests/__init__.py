"""Requests on their way: which copy of the model gets them, and who awaits what comes back."""
