"""Alerts as code: thresholds, rules, recording rules, SLOs, routing."""
