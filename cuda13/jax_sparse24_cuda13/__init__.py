"""The CUDA kernels of jax_sparse24, which loads `_cuda` from here where it was not built from source."""
