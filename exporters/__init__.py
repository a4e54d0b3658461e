"""Measurement: catalogue, request log, engines, GPUs, accounting, tracing, and the connections they need."""
