"""Request log: record, tail, counters, checkpoint."""
