"""Tuning events: log file and HTTP interface."""
