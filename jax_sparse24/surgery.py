"""`sparsify` puts sparse layers into a model that was written without them, `densify` takes them out."""

import re
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from jax_sparse24.dispatch.decision import check_implementation
from jax_sparse24.engine.operand import check_activation
from jax_sparse24.interception import check_where, nearest_path
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import fitting
from jax_sparse24.nn.adapters import add_something
from jax_sparse24.nn.fitting import Unfit, replaced_block
from jax_sparse24.nn.linear import Linear, check_method
from jax_sparse24.nn.state import equinox_of, sparse_layers
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.patterns import key_of

# Layers after which no matrix product of the model follows, or whose result chooses experts.
LEFT_ALONE = re.compile(r"(\w*_)?head|(un|de)embed(ding)?|logits|router")


@dataclass(frozen=True)
class Rule:
    """Which layers of a model `s24.sparsify` takes, and what becomes of them.

    where: a regular expression, which the whole path of a layer, such as "blocks/0/mlp/up_proj", must match,
        or that of a module which holds it. For a method that needs a feed-forward block, or with `up`, that
        of the block.
    method: from `s24.methods`; None to leave these layers as they are, whatever other rules say.
    up, down, gate: paths within the block of its linear layers, such as "fc1" or "layers/0". With them the
        block, which computes `down(act(up(x)))` or `down(act(gate(x)) * up(x))`, runs as one. None to find
        up and down where a method needs a block.
    activation: of the block, as in `s24.nn.FFN`; None to find it.

    Raises: TypeError for arguments of other types; ValueError for an expression that does not compile, names
        of layers that do not belong together, a method that cannot have a gate, an unknown activation."""

    where: str
    method: Method | None
    up: str | None = None
    down: str | None = None
    gate: str | None = None
    activation: str | None = None

    def __post_init__(self):
        check_where("Rule", self.where)
        for role, path in self.names.items():
            if not isinstance(path, str):
                raise TypeError(f"Rule: {role} must be a string, got {path!r}.")
        if self.method is not None:
            check_method("Rule", self.method)
        if (self.up is None) != (self.down is None) or (self.gate and not self.up):
            raise ValueError(
                f"Rule: up={self.up!r}, down={self.down!r}, gate={self.gate!r} name a part of a block; give "
                "up and down, and gate for a block with a gate."
            )
        if self.activation is not None:
            check_activation("Rule", self.activation)
        if self.method is None and (self.up or self.activation):
            raise ValueError(
                "Rule: method=None leaves layers as they are, and takes no up, down or activation."
            )
        if self.gate and self.method.needs_block:
            raise ValueError(
                f"Rule: {self.method} has no table for a block with a gate; use a method with sparse "
                "weights, such as FST()."
            )

    @property
    def of_blocks(self) -> bool:
        """Whether the rule is about feed-forward blocks, not single layers."""
        return self.method is not None and (self.up is not None or self.method.needs_block)

    @property
    def names(self) -> dict[str, str]:
        """The paths of a block's linear layers by their roles; {} to find them."""
        named = {"gate": self.gate, "up": self.up, "down": self.down}
        return {role: path for role, path in named.items() if path is not None}

    def takes(self, path: str) -> bool:
        """Whether `where` matches a path, or one of those above it.

        path: names with "/" between them."""
        parts = path.split("/")
        return any(re.fullmatch(self.where, "/".join(parts[:n])) for n in range(len(parts), 0, -1))


