"""How one call of an engine is cut over the axes of a mesh.

`pieces` packs and gathers what is cut, `tiles` refreshes state on the shards where weights rest; the other
files of the engines know no mesh, but for the sums over axes that are handed to them.

The differentiation rules of the engines take and return global arrays. Each runs its body in one
`jax.shard_map`, in which every device sees its shards, and three rules say what is communicated:

- a product whose contracted axis is cut is summed over the mesh axes that cut it;
- a gradient of something that all tokens share is summed over the mesh axes that cut tokens;
- a weight that rests in pieces over mesh axes that cut tokens (FSDP) is gathered for each product, packed
  where the product multiplies it packed, and its gradient is summed and scattered in one step. What is kept
  for the backward pass is the piece.

Nothing else moves. What the body saves for the backward pass stays on its device.

The same bodies compute on one device what several shards of tokens compute: its tokens are cut into blocks,
which are shards along an axis of `jax.vmap`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch.shards import (
    TOKENS,
    check_declared,
    cut_of,
    manual_over,
    mesh_axes,
    spec_text,
    under_jit,
    varying_as,
)
from jax_sparse24.engine.pieces import Axes, Pieces
from jax_sparse24.ops.mvue import key_of_shard
from jax_sparse24.ops.order import permute

BLOCKS = "token_blocks"  # the axis of the blocks of tokens on one device; to collectives it is a mesh axis

# The dimensions of every operand, a letter each; the same letter is the same dimension. T are tokens. What
# histories have seen of operands is summed over all shards and the same on each.
SEEN = {"seen": ""}
DIMENSIONS = {
    "linear": {"x": "Ti", "w": "io", "dy": "To", "bias": "o", **SEEN},
    "ffn": {
        **{"x": "Ti", "w1": "if", "b1": "f", "y2": "Tf", "allowed": "Tf", "w2": "fo", "y3": "To"},
        **{"dy1": "Tf", "dy3": "To", "order": "T", "back": "T"},
        **{"some": "Td", "norms": "Kf", "centroids": "dK"},  # d and K are never cut
        **SEEN,
    },
    "gated": {
        **{"x_gate": "Ti", "x_up": "Ti", "gate": "if", "up": "if", "down": "fo", "dy": "To"},
        **{"gate_bias": "f", "up_bias": "f", "down_bias": "o"},
        **SEEN,
    },
}
# The letters that the layers of a gated block have as a linear layer.
LAYERS = {
    "gate": {"T": "T", "i": "i", "o": "f"},
    "up": {"T": "T", "i": "i", "o": "f"},
    "down": {"T": "T", "i": "f", "o": "o"},
}


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the operands of one call are cut.

    products: the table of the operands, a key of `DIMENSIONS`.
    cuts: the mesh axes that cut each dimension in the products, by its letter.
    stored: per weight and axis (-2, -1), the mesh axes over which it rests in pieces besides.
    sizes: the number of devices along each mesh axis that is used, in the order of the mesh.
    manual: the mesh axes over which the bodies are manual.
    blocks: into how many blocks the tokens of every shard are cut.
    state_axes: see `Method.state_axes`."""

    products: str
    cuts: tuple[tuple[str, Axes], ...]
    stored: tuple[tuple[tuple[str, int], Axes], ...]
    sizes: tuple[tuple[str, int], ...]
    manual: frozenset[str]
    blocks: int = 1
    state_axes: tuple[tuple[str, tuple[int | None, ...]], ...] = ()

    @property
    def tokens(self) -> Axes:
        """The axes that cut tokens, `BLOCKS` among them if shards are cut into blocks."""
        return dict(self.cuts)["T"] + (BLOCKS,) * (self.blocks > 1)

    @property
    def token_shards(self) -> int:
        """Into how many shards and blocks all tokens are cut."""
        return self.blocks * math.prod(dict(self.sizes)[axis] for axis in dict(self.cuts)["T"])

    def over(self, operand: str, axis: int) -> Axes:
        """The axes that cut an operand of a product along an axis.

        operand: its name.
        axis: -1 or -2."""
        letter = DIMENSIONS[self.products][operand][axis]
        return self.tokens if letter == "T" else dict(self.cuts)[letter]

    def shard_text(self, operand: str, shape: tuple[int, ...]) -> str:
        """A sentence that says of what a shard of an operand is one, for messages.

        operand: its name.
        shape: of the shard, (rows, columns)."""
        sizes, told = {**dict(self.sizes), BLOCKS: self.blocks}, []
        for axis in (-2, -1):
            if over := self.over(operand, axis):
                n, along = math.prod(map(sizes.get, over)), " * ".join(f"{a} = {sizes[a]}" for a in over)
                what = "tokens" if DIMENSIONS[self.products][operand][axis] == "T" else "features"
                told.append(
                    f"of the {shape[axis] * n} {what} along axis {axis} it has one part in {n} ({along})"
                )
        return f" That is the shape on one device: {', and '.join(told)}." if told else ""

    def rests(self, operand: str, axis: int) -> Axes:
        """The mesh axes that cut an operand along an axis where it rests, between calls.

        operand: its name.
        axis: counted from the end."""
        cut = dict(self.cuts).get(DIMENSIONS[self.products][operand][axis], ())
        return cut + dict(self.stored).get((operand, axis), ())

    def spec(self, operand: str) -> PartitionSpec:
        """How an operand is cut where it rests, by its name."""
        rank = len(DIMENSIONS[self.products][operand])
        return PartitionSpec(*(self.rests(operand, axis) or None for axis in range(-rank, 0)))

    def specs(self, arrays: Mapping[str, jax.Array], state):
        """How operands and the state of their weights are cut.

        A state of its weight's shape is cut as the weight. One of another shape is whole, but along the axes
        that `state_axes` names, where it is cut as the weight in the products.

        arrays: the operands by name, or what has their shapes.
        state: of the method: of a linear layer alone, else of every weight by its name."""

        def spec(weight, name, entry):
            if entry.shape == arrays[weight].shape:
                return self.spec(weight)
            along = dict(self.state_axes).get(name, ())
            return PartitionSpec(*(axis and (self.over(weight, axis) or None) for axis in along))

        states = {
            weight: {name: spec(weight, name, entry) for name, entry in entries.items()}
            for weight, entries in self._states(state).items()
        }
        state_specs = states["w"] if self.products == "linear" else states
        return {name: self.spec(name) for name in arrays}, state_specs

    def layer(self, name: str) -> "Partition":
        """How one layer of a gated block is cut, within the body.

        name: "gate", "up" or "down"."""
        cuts, letters = dict(self.cuts), LAYERS[name]
        own = tuple((letter, cuts[there]) for letter, there in letters.items())
        return dataclasses.replace(self, products="linear", cuts=own, stored=())

    def resharded(self, arrays: Mapping[str, jax.Array], state):
        """Operands and state with the types that `run` takes, where the axes of the mesh are explicit.

        arrays: the operands by name.
        state: as in `specs`."""
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return arrays, state
        return jax.tree.map(jax.sharding.reshard, (arrays, state), self.specs(arrays, state))

    def run(
        self,
        body: Callable,
        arrays: Mapping[str, jax.Array],
        state,
        key,
        saved=None,
        *,
        results: Sequence[str],
        gradient_mask: str = "",
    ):
        """Runs the body of a differentiation rule on the shards of every device.

        body: (arrays, state, key, saved) -> the results by name and what is saved for the backward pass, any
            structure of arrays or None. Weights and states that rest in pieces are `Pieces` in it.
        arrays: global operands by name.
        state: of the method, as in `specs`.
        key: of the draws, the same on all devices; any structure.
        saved: what the body of the forward pass saved; None there.
        results: names of the operands that the results are, or that they are gradients of.
        gradient_mask: see `Plan.gradient_mask`; of weights in pieces it is applied here, to the piece.

        Returns: the results, global arrays by name, and what the body saved."""
        weights, states = self.specs(arrays, state)
        of_devices = PartitionSpec(tuple(axis for axis, _ in self.sizes))  # a piece on every device

        def local(arrays, state, key, saved):
            if any(weight in results for (weight, _), _ in self.stored):
                # Without the barrier XLA would keep what the forward pass gathered until here.
                arrays, state = jax.lax.optimization_barrier((arrays, state))
            arrays, state = self._pieces(arrays, state)
            found, saves = self._in_blocks(body, arrays, state, key, saved, results)
            found = {name: self._summed(name, x) for name, x in found.items()}
            for name in found:
                mask = self._states(state).get(name, {}).get(gradient_mask)
                if isinstance(mask, Pieces):
                    found[name] = jnp.where(mask.piece, found[name], jnp.zeros_like(found[name]))
            return found, saves

        def of_shard(arrays, state, key, saved):
            found, saves = local(arrays, state, key, jax.tree.map(lambda a: a[0], saved))
            return found, jax.tree.map(lambda a: a[None], saves)

        if not self.sizes:
            return local(arrays, state, key, saved)
        sharded = jax.shard_map(
            of_shard,
            in_specs=(weights, states, PartitionSpec(), of_devices),
            out_specs=({name: self.spec(name) for name in results}, of_devices),
            axis_names=self.manual,
            check_vma=False,
        )
        operands = arrays, state, key, saved
        # Within a shard_map of the user, results vary over its axes, which this one, not checked, forgets.
        return varying_as(under_jit(sharded, operands)(*operands), arrays)

    def _in_blocks(self, body: Callable, arrays, state, key, saved, results):
        """The results of a body for every block of tokens, summed over blocks where all tokens share them."""
        if self.blocks == 1:
            return body(arrays, state, key, saved)

        def has_tokens(name):
            return "T" in DIMENSIONS[self.products][name]

        def of_block(arrays, state, key, saved):
            found, saves = body(arrays, state, key, saved)
            return {n: x if has_tokens(n) else jax.lax.psum(x, BLOCKS) for n, x in found.items()}, saves

        def blocks_of(x):
            return x.reshape(self.blocks, x.shape[0] // self.blocks, *x.shape[1:])

        arrays = {name: blocks_of(x) if has_tokens(name) else x for name, x in arrays.items()}
        over = {name: 0 if has_tokens(name) else None for name in (*arrays, *results)}
        found, saves = jax.vmap(
            of_block,
            in_axes=({name: over[name] for name in arrays}, None, None, 0),
            out_axes=({name: over[name] for name in results}, 0),
            axis_name=BLOCKS,
        )(arrays, state, key, saved)
        whole = {n: x.reshape(-1, *x.shape[2:]) if has_tokens(n) else x for n, x in found.items()}
        return whole, saves

    def _pieces(self, arrays, state):
        """`Pieces` in place of weights, and the state of their shape, that rest in pieces."""
        sizes = dict(self.sizes)

        def marked(weight, x):
            own = [(axis, axes) for (name, axis), axes in self.stored if name == weight]
            if not own or x.shape != arrays[weight].shape:
                return x
            return Pieces(x, tuple((axis, axes, math.prod(sizes[a] for a in axes)) for axis, axes in own))

        if not self.stored:
            return arrays, state
        states = {
            weight: {name: marked(weight, entry) for name, entry in entries.items()}
            for weight, entries in self._states(state).items()
        }
        state = states["w"] if self.products == "linear" else states
        return {name: marked(name, x) for name, x in arrays.items()}, state

    def _states(self, state) -> Mapping[str, Mapping]:
        """The state of every weight, by its name."""
        return {"w": state} if self.products == "linear" else state

    def _summed(self, name: str, x):
        """A result, summed over the shards of tokens if every token adds to it, as to a weight's gradient."""
        if "T" in DIMENSIONS[self.products][name]:
            return x
        if name in SEEN:
            return jax.lax.psum(x, tuple(axis for axis, _ in self.sizes)) if self.sizes else x
        tokens = dict(self.cuts)["T"]
        over = set(tokens)
        for (weight, axis), axes in self.stored:
            if weight == name:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=axis % x.ndim, tiled=True)
                over -= set(axes)
        left = tuple(axis for axis in tokens if axis in over)
        return jax.lax.psum(x, left) if left else x


