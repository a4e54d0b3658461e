"""Prometheus configuration and sample budget for a fleet of engines."""
