"""Timed checks: `python -m areno.bench`. Times are never asserted in tests."""
