"""While running: which resource is the bottleneck, what says so, and which one lever to pull first."""
