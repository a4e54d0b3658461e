"""One module for each dashboard."""
