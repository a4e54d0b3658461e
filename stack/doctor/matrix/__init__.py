"""Tuning matrix: one row for each bottleneck."""
