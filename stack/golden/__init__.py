"""Golden prompts: record what an engine computes, and compare an engine with the record."""
