"""Capacity planning: memory of model and KV cache, users, GPU, cost. Pure arithmetic."""
