"""Corpora, and from them to batches of tokens."""
