"""The definition of every operation in jnp, on any backend, for float16, bfloat16, float32 and float64.

One file per operation, named as in `ops`, and two that they share: `bits` (formats of floats, comparison by
bits, groups of four) and `philox` (random words).

All functions take validated arrays, and axes counted from the end, and return bare arrays: the values,
metadata and, of V:N:M, columns of a packed result are a tuple. The CPU and CUDA kernels must agree with them
bit for bit, except for the sums of products."""
