"""Loads with known shapes, sent to a running engine, and what came of them."""
