"""Benchmarks, one noun a file: a function that measures and returns a dict, and ``render`` that shows it."""
