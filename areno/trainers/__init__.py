"""The training loops and the steps that they share."""
