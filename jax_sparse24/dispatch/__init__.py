"""Who runs what on which hardware, decided in one place: `decision.decide`."""