def draw_key(products: str, cut: Partition | None, key: jax.Array, operand: str) -> jax.Array:
    """The key with which this shard of an operand draws what the whole operand would draw there.

    products: a key of `DIMENSIONS`.
    cut: how the call is cut; None if it is not.
    key: one PRNG key, the same on all devices.
    operand: its name."""
    rows, columns = ((), ()) if cut is None else (cut.over(operand, axis) for axis in (-2, -1))
    if DIMENSIONS[products][operand][-2] == "T":
        rows = TOKENS.value + rows
    if cut is None and not rows:
        return key
    above, left = (jax.lax.axis_index(axes) if axes else 0 for axes in (rows, columns))
    across = math.prod(dict(cut.sizes)[axis] for axis in columns) if columns else 1
    return key_of_shard(key, above, left, across)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def permute_shards(cut: Partition, name: str, x_Tn, order_R, inverse_T):
    """`ops.order.permute` of the tokens within each shard, and each block.

    cut: how the call is cut.
    name: of the operand.
    x_Tn: the operand, a global array.
    order_R, inverse_T: of every block one after the other, with the places of its own tokens.

    Returns: (R, n)."""
    return _rows_of_shards(cut, name, x_Tn, order_R, inverse_T)


def _rows_of_shards(cut, name, x_Tn, order_R, inverse_T):
    def body(arrays, *_):
        return {name: permute(arrays[name], arrays["order"], arrays["back"])}, None

    arrays = {name: x_Tn, "order": order_R, "back": inverse_T}
    return cut.run(body, arrays, {}, None, results=[name])[0][name]