def sparsify(
    model: Any,
    method: Method | Sequence[Rule],
    where: str | None = None,
    *,
    key: jax.Array | None = None,
    implementation: str | None = None,
) -> Any:
    """Makes the products of a model's layers sparse, in place if it is an NNX module.

    Layers of the types `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum` are replaced by layers of `s24.nn`
    that have the very same `nnx.Param` objects under the same names, so that outputs of dense steps,
    checkpoints and optimisers of the parameters stay as they are. A method that makes activations sparse
    needs a feed-forward block: a module with two linear layers, whatever its name, which is run on random
    numbers to find out whether it computes `down(act(up(x)))`, and with which activation. Layers may be
    stacked along their first axis, as `nnx.vmap` makes them for `nnx.scan`.

    A model of Equinox stays as it is. In its copy, layers `eqx.nn.Linear` are replaced by layers with the
    very same arrays, whose masks and noise keys are leaves of the model beside them; what `jax.vmap` maps
    them over are the tokens of one product.

    Embeddings and norms are left alone, and so is the head, which is a layer with a name such as "head", or
    whose output is as wide as an embedding; a rule that is the whole path of such a layer takes it. A layer
    that does not fit its method stays dense, with a warning that says why; `s24.explain(model)` lists all.

    model: an NNX module, or an Equinox module. If it is itself a layer, use what is returned.
    method: from `s24.methods`; or a list of `s24.Rule`, of which only one may take a layer.
    where: for one method, as in `s24.Rule`; None for every layer.
    key: a PRNG key for the noise of methods that draw; None for `jax.random.key(0)`.
    implementation: as in `s24.nn.Linear`.

    Returns: the model, or its copy.
    Raises: TypeError for arguments of other types, and for a model with shapes in place of arrays; ValueError
        for rules that match nothing or of which two take one layer, a method that needs a block on single
        layers, or in a model of Equinox, and a layer that is sparse already."""
    library = _library("sparsify", model)
    if _has_shapes(model):
        raise TypeError(
            "sparsify: the model has shapes in place of arrays. Make it sparse inside: "
            "nnx.eval_shape(lambda: s24.sparsify(make(), method)), or eqx.filter_eval_shape."
        )
    check_implementation("sparsify", implementation)
    rules = _rules(method, where)
    words = key_words("sparsify", jax.random.key(0) if key is None else key)
    sites = library.sites(model)
    chosen = _chosen(library, sites, rules)
    new, unfit = {}, {}
    known: list = []
    for path, rule in chosen.items():
        noise = jax.random.fold_in(key_of(words), zlib.crc32(path.encode()) & 0x7FFFFFFF)
        try:
            if rule.of_blocks:
                options = rule.names, rule.activation, implementation, noise, known
                new[path] = replaced_block(sites[path], rule.method, *options)
            else:
                library.check_layer(sites[path], rule.method)
                new[path] = library.replacement(sites[path], rule.method, implementation, noise, path)
        except Unfit as reason:
            unfit[path] = str(reason)
    listed = "; ".join(f"{path or 'the model'}: {reason}" for path, reason in unfit.items())
    if not new:
        raise ValueError(f"sparsify: none of the layers that the rules take fits its method. {listed}.")
    if where is None and isinstance(method, Method):
        unfit = {path: reason for path, reason in unfit.items() if not chosen[path].of_blocks}
    if unfit:
        warnings.warn(
            f"sparsify: {len(unfit)} of the layers that the rules take stay dense. {listed}.", stacklevel=2
        )
    return library.replaced(model, new)


def densify(model: Any) -> Any:
    """Undoes `s24.sparsify`, in place if it is an NNX module: every layer is again of the type that it was,
    with its present values.

    Parameters stay the very `nnx.Param` objects, or arrays, of dense values; masks and noise keys are gone.
    Of a method that puts neurons into an order (`Venom`) they stay in that order, in which the model computes
    the same. Trained layers in sparse mode whose products multiply sparse weights, as those of `STE` do to
    the end, are warned of: a plain layer computes something else than they do.
    `s24.nn.merge_adapters(model)` writes the sparse weights into the kernels before.

    model: as `s24.sparsify` returned it, or a copy of it, such as that of `Loop.model`.

    Returns: the model, of Equinox a copy; use it if the model was itself a layer.
    Raises: TypeError if `model` is no such module, or has shapes in place of arrays; ValueError if it holds
        no layer that `s24.sparsify` made, or one with low-rank adapters that add something, which would be
        lost."""
    library = _library("densify", model)
    if _has_shapes(model):
        raise TypeError(
            "densify: the model has shapes in place of arrays. Make the model with its arrays dense, and "
            "take the shapes of that one."
        )
    found = {}
    for path, module in library.sites(model).items():
        if isinstance(module, Linear) and add_something(module):
            raise ValueError(
                f"densify: {path.replace('/', '.') or 'the model'} has low-rank adapters that add something, "
                "which would be lost; fold them into the kernels first, by s24.nn.merge_adapters(model)."
            )
        if (old := library.original(module)) is not None:
            found[path] = old
    if not found:
        written = (
            " Its layers are of s24.nn: s24.nn.merge_adapters(model) writes what they multiply into their "
            "kernels, and nnx.update(dense, nnx.state(model, nnx.Param)) gives these to the same model built "
            "with method=None, or of nnx.Linear."
        )
        is_written = any(isinstance(module, Linear) for module in library.sites(model).values())
        raise ValueError(
            f"densify: the model holds no layer that s24.sparsify made.{written if is_written else ''}"
        )
    layers = [layer for _, layer in sparse_layers(model if library is fitting else library.products(model))]
    cut = [layer for layer in layers if layer.trained_sparse]
    if cut:
        names = ", ".join(sorted({type(layer.method).__name__ for layer in cut}))
        warnings.warn(
            f"densify: {len(cut)} layers of {names} multiply sparse weights in their present mode; plain "
            "layers multiply the dense kernels, which no sparse step has trained for that. "
            "model = s24.nn.merge_adapters(model) before it writes the sparse weights into the kernels.",
            stacklevel=2,
        )
    return library.replaced(model, found)


