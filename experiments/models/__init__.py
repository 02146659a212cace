"""Models that the experiments train."""
