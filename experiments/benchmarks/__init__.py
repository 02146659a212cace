"""Benchmarks: what sparsity costs and gains on this machine, with every result checked."""
