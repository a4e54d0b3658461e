"""Canary of an engine: sequential comparison of two variants, and the share of traffic that follows from it."""
