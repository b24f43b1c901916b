"""Benchmarks of areno's speed: `python -m areno.bench`. No test asserts a time."""
