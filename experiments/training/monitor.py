"""Whether sparse training is healthy: how the masks move, whether steps go downhill, what the gradient loses.

Flip rate r_t = |m(w_t) xor m(w_t-1)| / D over the D weights of all FFN kernels (arXiv 2404.01847), always
with masks computed freshly from the weights, whatever mask training is using. A method that masks no weight
is watched through a mask that its weights would get (`train.monitor_mask`), so that all arms are measured
alike. Rising loss and predicted against actual change are two more diagnostics of arXiv 2409.09099.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_sparse24 as s24
from experiments.training.step import Program, abstract_model, features_of, loss_of, losses_of, over_logits

RULERS = {"transposable": s24.transposable_mask24, "top-2": lambda w: s24.mask24(w, -2)}


FEED_FORWARD = s24.nn.FFN | s24.nn.GatedFFN | s24.nn.LowRankFFN


class Watched:
    """`watched(params)`: the kernels (..., in, out), of a tree like the parameters, that monitors look at.

    They are those of all sparse layers of the model, and those of its feed-forward blocks where these are
    dense, so that arms of every method are measured alike."""

    def __init__(self, model: nnx.Module):
        layers = dict(s24.nn.sparse_layers(model))
        for path, block in nnx.iter_modules(model):
            if isinstance(block, FEED_FORWARD):
                own = nnx.iter_modules(block)
                layers |= {(*path, *inner): m for inner, m in own if isinstance(m, s24.nn.Linear)}
        self.layers = {(*path, "kernel"): layer for path, layer in layers.items()}

    def __call__(self, params) -> list:
        return [leaf for _, leaf in self._found(params)]

    def by_tiles(self, function, size, params) -> list:
        """`s24.sharding.by_tiles` of a function of each kernel."""
        found = self._found(params)
        return [s24.sharding.by_tiles(function, size, layer.rests, leaf) for layer, leaf in found]

    def _found(self, params) -> list:
        """Layer and kernel of each."""

        def name(path):
            return tuple(key.key for key in path if hasattr(key, "key"))

        leaves = jax.tree_util.tree_leaves_with_path(params)
        return [(self.layers[name(path)], leaf) for path, leaf in leaves if name(path) in self.layers]


def _floats(values) -> dict:
    return {name: float(value) for name, value in values.items()}


class Monitor:
    """Measures one optimiser step: `masks` before and after it, then `compare` and `descent`.

    method: whose fresh masks are compared; the program's own by default."""

    def __init__(self, program: Program, method=None):
        method = method or program.config.method
        self.masks, self._compare = program.once(("masks", method), lambda: _of_masks(program.config, method))

    def compare(self, before, after, first, params) -> dict:
        """How far masks moved in this step and since the first one (if that is given), and the share of |w|
        that they keep."""
        return _floats(self._compare(before, after, first, params))

    def descent(self, metrics: dict, loss_after) -> dict:
        """What the step did to the loss on its own batch: predicted to first order, actual, and whether up.

        The loss after it is with the masks that the next step would use, so a refresh that is due counts.
        """
        change = float(loss_after) - float(metrics["loss"])
        return {
            "predicted_change": float(metrics["predicted"]),
            "loss_change": change,
            "rising": float(change > 0),
        }


def _of_masks(config, method):
    """Fresh masks of parameters, and how masks before and after a step differ: two compiled functions."""
    watched = Watched(abstract_model(config))

    def masks(params):
        found = watched.by_tiles(method.fresh_mask, method.tiles, params)
        if any(mask is None for mask in found):
            found = watched.by_tiles(RULERS[config.train.monitor_mask], (4, 4), params)
        return found

    def compare(before, after, first, params):
        since = {} if first is None else {"flipped_since_start": s24.flip_rate(first, after)}
        return {
            "flip_rate": s24.flip_rate(before, after),
            "kept_share": s24.kept_share(watched(params), after),
            **since,
        }

    return jax.jit(masks), jax.jit(compare)


