"""Benchmarks against something measured in the same run."""
