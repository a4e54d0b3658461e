"""Dashboards: one file each, printed to json/."""
