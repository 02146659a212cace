"""How a training loop sees a model: its parameters, what else its sparse layers keep, and the model of both.

`Modules` is the view of an NNX module, `Equinox` that of a model of this library, `Tree` that of a pytree of
parameters without any module."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.engine.ffn import check_widths, sparse_ffn
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import sharding
from jax_sparse24.nn.arrange import Move, arrange, new_order
from jax_sparse24.nn.linear import DUE, Linear, SparseState, Statistic
from jax_sparse24.nn.state import equinox_of, fold_key, layers_of, masks, observe, refresh, sparse_layers
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.patterns import as_list, check_dtype, key_of

# Paths of the layers that ran, by the structure of models: JAX traces a function once for all of one.
RAN_IN: dict[nnx.GraphDef, set[str]] = {}


class View(Protocol):
    """What `s24.Loop` needs to know about a kind of model.

    All functions but `split` take pytrees that `split` made, or that other functions of the view made of
    them, and leave them as they are.

    method: that whose phases and order of neurons the loop follows.
    methods: those of all sparse layers.
    paths: of the sparse layers that the model has to call.
    ran: those of them that ran in a function that was traced, for this model or another one of its structure;
        None for a model without layers."""

    method: Method
    methods: tuple[Method, ...]
    paths: tuple[str, ...] = ()
    ran: set[str] | None = None

    def split(self) -> tuple[Any, Any]:
        """Takes the model apart.

        Returns: copies of the parameters, and `own`, of what sparse layers keep besides; two pytrees."""

    def model(self, params: Any, own: Any, sparse: bool, adapters: bool = True) -> Any:
        """Puts the model together, in one mode.

        params, own: as of `split`.
        sparse: whether products are sparse.
        adapters: whether low-rank adapters take part.

        Returns: what the loss gets."""

    def refresh(
        self,
        params: Any,
        own: Any,
        step: jax.typing.ArrayLike | None,
        *,
        sparse: bool,
        due: bool | frozenset[Method],
    ) -> Any:
        """Records a step, and computes masks anew.

        params, own: as of `split`.
        step: number of the optimiser step, an integer; None to record none.
        sparse: whether the phase is sparse.
        due: whether masks are computed anew, or the methods whose masks are.

        Returns: the new `own`."""

    def masks(self, params: Any, own: Any, sparse: bool) -> Any:
        """The masks in use, for the optimiser.

        params, own: as of `split`.
        sparse: whether the phase is sparse.

        Returns: a pytree of bool arrays like the parameters; {} in a dense phase."""

    def fold(self, own: Any, index: jax.typing.ArrayLike) -> Any:
        """Folds noise keys with the number of a micro-batch.

        own: as of `split`.
        index: number of the micro-batch in its step, an integer.

        Returns: the new `own`."""

    def statistics(self, own: Any) -> tuple[Any, Any]:
        """Takes running statistics out of what sparse layers keep.

        own: as of `split`.

        Returns: the statistics, and the rest."""

    def join(self, seen: Any, rest: Any) -> Any:
        """The inverse of `statistics`.

        seen, rest: as `statistics` returned them.

        Returns: `own`."""

    def observe(self, own: Any, seen: Any) -> Any:
        """Records that running statistics have seen one step.

        own: as of `split`.
        seen: the gradient of the loss by the statistics.

        Returns: the new `own`."""

    def arrange(self, params: Any, own: Any) -> tuple[Any, Any, dict[str, Move]]:
        """Puts neurons into the method's order.

        params, own: as of `split`.

        Returns: new parameters, the new `own`, and how the axes of parameters moved, by their paths."""

    def entries(self, own: Any, name: str) -> dict[str, jax.Array]:
        """Finds what sparse layers keep under one name.

        own: as of `split`.
        name: such as "mask" or "refreshed".

        Returns: the arrays, by the path of their layer."""

    def method_of(self, path: str) -> Method:
        """Finds the method of one sparse layer.

        path: of the layer, as in `entries`.

        Returns: the method."""


class Modules(View):
    """The view of an NNX module.

    module: with layers of `s24.nn`.
    method: that which leads where layers have several, see `s24.Loop`.

    Raises: TypeError for a model without sparse layers, ValueError for one that `s24.Loop` refuses."""

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
        self._methods = {".".join(map(str, path)): layer.method for path, layer in sparse_layers(module)}
        layers = [".".join(map(str, path)) for path, m in nnx.iter_modules(module) if isinstance(m, Linear)]
        self._dense = set(layers) - set(self._methods)  # whose method is Dense: no step changes their state
        places = {(layer.sparse, layer.adapting): path for path, layer in reversed(found)}
        if len(places) > 1:
            one, other, *_ = places.values()
            raise ValueError(
                f"Loop: {one} is in another mode than {other}, and the loop switches all by its phases. Make "
                "a layer that stays dense by method=None, or leave it out by s24.Rule(path, None); or switch "
                "all of them by s24.nn.set_sparse and s24.nn.set_adapting."
            )
        self.module = module
        modes = [(sparse, adapters) for sparse in (False, True) for adapters in (False, True)]
        self._graphdefs = {mode: self._graphdef(found, *mode) for mode in modes}
        self.paths = tuple(path for path, _ in found)
        self.ran = RAN_IN.setdefault(self.graphdef(True), set())
        _, _, _, rest = nnx.split(module, nnx.Param, SparseState, ...)
        if kinds := {type(v).__name__ for _, v in nnx.to_flat_state(rest)}:
            raise ValueError(
                f"Loop: the model has variables of type {', '.join(sorted(kinds))}, which a step may change "
                "and this loop does not carry; build it without them (dropout, batch statistics), or write "
                "the loop with s24.refresh, s24.nn.fold_key and s24.nn.masks."
            )

    def graphdef(self, sparse: bool, adapters: bool = True) -> nnx.GraphDef:
        """The structure of the module in one mode.

        sparse, adapters: as in `model`.

        Returns: a graph definition of NNX."""
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
        model = Modules.model(self, params, own, sparse)
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
        found = {".".join(map(str, path[:-1])): v for path, v in nnx.to_flat_state(own) if path[-1] == name}
        return {path: v[...] for path, v in found.items() if path not in self._dense}

    def method_of(self, path):
        return self._methods[path]


class Equinox(Modules):
    """The view of a model of Equinox with layers of `s24.sparsify`, whose products are the NNX module.

    model, method: as in `s24.Loop`."""

    def __init__(self, model: Any, method: Method | None = None):
        self.library = equinox_of(model)
        super().__init__(self.library.products(model), method)
        self.params, self._rest = self.library.parameters(model)

    def split(self):
        _, own = super().split()
        return jax.tree.map(jnp.copy, self.params), own

    def model(self, params, own, sparse, adapters=True):
        products = super().model(self.library.kernels(params), own, sparse, adapters)
        return self.library.with_products(self.library.joined(params, self._rest), products)

    def refresh(self, params, own, step, *, sparse, due):
        return super().refresh(self.library.kernels(params), own, step, sparse=sparse, due=due)

    def masks(self, params, own, sparse):
        return masks(self.model(params, own, sparse)) if sparse else {}


class Blocks(View):
    """What views of parameters without modules share: each block's state, noise key, step, mode and age of
    masks, by its name.

    A block is some matrices (..., in, out) by their roles; blocks that are stacked have leading axes."""

    params: Any
    method: Method
    methods: tuple[Method, ...]
    key: jax.Array

    def weights(self, params) -> dict[str, dict[str, jax.Array]]:
        """Finds the matrices of each block.

        params: the parameters.

        Returns: by the block's name and their roles, arrays (..., in, out)."""
        raise NotImplementedError

    def split(self):
        own = {}
        for number, (name, block) in enumerate(self.weights(self.params).items()):
            lead = next(iter(block.values())).shape[:-2]
            keys = jax.random.split(jax.random.fold_in(key_of(self.key), number), lead)
            own[name] = {
                "state": {role: self.method.init(w, role) for role, w in block.items()},
                "key": jax.random.key_data(keys),
                "step": jnp.zeros(lead, jnp.int32),
                "dense_from": jnp.zeros(lead, jnp.uint32),
            }
            if self.method.refresh_every:
                own[name]["refreshed"] = jnp.full(lead, DUE, jnp.int32)
        return jax.tree.map(jnp.copy, (self.params, own))

    def folded(self, own) -> dict[str, dict[str, Any]]:
        """State and noise key of each block in this step.

        own: as of `split`.

        Returns: {"state": ..., "key": ...} by the block's name."""

        def one(block):
            fold = jax.random.fold_in
            for _ in block["step"].shape:
                fold = jax.vmap(fold)
            words = jax.random.key_data(fold(key_of(block["key"]), block["step"]))
            return {"state": block["state"], "key": words}

        return {name: one(block) for name, block in own.items()}

    def refresh(self, params, own, step, *, sparse, due):
        due = bool(due and sparse and self.method.refresh_every)
        weights = self.weights(params) if due else {}

        def refreshed(role, state, w):
            return sharding.by_tiles(
                lambda w, state: self.method.refresh(state, w, role), self.method.tiles, None, w, state
            )

        def one(name, block):
            lead = block["step"].shape
            if step is not None:
                told = jnp.broadcast_to(jnp.asarray(step, jnp.int32), lead)
                block = block | {"step": told, "dense_from": jnp.full(lead, not sparse, jnp.uint32)}
            if self.method.refresh_every and not sparse:
                return block | {"refreshed": jnp.full(lead, DUE, jnp.int32)}
            if not due:
                return block
            state = {role: refreshed(role, block["state"][role], w) for role, w in weights[name].items()}
            return block | {"state": state, "refreshed": jnp.copy(block["step"])}

        return {name: one(name, block) for name, block in own.items()}

    def in_use(self, params, own) -> dict[str, dict[str, jax.Array]]:
        """The masks of each block; those that a method without stored masks chooses for the weights as they
        are.

        params, own: as of `split`.

        Returns: by the block's name and the roles of its matrices, bool arrays (..., in, out)."""
        found = {}
        for name, block in self.weights(params).items():
            stored = {role: own[name]["state"][role].get("mask") for role in block}
            fresh, tiles = self.method.fresh_mask, self.method.tiles
            masks = {
                role: sharding.by_tiles(fresh, tiles, None, w) if stored[role] is None else stored[role]
                for role, w in block.items()
            }
            found[name] = {role: mask for role, mask in masks.items() if mask is not None}
        return found

    def fold(self, own, index):
        def one(words):
            fold = jax.random.fold_in
            for _ in words.shape[:-1]:
                fold = jax.vmap(fold, in_axes=(0, None))
            return jax.random.key_data(fold(key_of(words), index))

        return {name: block | {"key": one(block["key"])} for name, block in own.items()}

    def statistics(self, own):
        return {}, own

    def join(self, seen, rest):
        return rest

    def observe(self, own, seen):
        return own

    def entries(self, own, name):
        found = {}
        for path, block in own.items():
            for place in (block, *block["state"].values()):
                if name in place:
                    found[path] = place[name]
        return found

    def method_of(self, path):
        return self.method


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
        key = key_of(sparse["key"]) if self.method.stochastic else None
        w1, w2, b1, b2 = (weights.get(name) for name in ("w1", "w2", "b1", "b2"))
        y = sparse_ffn(x, w1, w2, self.method, state, key, b1=b1, **options)
        return y if b2 is None else y + b2


