"""Families whose layers have experts."""
