"""The engines of a linear layer, a feed-forward block and a gated one, each a `custom_vjp` of a plan."""
