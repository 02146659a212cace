"""The engines of a linear layer, a feed-forward block and a gated one, each a `custom_vjp` that executes a
plan.

A call goes from its engine (`linear`, `ffn`, `gated`) to `execution`, which makes and multiplies the operands
of one product after the other, by the `plan` of a method and the `sparsifiers` that it names. `fusions` holds
the passes that do several such steps at once.

Suffixes of array names in this package: T tokens, d model width, f FFN width, R rows of tokens with padding.
A shape (T, d, f) names these sizes; X, Y1, Y2, Y3 are input, hidden values before and after the activation,
and output of an FFN, and dY1 is the gradient with respect to Y1. To cut an operand is to keep some elements
of each of its groups and drop the others. The support of a sparse array is where it keeps elements."""