permute_shards.defvjp(
    lambda cut, name, x_Tn, order_R, inverse_T: (
        _rows_of_shards(cut, name, x_Tn, order_R, inverse_T),
        (order_R, inverse_T),
    ),
    lambda cut, name, saved, ct_Rn: (_rows_of_shards(cut, name, ct_Rn, *saved[::-1]), None, None),
)


def partition(
    op: str,
    products: str,
    specs: Mapping[str, PartitionSpec] | None,
    arrays: Mapping[str, jax.Array],
    token_blocks: int = 1,
) -> Partition | None:
    """How a call is cut, from how its operands are.

    op: the function, for messages.
    products: a key of `DIMENSIONS`.
    specs: how "x" and the weights are cut over the mesh in the context, by name; operands that are not named
        are whole. None to read the types of the arrays, which tell it where axes are explicit.
    arrays: "x", (..., in), and the weights, by name; or what has their shapes.
    token_blocks: see `Method.token_blocks`.

    Returns: a `Partition`; None if nothing is cut.
    Raises: TypeError for specs of another kind; ValueError for ones that do not fit the mesh, the arrays or
        each other."""
    mesh = jax.sharding.get_abstract_mesh()
    if specs is None and not any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays.values()):
        if token_blocks == 1:
            return None
        specs = {}
    elif specs is None:
        specs = {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    if not isinstance(specs, Mapping):
        raise TypeError(f"{op}: specs must be a dict of PartitionSpecs by operand, got {specs!r}.")
    unknown = sorted(specs.keys() - arrays.keys())
    if unknown:
        known = ", ".join(arrays)
        raise ValueError(f"{op}: specs name {', '.join(unknown)}; name operands alone: {known}.")
    if mesh.empty and any(axes for spec in specs.values() for axes in spec):
        raise ValueError(
            f"{op}: the operands are cut over a mesh, but there is no mesh in the context; call it inside "
            "`with jax.set_mesh(mesh):`."
        )
    found = {
        name: mesh_axes(op, name, specs.get(name, PartitionSpec()), x.ndim) for name, x in arrays.items()
    }

    def text(name):
        return spec_text(specs.get(name, PartitionSpec()))

    check_tokens(op, arrays["x"], specs.get("x", PartitionSpec()))
    *leading, features = found.pop("x")
    tokens = leading[0] if leading else ()
    cuts, stored, sources = {"T": tokens}, [], {}
    for weight, dims in DIMENSIONS[products].items():
        if weight not in found:
            continue
        for axis, letter in zip((-2, -1), dims, strict=True):
            axes = found[weight][axis]
            rests = tuple(a for a in axes if a in tokens)
            cut = axes[: len(axes) - len(rests)]
            if cut + rests != axes:
                raise ValueError(
                    f"{op}: {weight} is cut by {text(weight)}; along one axis, mesh axes that cut tokens, "
                    f"here {', '.join(rests)}, must come last."
                )
            if rests:
                stored.append(((weight, axis), rests))
            if cuts.setdefault(letter, cut) != cut:
                other = sources[letter]
                raise ValueError(
                    f"{op}: {other} is cut by {text(other)} and {weight} by {text(weight)}, but they share a "
                    "dimension, which must be cut over the same mesh axes in both."
                )
            sources.setdefault(letter, weight)
    if features and features != cuts["i"]:
        if arrays["x"].ndim == 1:
            raise ValueError(
                f"{op}: x of shape {arrays['x'].shape} is one vector, without the axis of tokens that "
                f"{text('x')} cuts. Give it rows that {' * '.join(features)} divides, or call this where no "
                "mesh is in the context."
            )
        first = next(iter(sources.values()))
        raise ValueError(
            f"{op}: x is cut by {text('x')}, its features too, but {first}, which takes them, by "
            f"{text(first)}. Cut the features of x and the first axis of the weight over the same mesh axes, "
            "or leave those of x whole."
        )
    for name, x in arrays.items():
        there = cut_of(x)
        as_asked = (
            name == "x" and not features and there and mesh_axes(op, name, there, x.ndim)[-1] == cuts["i"]
        )
        declared = specs.get(name, PartitionSpec())
        check_declared(op, name, declared, x, axes=slice(-1 if as_asked else None))
    used = [axis for axes in cuts.values() for axis in axes]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise ValueError(
            f"{op}: mesh axis {twice[0]!r} cuts two dimensions of one product; use one axis for each."
        )
    if not used and token_blocks == 1:
        return None
    sizes = tuple((axis, mesh.shape[axis]) for axis in mesh.axis_names if axis in used)
    made = Partition(products, tuple(cuts.items()), tuple(stored), sizes, manual_over(used))
    _check_divides(op, "x along axis 0", arrays["x"].shape[0], tokens, made)
    for name in found:
        for axis in (-2, -1):
            size, axes = arrays[name].shape[axis], made.rests(name, axis)
            _check_divides(op, f"{name} along axis {axis}", size, axes, made)
    return made if token_blocks == 1 else _with_blocks(op, made, token_blocks, arrays["x"].shape)


def check_tokens(op: str, x, spec: PartitionSpec) -> None:
    """Raises ValueError unless an input is cut along its first axis and its features alone.

    op: the function, for messages.
    x: (..., in), or what has its shape.
    spec: how it is cut."""
    if any(mesh_axes(op, "x", spec, x.ndim)[1:-1]):
        raise ValueError(
            f"{op}: x of shape {x.shape} is cut by {spec_text(spec)}; only its first axis and its features "
            "may be cut. Cut the batch in place of the sequence."
        )


def _with_blocks(op: str, cut: Partition, token_blocks: int, shape: tuple[int, ...]) -> Partition:
    """A partition that cuts all tokens into a number of blocks, of x of a shape."""
    shards = math.prod(dict(cut.sizes)[axis] for axis in cut.tokens)
    T = math.prod(shape[:-1])
    if token_blocks % shards:
        raise ValueError(
            f"{op}: token_blocks={token_blocks} is no multiple of the {shards} shards of tokens; use a "
            "multiple, or 1 for a block in every shard."
        )
    if T % token_blocks:
        raise ValueError(
            f"{op}: x of shape {shape} has {T} tokens, which token_blocks={token_blocks} does not divide; "
            "use another number of tokens, or token_blocks=1."
        )
    return dataclasses.replace(cut, blocks=token_blocks // shards)


def of_layers(specs: Mapping[str, PartitionSpec] | None, rank: int) -> dict[str, dict[str, PartitionSpec]]:
    """How each layer of a gated block is cut as a linear layer of its own.

    specs: of "x", "gate", "up" and "down", or None.
    rank: the number of axes of x.

    Returns: the specs of `sparse_dot` by layer; {} for None."""
    if specs is None:
        return {}
    x, down = specs.get("x", PartitionSpec()), specs.get("down", PartitionSpec())
    hidden = PartitionSpec(*(*x, *(None,) * (rank - len(x)))[:-1], down[0] if down else None)
    found = {name: {"x": x, "w": specs.get(name, PartitionSpec())} for name in ("gate", "up")}
    return {**found, "down": {"x": hidden, "w": down}}


def _check_divides(op: str, what: str, size: int, axes: Axes | None, made: Partition) -> None:
    sizes = dict(made.sizes)
    n = math.prod(sizes[a] for a in axes or ())
    if size % n:
        along = " * ".join(f"{a} = {sizes[a]}" for a in axes)
        raise ValueError(
            f"{op}: {what} of size {size} does not divide into {n} shards ({along}); use a multiple of {n}."
        )
