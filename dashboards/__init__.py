"""Dashboards as code: one module each in boards/, printed to json/."""
