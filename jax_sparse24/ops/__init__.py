"""Operations on sparse arrays: a function checks its arguments, and an `Operation` says what computes it.

One file per stem, the same in `reference`, in ffi/ and in the tests. Sizes in the shapes that they name:

    T  tokens               d  width of the model       f  width of the FFN
    M, K, N  of a product (M, K) by (K, N)              R  rows of a packed matrix
    V, M  rows and columns of a block of V:N:M          n  features or columns in general
"""
