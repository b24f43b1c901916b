"""Agents in processes of their own, and what the driver knows of them."""
