"""Lab: the whole stack as processes on a vLLM CPU build."""
