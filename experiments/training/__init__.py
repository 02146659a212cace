"""A run: its step, its loop, its folder, and what is measured on the way."""
