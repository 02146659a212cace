"""Train, evaluate, sample and report: the experiment half of jax_sparse24."""
