"""Programs: gateway, lab, benchmarks, tuning, capacity, doctor, board, deployment, command line."""
