"""Operations on sparse arrays: a function checks its arguments, and an `Operation` says what computes it.

One file per stem, the same in `reference`, in ffi/ and in the tests. An element is kept if a mask or a packed
array holds it; the others are zero, or not stored.

The name of an array whose shape is always the same ends in its sizes: `x_Tn` is (T, n). Arrays of any number
of dimensions, and those that a flag may transpose, have no such ending. The sizes, here and in docstrings:

    T  tokens               d  width of the model       f  width of the FFN
    R  rows of a matrix     n  features or columns in general     k  those of them that were chosen
    R, K, N  of a product (R, K) by (K, N)
    V, M  rows and columns of a block of V:N:M
"""
