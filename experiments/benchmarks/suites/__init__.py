"""What is timed: one file per suite."""
