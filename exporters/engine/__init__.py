"""Client of a vLLM engine."""
