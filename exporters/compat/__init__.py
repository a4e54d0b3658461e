"""Comparison of the catalogue with live endpoints, dashboards and installed releases of vLLM."""
