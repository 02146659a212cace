"""SLoPe (arXiv 2405.16325)."""
