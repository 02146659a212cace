"""How a training loop sees a model: its parameters, what else its sparse layers keep, and the model of both.

`Modules` is the view of an NNX module, `Tree` that of a pytree of parameters without any module."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse24.engine.ffn import sparse_ffn
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.arrange import Move, arrange
from jax_sparse24.nn.linear import DUE, SparseState, Statistic
from jax_sparse24.nn.state import fold_key, layers_of, masks, observe, refresh


class View(Protocol):
    """What `s24.Loop` needs to know about a kind of model. `own` is what sparse layers keep besides
    parameters."""

    method: Method
    methods: tuple[Method, ...]

    def split(self) -> tuple[Any, Any]:
        """Copies of the parameters, and of what sparse layers keep."""

    def model(self, params, own, sparse: bool, adapters: bool):
        """What the loss gets, in one mode."""

    def refresh(self, params, own, step, *, sparse: bool, due: bool | frozenset[Method]):
        """`own` with the step recorded, and masks computed anew if `due`, or those of these methods."""

    def masks(self, params, own, sparse: bool):
        """The masks in use, for the optimiser; {} in a dense phase."""

    def fold(self, own, index):
        """`own` with noise keys of one micro-batch."""

    def statistics(self, own) -> tuple[Any, Any]:
        """The running statistics, and the rest."""

    def join(self, seen, rest):
        """The inverse of `statistics`."""

    def observe(self, own, seen):
        """`own` with running statistics that have seen one step."""

    def arrange(self, params, own):
        """Parameters and `own` with neurons in the method's order, and how they moved."""

    def entries(self, own, name: str) -> dict[str, jax.Array]:
        """The arrays of one name, by the path of their layer."""


class Modules:
    """The view of an NNX module. method: that which leads where layers have several, see `s24.Loop`."""

    def __init__(self, module: nnx.Module, method: Method | None = None):
        found = layers_of("Loop", module)
        paths = {layer.method: path for path, layer in found}
        each = ", ".join(f"{path}: {method}" for method, path in paths.items())
        if len(paths) > 1 and method not in paths:
            raise ValueError(
                f"Loop: the model's layers have several methods, {each}; give method=, that of them whose "
                "phases and order of neurons the loop follows."
            )
        self.methods = tuple(paths) or (Dense(),)
        self.method = method if len(paths) > 1 else self.methods[0]
        if any(other.router for other in self.methods if other != self.method):
            raise ValueError(f"Loop: of the methods {each} only method= may put neurons into an order.")
        self.module = module
        modes = [(sparse, adapters) for sparse in (False, True) for adapters in (False, True)]
        self._graphdefs = {mode: self._graphdef(found, *mode) for mode in modes}
        _, _, _, rest = nnx.split(module, nnx.Param, SparseState, ...)
        if kinds := {type(v).__name__ for _, v in nnx.to_flat_state(rest)}:
            raise ValueError(
                f"Loop: the model has variables of type {', '.join(sorted(kinds))}, which a step may change "
                "and this loop does not carry; build it without them (dropout, batch statistics), or write "
                "the loop with s24.refresh, s24.nn.fold_key and s24.nn.masks."
            )

    def graphdef(self, sparse: bool, adapters: bool = True):
        """The structure of the module in one mode."""
        return self._graphdefs[sparse, adapters]

    def _graphdef(self, layers, sparse: bool, adapters: bool):
        """Every layer is told its path. Computes nothing, and leaves the module as it is."""
        before = [(layer.sparse, layer.adapting, layer.path) for _, layer in layers]
        for path, layer in layers:
            layer.sparse, layer.adapting, layer.path = sparse, adapters, path
        graphdef = nnx.graphdef(self.module)
        for (_, layer), was in zip(layers, before, strict=True):
            layer.sparse, layer.adapting, layer.path = was
        return graphdef

    def split(self):
        _, params, own = nnx.split(self.module, nnx.Param, SparseState)
        return jax.tree.map(jnp.copy, (params, own))

    def model(self, params, own, sparse, adapters=True):
        # A copy has variables of this trace, so that nnx.scan over stacked layers may change them.
        return nnx.merge(self.graphdef(sparse, adapters), params, own, copy=True)

    def refresh(self, params, own, step, *, sparse, due):
        model = self.model(params, own, sparse)
        refresh(model, step, due=due)
        return nnx.state(model, SparseState)

    def masks(self, params, own, sparse):
        return masks(self.model(params, own, sparse)) if sparse else {}

    def fold(self, own, index):
        return fold_key(own, index)

    def statistics(self, own):
        return nnx.split_state(own, Statistic, ...)

    def join(self, seen, rest):
        return nnx.merge_state(seen, rest)

    def observe(self, own, seen):
        return observe(own, seen)

    def arrange(self, params, own):
        model = self.model(params, own, True)
        moves = arrange(model)
        _, params, own = nnx.split(model, nnx.Param, SparseState)
        return params, own, moves

    def entries(self, own, name):
        found = nnx.to_flat_state(own)
        return {".".join(map(str, path[:-1])): v[...] for path, v in found if path[-1] == name}


