"""Helm chart with the objects of `vllm-watch kubernetes export`."""
