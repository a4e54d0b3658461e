"""Join of request log, engines and GPUs: reconciliation, attribution, energy and cost."""