def left_dense(model: Any, method: Method | None = None) -> list[tuple[str, tuple[int, ...], str]]:
    """The linear layers of a model that are dense, and why.

    model: an NNX module, or an Equinox module.
    method: that of the model's sparse layers, with whose groups widths are compared; None to leave that out.

    Returns: (path, shape of the kernel, reason) of every linear layer, such as `nnx.Einsum` or
        `eqx.nn.Linear`, and of every layer of this package without a sparse method."""
    library = _library("explain", model)
    sites = library.sites(model)
    found = []
    for path, layer in sites.items():
        reason, own = None, library.sparse_method(layer)
        if isinstance(layer, library.PLAIN) and own is None:
            reason = "no rule of s24.sparsify has taken it"
            if is_head(path, sites):
                reason = "it is left alone as a head; a rule with its whole path takes it"
            try:
                library.check_layer(layer, None if method is None or method.needs_block else method)
            except Unfit as unfit:
                reason = str(unfit)
        elif own is not None and not own.ffn_plan().rows:
            reason = "its method is Dense"
        if reason:
            found.append((path, library.kernel_shape(layer), reason))
    return found


def _has_shapes(model) -> bool:
    values = nnx.state(model) if isinstance(model, nnx.Module) else model
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(values))


def _rules(method, where) -> list[Rule]:
    if isinstance(method, type | Method):
        check_method("sparsify", method)
        return [Rule(".*" if where is None else where, method)]
    if isinstance(method, str) or not isinstance(method, Sequence):
        raise TypeError(
            "sparsify: method must be one of s24.methods, such as FST(), or a list of s24.Rule, got "
            f"{method!r}."
        )
    if where is not None:
        raise ValueError(
            f"sparsify: where={where!r} is for one method; rules have their own, s24.Rule(where, ...)."
        )
    for rule in method:
        if not isinstance(rule, Rule):
            raise TypeError(f"sparsify: rules must be s24.Rule(where, method), got {rule!r}.")
    if not any(rule.method is not None for rule in method):
        raise ValueError("sparsify: no rule has a method; give at least one, such as s24.Rule('.*', FST()).")
    return list(method)


def _library(op: str, model) -> ModuleType:
    """What knows the layers of a model: `nn.fitting` for NNX, or `nn.equinox`."""
    library = equinox_of(model)
    if library is None and not isinstance(model, nnx.Module):
        got = type(model).__name__
        raise TypeError(
            f"{op}: needs the model, an nnx.Module or an equinox.Module, got {got}; for models of other "
            "libraries there is s24.Function."
        )
    return library or fitting


def is_head(path: str, sites: dict[str, Any]) -> bool:
    """Whether `s24.sparsify` leaves a layer alone because of its place in the model.

    path: of a linear layer, with "/" between names.
    sites: all modules of the model by their paths."""
    if LEFT_ALONE.fullmatch(path.split("/")[-1]):
        return True
    width = getattr(sites[path], "out_features", None)
    ends = getattr(sites[path], "in_features", None), width
    embeddings = [
        (getattr(m, "features", getattr(m, "embedding_size", None)), m.num_embeddings)  # of NNX, of Equinox
        for m in sites.values()
        if hasattr(m, "num_embeddings")
    ]
    # A layer beside one that takes as many features as it gives is one of a block, whatever its width.
    above = path.rpartition("/")[0]
    beside = [m for other, m in sites.items() if other != path and other.rpartition("/")[0] == above]
    return ends in embeddings and width not in [getattr(m, "in_features", None) for m in beside]


