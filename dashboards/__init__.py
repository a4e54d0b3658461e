"""What to look at: one file per board, printed to json/."""
