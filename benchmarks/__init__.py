"""Benchmarks for the developers of areno: `python -m benchmarks NAME`, see README.md. No test asserts a time."""