class Tree(Blocks):
    """The view of a pytree of parameters, for models that are functions and need no module.

    A block is a dict with the matrices "w1" (..., d, f) and "w2" (..., f, d), and maybe the biases "b1" (...,
    f) and "b2"; blocks that are stacked have leading axes. The loss runs it by `TreeModel.ffn`.

    params: the pytree; dicts from the root to each block.
    method: from `s24.methods`.
    ffns: the path of each block, such as "blocks/ffn"; "" for the tree itself.
    key: a PRNG key, from which every block gets its noise key.

    Raises: TypeError if `method` is none, or `key`, or for what is no array of floats; ValueError for a path
        without such matrices, for arrays that fit neither each other nor the method, and for a method with
        adapters, a learned router or running statistics, which need the layers of `s24.nn`."""

    def __init__(self, params: Any, method: Method, ffns: Sequence[str], key: jax.Array):
        if not isinstance(method, Method):
            raise TypeError(f"Tree: method must be one of s24.methods, such as FST(), got {method!r}.")
        ffns = as_list("Tree", "ffns", ffns, "paths, such as 'blocks/ffn'")
        if not all(isinstance(path, str) for path in ffns):
            raise TypeError(f"Tree: ffns must be a list of paths, such as ['blocks/ffn'], got {ffns!r}.")
        router = method.router
        routed = router and (router.learned or router.observed)
        if method.trains_adapters or routed or method.histories:
            raise ValueError(f"Tree: {method} trains or observes more than w1 and w2; use s24.nn.FFN.")
        self.params, self.method, self.ffns = params, method, tuple(ffns)
        self.key = key_words("Tree", key)
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
            self._check_block(path, block)

    def _check_block(self, path: str, block: Mapping) -> None:
        """Raises TypeError or ValueError unless the arrays of a block fit each other and the method."""
        place = repr(path) if path else "the tree"
        there = {name: block[name] for name in ("w1", "w2")}
        there |= {name: block[name] for name in ("b1", "b2") if block.get(name) is not None}
        for name, x in there.items():
            what = f"{name} of {place}"
            if not hasattr(x, "dtype"):
                raise TypeError(f"Tree: {what} must be an array, got {type(x).__name__}.")
            check_dtype("Tree", what, x.dtype)
            if x.ndim < 2 and name in ("w1", "w2"):
                raise ValueError(f"Tree: {what} must be a matrix (..., in, out), got shape {x.shape}.")
        *lead, d, f = block["w1"].shape
        out = block["w2"].shape[-1]
        if block["w2"].shape != (*lead, f, out):
            raise ValueError(
                f"Tree: w2 of {place} has shape {block['w2'].shape}; beside w1 of shape {block['w1'].shape} "
                f"it must be {(*lead, f, out)}."
            )
        for name, size in {"b1": f, "b2": out}.items():
            if name in there and there[name].shape[-1:] not in ((), (size,)):
                raise ValueError(
                    f"Tree: {name} of {place} has shape {there[name].shape}, which must end in {size}."
                )
        check_widths(f"Tree: {place}", self.method, d, f)

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

    def weights(self, params):
        blocks = {path: self._block(params, path) for path in self.ffns}
        return {path: {role: block[role] for role in ("w1", "w2")} for path, block in blocks.items()}

    def model(self, params, own, sparse, adapters=True):
        return TreeModel(params, self.folded(own), self.method if sparse else Dense())

    def masks(self, params, own, sparse):
        if not sparse:
            return {}
        found = jax.tree.map(lambda _: jnp.ones((), bool), params)
        for path, chosen in self.in_use(params, own).items():
            found = self._replaced(found, path, {**self._block(found, path), **chosen})
        return found

    def arrange(self, params, own):
        moves = {}
        for path, block in own.items():
            weights = dict(self._block(params, path))
            order, entries = new_order(self.method.router, weights["w1"])
            state = {**block["state"]["w1"], **entries}
            for name, axis in (("w1", -1), ("b1", -1), ("w2", -2)):
                if name in weights:
                    move = moves[".".join([*filter(None, path.split("/")), name])] = Move(axis, order)
                    weights[name] = move(weights[name])
            params = self._replaced(params, path, weights)
            own = own | {path: block | {"state": block["state"] | {"w1": state}}}
        return params, own, moves


def view_of(model: Any, method: Method | None = None) -> View:
    """The view of a model.

    model, method: as in `s24.Loop`.

    Returns: a `View`.
    Raises: as `s24.Loop`."""
    view = model if isinstance(model, Blocks) else (Equinox if equinox_of(model) else Modules)(model, method)
    if method is not None and method not in view.methods:
        raise ValueError(
            f"Loop: method={method!r} is none of the layers' methods, {', '.join(map(str, view.methods))}. "
            "Leave it out, or give one of them."
        )
    return view