def _chosen(library: ModuleType, sites, rules) -> dict[str, Rule]:
    """The rules that take modules, by the paths of these."""
    ours = {path: library.sparse_method(m) for path, m in sites.items()}
    plain = [path for path, m in sites.items() if isinstance(m, library.PLAIN) and ours[path] is None]
    without = [rule for rule in rules if rule.method is None]
    chosen: dict[str, Rule] = {}
    by: dict[str, Rule] = {}  # the rule that takes a linear layer, alone or in its block
    for rule in rules:
        if rule.of_blocks and library is not fitting:
            raise ValueError(
                f"sparsify: where={rule.where!r} with {rule.method} is for feed-forward blocks, which are "
                "only found in NNX modules; use a method with sparse weights, such as FST(), and name single "
                "layers."
            )
        places = _blocks(sites, plain) if rule.of_blocks else {path: [path] for path in plain}
        matched = [path for path in places if rule.takes(path)]
        _check_sparse_already(rule, ours)
        if not matched:
            raise ValueError(_nothing(rule, places, plain) + _built_dense([rule], ours))
        if rule.method is None:
            continue
        for path in matched:
            head = not rule.of_blocks and is_head(path, sites) and rule.where != path
            if head or any(other.takes(path) for other in without):
                continue
            for layer in places[path]:
                if layer in by:
                    raise ValueError(
                        f"sparsify: two rules take {layer or 'the model'}: where={by[layer].where!r} with "
                        f"{by[layer].method} and where={rule.where!r} with {rule.method}. Make one of them "
                        "narrower, or exclude layers by s24.Rule(where, None)."
                    )
                by[layer] = rule
            chosen[path] = rule
    if not chosen:
        raise ValueError(
            "sparsify: the rules take nothing but layers that are left alone, such as the head, or that "
            "another rule excludes. Give the whole path of a layer to take it nevertheless."
            + _built_dense(rules, ours)
        )
    return chosen


def _blocks(sites, plain) -> dict[str, list[str]]:
    """Modules that may be feed-forward blocks: the paths of the linear layers that each holds itself."""
    found: dict[str, list[str]] = {}
    for path in plain:
        above = path
        while above:
            above = "/".join(above.split("/")[:-1])
            if not isinstance(sites.get(above), nnx.List | nnx.Dict | None):
                found.setdefault(above, []).append(path)
                break
    return {path: layers for path, layers in found.items() if len(layers) > 1}


def _check_sparse_already(rule: Rule, ours) -> None:
    for path, method in ours.items():
        if None not in (method, rule.method) and method.ffn_plan().rows and rule.takes(path):
            raise ValueError(
                f"sparsify: {path or 'the model'} is sparse already, with {method}; the rule where="
                f"{rule.where!r} would make it {rule.method}. Call s24.densify(model) first, or make "
                "the rule narrower."
            )


def _built_dense(rules, ours) -> str:
    """A sentence about a layer of this package that is dense and that a rule matches; "" if there is none."""
    for path, method in ours.items():
        dense = method is not None and not method.ffn_plan().rows
        if dense and any(rule.method is not None and rule.takes(path) for rule in rules):
            return (
                f" {path or 'The model'} is a layer of s24.nn, which gets its method where it is built, by "
                "method=."
            )
    return ""


def _nothing(rule: Rule, places, plain) -> str:
    what = "feed-forward block" if rule.of_blocks else "linear layer"
    single = [path for path in plain if rule.of_blocks and rule.takes(path)]
    if single and rule.up is None:
        fix = f"name the module that holds it, {single[0].rpartition('/')[0]!r}" if "/" in single[0] else ""
        return (
            f"sparsify: {rule.method} makes activations sparse and needs a feed-forward block, but where="
            f"{rule.where!r} takes the single layer {single[0] or 'the model'}; "
            f"{fix or 'use a method with sparse weights, such as FST()'}."
        )
    if not places:
        return f"sparsify: the model has no {what} that could become sparse."
    return (
        f"sparsify: where={rule.where!r} matches no {what}; the nearest path is "
        f"{nearest_path(places, rule.where)!r}. The whole path must match: write '.*' for any text."
    )
