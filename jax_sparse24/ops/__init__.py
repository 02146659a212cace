"""Operations on sparse arrays: a function checks its arguments, and an `Operation` says what computes it.

One file per stem, the same in `reference`, in ffi/ and in the tests. An element is kept if a mask or a packed
array holds it; the others are zero, or not stored.

Sizes in shapes, and at the end of names of arrays, where a shape is always the same (`x_Tn` is (T, n)):

    T  tokens               d  width of the model       f  width of the FFN
    M, K, N  of a product (M, K) by (K, N)              R  rows of a matrix
    V, M  rows and columns of a block of V:N:M          n  features or columns in general
    k  columns or features that were chosen
"""
