"""The same programs in PyTorch."""
