"""Benchmarks: defined loads sent to a running engine, and their results."""