class Leak:
    """How much the sparse forward pass knows of tokens that are still to come, by calls of (params, sparse,
    batches), batches being at least two arrays int32 (B, L + 1).

    Every second batch lends its text to the one before it: up to some position all tokens stay, and from the
    next on they are replaced by the other batch's. What is then predicted at that position knows of no later
    token; the masks are chosen from the prefix and from text that says nothing about it. `leak`: by how many
    nats the loss there is higher than with the true continuation, mean over the sequences and over `CUTS`
    positions; `leak_error`: its standard error over the pairs of batches, None for one pair; `leak_share`:
    the share of the logits up to there that change at all. All are 0, exactly, for a causal method."""

    CUTS = 4

    def __init__(self, graphdefs: dict):
        def measure(params, sparse, tokens_BL, other_BL):
            length = tokens_BL.shape[1] - 1
            cuts = jnp.asarray([length * (2 * n + 1) // (2 * self.CUTS) for n in range(self.CUTS)])
            model = nnx.merge(graphdefs[True], params, sparse)
            s24.refresh(model)  # on this copy only: the run keeps its masks
            graphdef, variables = nnx.split(model)
            sure = features_of(model, tokens_BL[:, :-1])

            def without_later(cut):
                prefix = jnp.arange(length + 1) <= cut
                inner = nnx.merge(graphdef, variables, copy=True)  # for models with an `nnx.scan`
                blind = features_of(inner, jnp.where(prefix, tokens_BL, other_BL)[:, :-1])
                parts = over_logits(_change, (inner, inner), (sure, blind), tokens_BL[:, 1:])
                change_BL, moved_BL = (jnp.moveaxis(x, 0, 1).reshape(-1, length) for x in parts)
                moved_BL &= prefix[:-1]
                return change_BL[:, cut].mean(), moved_BL.sum() / (len(tokens_BL) * (cut + 1))

            nats, share = jax.lax.map(without_later, cuts)
            return {"leak": nats.mean(), "leak_share": share.mean()}

        self._measure = jax.jit(measure)

    def __call__(self, params, sparse, batches) -> dict:
        pairs = zip(batches[::2], batches[1::2], strict=False)
        found = jax.device_get([self._measure(params, sparse, *pair) for pair in pairs])
        nats, shares = (np.array([float(one[name]) for one in found]) for name in ("leak", "leak_share"))
        error = float(nats.std(ddof=1) / np.sqrt(len(nats))) if len(nats) > 1 else None
        return {"leak": float(nats.mean()), "leak_error": error, "leak_share": float(shares.mean())}


def _change(logits, arrays):
    """Of two models: by how much the loss of the second is higher, and whether its logits are others."""
    (sure_BCV, blind_BCV), (targets_BC,) = logits, arrays
    higher_BC = losses_of(blind_BCV, targets_BC) - losses_of(sure_BCV, targets_BC)
    return higher_BC, jnp.any(blind_BCV != sure_BCV, axis=-1)


class Probe:
    """`probe(params, sparse, sparse_phase)`: activations and gradients on a fixed batch.

    Of every FFN n whose model has `activation_stats`, whatever the phase: `density_n`, the share of non-zeros
    of Y2, and for the method's cuts of Y2 what `s24.activation_stats` says they lose, such as `F2_lost_n`;
    and the means over the FFNs, such as `density`. In a sparse phase, of the gradient of the watched kernels:
    cosine, that of the sparse and the dense one at the same weights (1 would be no harm); noise, what share
    of the sparse one's squared norm its random cut adds, from two draws, |g1 - g2|^2 / (|g1|^2 + |g2|^2), 0
    without a draw.
    """

    def __init__(self, program: Program, tokens_BL):
        self.tokens_BL = tokens_BL
        self.draws = 2 if program.config.method.stochastic else 1
        self._gradient, self._compare, self._activations = program.once("probe", lambda: _probes(program))

    def __call__(self, params, sparse, sparse_phase: bool) -> dict:
        values = self._activations(params, sparse, self.tokens_BL)
        if sparse_phase:
            # One after the other, so that no more activations stand in memory at once than in a step.
            draws = [self._gradient(True, params, sparse, self.tokens_BL, n) for n in range(self.draws)]
            dense = self._gradient(False, params, sparse, self.tokens_BL, 0)
            values |= self._compare(draws[0], draws[-1], dense)
        return _floats(values)


def _probes(program: Program):
    """A gradient, what two sparse ones and a dense one say, and what activations do: compiled functions."""
    graphdefs, watched = program.graphdefs, Watched(abstract_model(program.config))

    def gradient(sparse_phase, params, sparse, tokens_BL, draw):
        own = s24.nn.fold_key(sparse, draw)
        grads = jax.grad(lambda p: loss_of(nnx.merge(graphdefs[sparse_phase], p, own), tokens_BL))(params)
        return watched(grads)

    def compare(one, other, dense):
        norm, dot = optax.tree.norm, optax.tree.vdot
        squares = norm(one, squared=True) + norm(other, squared=True)
        return {
            "cosine": dot(one, dense) / (norm(one) * norm(dense)),
            "noise": norm(optax.tree.sub(one, other), squared=True) / squares,
        }

    def activations(params, sparse, tokens_BL):
        layers = nnx.merge(graphdefs[False], params, sparse).activation_stats(tokens_BL[:, :-1])
        each = {f"{name}_{n}": x for name, values in layers.items() for n, x in enumerate(values)}
        return each | {name: values.mean() for name, values in layers.items()}

    return jax.jit(gradient, static_argnums=0), jax.jit(compare), jax.jit(activations)
