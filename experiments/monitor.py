"""How the masks of the FFN kernels move: flip rate and kept share of |w|.

Flip rate r_t = |m(w_t) xor m(w_t-1)| / D over the D weights of all FFN kernels (arXiv 2404.01847), always
with masks computed freshly from the weights, whatever mask training is using. For a method that masks no
weight, the transposable mask that its weights would get, so that all arms are measured alike.
"""

import jax

import jax_sparse24 as s24


def ffn_kernels(params) -> list:
    """The FFN kernels (..., in, out) of a parameter tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [({str(getattr(key, "key", "")) for key in path}, leaf) for path, leaf in leaves]
    return [leaf for parts, leaf in names if {"ffn", "kernel"} <= parts]


class Monitor:
    """Measures one optimiser step: `masks` before and after it, then `compare`."""

    def __init__(self, method):
        def fresh(w):
            mask = method.fresh_mask(w)
            return s24.transposable_mask24(w) if mask is None else mask

        def compare(before, after, first, params):
            return {
                "flip_rate": s24.flip_rate(before, after),
                "flipped_since_start": s24.flip_rate(first, after),
                "kept_share": s24.kept_share(ffn_kernels(params), after),
            }

        self.masks = jax.jit(lambda params: [fresh(w) for w in ffn_kernels(params)])
        self.compare = jax.jit(compare)