class TreeModel(NamedTuple):
    """What the loss of a `Tree` gets.

    params: the pytree of parameters.
    sparse: what each feed-forward block keeps, by its path.
    method: the method in a sparse phase, else Dense()."""

    params: Any
    sparse: dict[str, Any]
    method: Method

    def ffn(
        self, x: jax.Array, weights: Mapping[str, jax.Array], sparse: Mapping[str, Any], **options
    ) -> jax.Array:
        """`s24.sparse_ffn` in the mode of the phase, with `b2` added.

        x: (..., d).
        weights: "w1" (d, f), "w2" (f, d), and "b1" (f,) and "b2" (d,) where the block has biases.
        sparse: the block's entry of `sparse`; of stacked blocks the slice that belongs to `weights`.
        options: of `s24.sparse_ffn`, such as `activation`.

        Returns: (..., d)."""
        state = sparse["state"] if self.method.ffn_plan().rows else None
        key = jax.random.wrap_key_data(sparse["key"]) if self.method.stochastic else None
        w1, w2, b1, b2 = (weights.get(name) for name in ("w1", "w2", "b1", "b2"))
        y = sparse_ffn(x, w1, w2, self.method, state, key, b1=b1, **options)
        return y if b2 is None else y + b2


class Tree:
    """The view of a pytree of parameters, for models that are functions and need no module.

    A block is a dict with the matrices "w1" (..., d, f) and "w2" (..., f, d), and maybe the biases "b1" (...,
    f) and "b2"; blocks that are stacked have leading axes. The loss runs it by `TreeModel.ffn`.

    params: the pytree; dicts from the root to each block.
    method: from `s24.methods`.
    ffns: the path of each block, such as "blocks/ffn"; "" for the tree itself.
    key: a PRNG key, from which every block gets its noise key.

    Raises: TypeError if `method` is none; ValueError for a path without such matrices, and for a method with
        adapters, a learned router or running statistics, which need the layers of `s24.nn`."""

    def __init__(self, params, method: Method, ffns: Sequence[str], key: jax.Array):
        if not isinstance(method, Method):
            raise TypeError(f"Tree: method must be one of s24.methods, such as FST(), got {method!r}.")
        if isinstance(ffns, str) or not all(isinstance(path, str) for path in ffns):
            raise TypeError(f"Tree: ffns must be a list of paths, such as ['blocks/ffn'], got {ffns!r}.")
        router = method.router
        if type(method).adapters is not Method.adapters or (router and (router.learned or router.observed)):
            raise ValueError(f"Tree: {method} trains or observes more than w1 and w2; use s24.nn.FFN.")
        self.params, self.method, self.ffns, self.key = params, method, tuple(ffns), key
        self.methods = (method,)
        if not self.ffns:
            raise ValueError("Tree: ffns names 0 blocks; give the path of each, such as ['blocks/ffn'].")
        for path in self.ffns:
            block = self._block(params, path)
            missing = {"w1", "w2"} - (block.keys() if isinstance(block, Mapping) else set())
            if missing:
                raise ValueError(
                    f"Tree: {path!r} must be a dict with the matrices 'w1' and 'w2'; it lacks "
                    f"{min(missing)!r}."
                )

    def _block(self, params, path: str):
        for name in filter(None, path.split("/")):
            if not isinstance(params, Mapping) or name not in params:
                raise ValueError(f"Tree: the parameters have no {path!r}: there is no {name!r} on the way.")
            params = params[name]
        return params

    def _replaced(self, params, path: str, block):
        names = list(filter(None, path.split("/")))
        if not names:
            return block
        rest = "/".join(names[1:])
        return {**params, names[0]: self._replaced(params[names[0]], rest, block)}

    def split(self):
        own = {}
        for number, path in enumerate(self.ffns):
            block = self._block(self.params, path)
            lead = block["w1"].shape[:-2]
            keys = jax.random.split(jax.random.fold_in(self.key, number), lead)
            own[path] = {
                "state": {role: self.method.init(block[role], role) for role in ("w1", "w2")},
                "key": jax.random.key_data(keys),
                "step": jnp.zeros(lead, jnp.int32),
                "dense_from": jnp.zeros(lead, jnp.uint32),
            }
            if self.method.refresh_every:
                own[path]["refreshed"] = jnp.full(lead, DUE, jnp.int32)
        return jax.tree.map(jnp.copy, (self.params, own))

    def model(self, params, own, sparse, adapters=True):
        def folded(block):
            fold = jax.random.fold_in
            for _ in block["step"].shape:
                fold = jax.vmap(fold)
            words = jax.random.key_data(fold(jax.random.wrap_key_data(block["key"]), block["step"]))
            return {"state": block["state"], "key": words}

        blocks = {path: folded(block) for path, block in own.items()}
        return TreeModel(params, blocks, self.method if sparse else Dense())

    def refresh(self, params, own, step, *, sparse, due):
        def one(path, block):
            lead = block["step"].shape
            if step is not None:
                told = jnp.broadcast_to(jnp.asarray(step, jnp.int32), lead)
                block = block | {"step": told, "dense_from": jnp.full(lead, not sparse, jnp.uint32)}
            if not self.method.refresh_every:
                return block
            if not sparse:
                return block | {"refreshed": jnp.full(lead, DUE, jnp.int32)}
            if not due:
                return block
            weights = self._block(params, path)
            state = {r: self.method.refresh(block["state"][r], weights[r], r) for r in ("w1", "w2")}
            return block | {"state": state, "refreshed": jnp.copy(block["step"])}

        return {path: one(path, block) for path, block in own.items()}

    def masks(self, params, own, sparse):
        if not sparse:
            return {}
        found = jax.tree.map(lambda _: jnp.ones((), bool), params)
        for path, block in own.items():
            weights, place = self._block(params, path), dict(self._block(found, path))
            for role in ("w1", "w2"):
                stored = block["state"][role].get("mask")
                mask = self.method.fresh_mask(weights[role]) if stored is None else stored
                place[role] = place[role] if mask is None else mask
            found = self._replaced(found, path, place)
        return found

    def fold(self, own, index):
        def one(words):
            fold = jax.random.fold_in
            for _ in words.shape[:-1]:
                fold = jax.vmap(fold, in_axes=(0, None))
            return jax.random.key_data(fold(jax.random.wrap_key_data(words), index))

        return {path: block | {"key": one(block["key"])} for path, block in own.items()}

    def statistics(self, own):
        return {}, own

    def join(self, seen, rest):
        return rest

    def observe(self, own, seen):
        return own

    def arrange(self, params, own):
        moves = {}
        for path, block in own.items():
            weights = dict(self._block(params, path))
            w1 = np.asarray(weights["w1"])
            lead = w1.shape[:-2]
            found = [self.method.router.arrange(w) for w in w1.reshape(-1, *w1.shape[-2:])]
            order = jnp.asarray(np.stack([o for o, _ in found]).reshape(*lead, -1), jnp.int32)
            state = dict(block["state"]["w1"])
            for name in found[0][1]:
                values = jnp.stack([new[name] for _, new in found])
                state[name] = values.reshape(*lead, *values.shape[1:])
            for name, axis in (("w1", -1), ("b1", -1), ("w2", -2)):
                if name in weights:
                    move = moves[".".join([*filter(None, path.split("/")), name])] = Move(axis, order)
                    weights[name] = move(weights[name])
            params = self._replaced(params, path, weights)
            own = own | {path: block | {"state": block["state"] | {"w1": state}}}
        return params, own, moves

    def entries(self, own, name):
        found = {path: block[name] for path, block in own.items() if name in block}
        inside = {path: block["state"]["w1"] for path, block in own.items()}
        return found | {path: state[name] for path, state in inside.items() if name in state}
