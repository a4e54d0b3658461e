"""Before deploying: what a model and its KV cache take, how many users fit, on which GPU or slice, at what cost. Pure
arithmetic."""
