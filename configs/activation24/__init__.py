"""2:4 activations (arXiv 2503.16672)."""
