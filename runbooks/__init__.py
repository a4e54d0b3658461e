"""What to do: one page per alert, named like it."""
