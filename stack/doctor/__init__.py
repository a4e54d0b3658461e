"""Doctor: bottleneck of a running engine, evidence, first option to change."""
