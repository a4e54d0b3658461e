"""Runbooks: one page per alert, named like it."""
