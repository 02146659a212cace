"""What models of this folder share: looking up embeddings, rotary positions, a ring of keys and values, and
how arrays lie on a mesh.

Shape suffixes: B sequences, L tokens, S slots of a cache, d width, H heads, h head width, V vocabulary.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import jax_sparse24 as s24

ROPE_BASE = 10_000.0
# Rows up to which accelerators sum gradients of a table by a product: its time grows with the rows. Measured
# on an H200 (experiments/benchmarks/results/probe/nvidia-h200_embedding_2026-11-24.md).
ROWS_BY_PRODUCT = 1024


@jax.custom_vjp
def look_up(table_Vd, tokens_BL):
    """Rows of a table, by int32 tokens."""
    return table_Vd[tokens_BL]


def sums_by_product(tokens_BL, ct_BLd, vocabulary: int):
    """What each row of the table gets, as a product with one-hot tokens."""
    tokens_BLV = jax.nn.one_hot(tokens_BL, vocabulary, dtype=ct_BLd.dtype)
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.einsum("blv,bld->vd", tokens_BLV, ct_BLd, **options).astype(ct_BLd.dtype)


def sums_by_segment(tokens_BL, ct_BLd, vocabulary: int):
    """What each row of the table gets, by sorting tokens and adding what equal ones get in pairs: in float32,
    in one order, and in time that hardly depends on the rows."""
    tokens_T, ct_Td = tokens_BL.reshape(-1), ct_BLd.reshape(-1, ct_BLd.shape[-1])
    order_T = jnp.argsort(tokens_T)
    tokens_T, sums_Td = tokens_T[order_T], ct_Td[order_T].astype(jnp.float32)
    changes = tokens_T[1:] != tokens_T[:-1]
    begins_T, ends_T = (jnp.pad(changes, one, constant_values=True) for one in ((1, 0), (0, 1)))

    def add(left, right):
        return left[0] | right[0], jnp.where(right[0][:, None], right[1], left[1] + right[1])

    _, sums_Td = jax.lax.associative_scan(add, (begins_T, sums_Td))
    # The last one of each token has the sum; the others go to places that are not there.
    places_T = jnp.where(ends_T, tokens_T, vocabulary + jnp.arange(len(tokens_T)))
    table_Vd = jnp.zeros((vocabulary, ct_Td.shape[-1]), jnp.float32)
    return table_Vd.at[places_T].set(sums_Td, mode="drop", unique_indices=True).astype(ct_BLd.dtype)


def _gradient_of_table(residuals, ct_BLd):
    table_Vd, tokens_BL = residuals
    if len(table_Vd) > ROWS_BY_PRODUCT:
        return sums_by_segment(tokens_BL, ct_BLd, len(table_Vd)), None
    add = lambda tokens_BL, ct_BLd: jnp.zeros_like(table_Vd).at[tokens_BL].add(ct_BLd)  # noqa: E731
    # On an accelerator tokens that add to few rows wait for each other.
    product = partial(sums_by_product, vocabulary=len(table_Vd))
    return jax.lax.platform_dependent(tokens_BL, ct_BLd, cpu=add, default=product), None


look_up.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _gradient_of_table)


def rotate(x_BLHh, first=0, base: float = ROPE_BASE):
    """Rotary positions (arXiv 2104.09864) in float32: turn pair (i, i + h/2) by position * base^(-2i/h).

    first: the position of the first token."""
    length, half = x_BLHh.shape[1], x_BLHh.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (first + jnp.arange(length, dtype=jnp.float32))[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x_BLHh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHh.dtype)


def attend(q_BLHh, k_BLKh, v_BLKh, cache, first, implementation: str):
    """Causal attention over these tokens, or with a cache (keys, values) also over those in it.

    Returns: (B, L, H, h), and the cache with these tokens, None without one."""
    if cache is None:
        run = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
        mesh = jax.sharding.get_abstract_mesh()
        others = set(mesh.axis_names) - set(mesh.manual_axes)
        if mesh.manual_axes and others:  # JAX partitions cuDNN's calls among all axes or none
            cut = _spec(("batch", None, "heads", None), mesh.manual_axes)
            options = {"axis_names": others, "check_vma": False}
            run = jax.shard_map(run, in_specs=(cut,) * 3, out_specs=cut, **options)
        return run(q_BLHh, k_BLKh, v_BLKh), None
    places, visible_LS = slots(first, q_BLHh.shape[1], cache[0].shape[1])
    cache = [old.at[:, places].set(new) for old, new in zip(cache, (k_BLKh, v_BLKh), strict=True)]
    return jax.nn.dot_product_attention(q_BLHh, *cache, mask=visible_LS[None, None]), cache


class Residual(nnx.Module):
    """A block of `attention` and `ffn`, each after its norm and added to the residual stream."""

    def __call__(self, x_BLd, cache=None, first=0):
        """The block's output, and its cache, None without one."""
        y_BLd, cache = self.attention(self.norm1(x_BLd), cache, first)
        x_BLd = x_BLd + y_BLd
        return x_BLd + self.ffn(self.norm2(x_BLd)), cache


def run_block(graphdef, state, x_BLd, remat: bool):
    """The output of a block that was split.

    remat: whether it is computed again in the backward pass."""

    def run(state, x):
        return laid(nnx.merge(graphdef, state)(x)[0], "batch", None, None)

    return (jax.checkpoint(run) if remat else run)(state, x_BLd)


def slots(first, length: int, size: int):
    """Slots of the tokens from position `first` on in a ring of `size`, and which slots each of them sees:
    those of earlier tokens that have not been overwritten."""
    position_L = first + jnp.arange(length)
    last = first + length - 1
    position_S = last - (last - jnp.arange(size)) % size  # of the token in each slot
    return position_L % size, (position_S >= 0) & (position_S <= position_L[:, None])


def named(*names) -> dict:
    """The metadata of a parameter with these logical axes."""
    return s24.sharding.metadata(names)


def laid(x, *names):
    """An array cut over the mesh in the context by the names of its logical axes; as it is without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(names, mesh.manual_axes))


def gathered(parameter, dtype):
    """The value of a parameter as a product takes it: whole along the mesh axes that cut the batch, along
    which it rests in pieces. Its gradient is summed and scattered."""
    mesh, names = jax.sharding.get_abstract_mesh(), parameter.get_metadata().get("out_sharding")
    value = parameter[...].astype(dtype)
    if mesh.empty or not names:
        return value
    spec = _spec(names, {*mesh.manual_axes, *_axes("batch")})
    return jax.lax.with_sharding_constraint(value, spec)


class Copies(nnx.Variable):
    """In place of a parameter: a copy for each shard of tokens, cut over the mesh along its first axis. What
    reads them adds up gradients on each device, which are summed over devices once, in their dtype."""


class Embedding(nnx.Embed):
    """An embedding (V, d), which may be the output head, too; each device takes its own sequences.

    Left to itself, XLA may gather the gradient of all tokens to sum it by rows."""

    def __init__(self, vocabulary: int, d: int, dtype, rngs: nnx.Rngs):
        options = {"embedding_init": nnx.initializers.normal(0.02), "dtype": dtype, "rngs": rngs}
        super().__init__(vocabulary, d, embedding_metadata=named("vocab", "embed"), **options)

    def __call__(self, tokens_BL):
        """Rows (B, L, d) of int32 tokens."""
        return _on_rows(look_up, self.embedding, self.dtype, tokens_BL)

    def attend(self, x_BLd):
        """Products (B, L, V) of features with all rows."""
        times = lambda table_Vd, x_BLd: jnp.dot(x_BLd, table_Vd.T)  # noqa: E731
        return _on_rows(times, self.embedding, self.dtype, x_BLd)


class Head(nnx.Linear):
    """An output head (d, V) that is not the embedding; each device takes its own sequences."""

    def __init__(self, d: int, vocabulary: int, dtype, rngs: nnx.Rngs):
        options = {"kernel_metadata": named("embed", "vocab"), "dtype": dtype, "rngs": rngs}
        super().__init__(d, vocabulary, use_bias=False, **options)

    def __call__(self, x_BLd):
        """Logits (B, L, V) of features."""
        times = lambda kernel_dV, x_BLd: jnp.dot(x_BLd, kernel_dV)  # noqa: E731
        return _on_rows(times, self.kernel, self.dtype, x_BLd.astype(self.dtype))


def copies(parameter, dtype) -> Copies:
    """See `Copies`; there must be a mesh that cuts tokens. Pieces of a parameter are gathered once."""
    if isinstance(parameter, Copies):
        return parameter
    over, names = _over(), parameter.get_metadata()["out_sharding"]
    pieces = [tuple(axis for axis in _axes(name) if axis in over) for name in names]

    def local(table):
        for n, axes in enumerate(pieces):
            if axes:
                table = jax.lax.all_gather(table, axes, axis=n, tiled=True)
        return table[None]

    run = _on_shards(local, PartitionSpec(*(axes or None for axes in pieces)), PartitionSpec(over))
    return Copies(run(parameter[...].astype(dtype)))


def with_copies(model):
    """The model with `Copies` of its embeddings and its head, so that the gradient of each, such as both of a
    tied embedding, or those of parts of the logits, is one sum over devices; the model itself where no mesh
    axis cuts tokens."""
    if not _over():
        return model
    model = nnx.clone(model)
    for _, part in nnx.iter_modules(model):
        if isinstance(part, Embedding):
            part.embedding = copies(part.embedding, part.dtype)
        elif isinstance(part, Head):
            part.kernel = copies(part.kernel, part.dtype)
    return model


def widened(model):
    """The model with its `Copies` in float32, in which parts of the logits then add up their gradients.
    Products keep their dtype, and so do sums over devices."""
    if not _over():
        return model
    graphdef, found, rest = nnx.split(model, Copies, ...)
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), found)
    return nnx.merge(graphdef, wide, rest)


def _on_rows(function, parameter, dtype, rows):
    """`function(table, rows)` on each shard of tokens, with a parameter of two axes."""
    over = _over()
    if not over:  # no mesh, or within a `jax.shard_map`, on whose shard there is one copy
        table = parameter[...]
        return function(table.reshape(table.shape[-2:]).astype(dtype), rows)
    local = lambda copies_1, rows: function(copies_1[0].astype(dtype), rows)  # noqa: E731
    return _on_shards(local, PartitionSpec(over), PartitionSpec(over))(copies(parameter, dtype)[...], rows)


def project(layer, x):
    """`layer(x)`; of an `nnx.Linear`, which has no bias here, with its kernel gathered."""
    if not isinstance(layer, nnx.Linear) or jax.sharding.get_abstract_mesh().empty:
        return layer(x)
    return jnp.dot(x.astype(layer.dtype), gathered(layer.kernel, layer.dtype))


def shards(name: str) -> int:
    """Into how many pieces a logical axis is cut over the mesh in the context; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    return math.prod(mesh.shape[axis] for axis in _axes(name) if axis not in mesh.manual_axes)


def check_heads(heads: int) -> None:
    """Raises ValueError where heads of keys and values do not divide into the shards of heads."""
    n = shards("heads")
    if heads % n:
        raise ValueError(
            f"{heads} heads of keys and values do not divide into {n} shards (tp {n}); choose a multiple of "
            f"{n} for their number, or a smaller --mesh.tp"
        )


def by_heads(parts, heads: int, head: int):
    """Columns (d, K * (G + 2) * h) of queries, keys and values in which the queries of a head of keys stand
    beside it, cut over shards of heads. One product with them has a gradient of the input that is one sum
    over shards, not three. Raises ValueError where heads do not divide into shards.

    parts: columns of queries (d, H * h), keys and values (d, K * h); heads: K; G: H / K."""
    check_heads(heads)
    columns_dKGh = jnp.concatenate([w.reshape(len(w), heads, -1, head) for w in parts], axis=2)
    return laid(columns_dKGh.reshape(len(columns_dKGh), -1), None, "heads")


def heads_of(y_BLn, heads: int, head: int):
    """Queries (B, L, H, h), keys and values (B, L, K, h) from a product with the columns of `by_heads`."""
    y_BLKGh = laid(y_BLn.reshape(*y_BLn.shape[:2], heads, -1, head), "batch", None, "heads", None, None)
    queries = y_BLKGh.shape[3] - 2
    parts = jnp.split(y_BLKGh, (queries, queries + 1), axis=3)
    return tuple(part.reshape(*y_BLn.shape[:2], -1, head) for part in parts)


def with_columns(layer: s24.nn.Linear, x_BLd, moved, head: int):
    """What a sparse layer without bias gives, with its columns moved and cut over shards of heads.

    Masks move with the columns, in blocks of a head, in which tiles of 4x4 weights stay whole, and an order
    of the columns of each head, as `BiMask` keeps it, names the columns by their new places. Raises
    ValueError for heads that do not divide, for an order of more than a head, and for adapters of as many
    columns as the layer has.

    moved: moves the columns of an array like the kernel."""
    layer.check_current()
    wide = layer.out_features
    if head % 4:
        raise ValueError(
            f"a sparse projection in heads of width {head} is not cut over tp, as tiles of four columns "
            "would be; choose a width of heads that is a multiple of 4, or --mesh.tp 1"
        )

    def with_them(value):
        if value.shape == (wide,):
            if head % (wide // layer.method.feature_blocks):
                raise ValueError(
                    f"an order of the {wide} columns of a projection that is cut over tp must stay within "
                    f"heads of width {head}; choose feature_blocks={wide // head}, or --mesh.tp 1"
                )
            return moved(jnp.argsort(moved(jnp.arange(wide)[None])[0])[value][None])[0]
        return moved(value) if value.shape == layer.kernel.shape else value

    state = jax.tree.map(with_them, layer.method_state())
    specs = {"x": s24.sharding.spec("batch"), "w": s24.sharding.spec(layer.axes[0], "heads")}
    options = {"implementation": layer.implementation, "specs": specs}
    x_BLd, w = x_BLd.astype(layer.dtype), moved(layer.weight.astype(layer.dtype))
    y_BLn = s24.sparse_dot(x_BLd, w, layer.method, state, layer.noise_key(), **options)
    if not layer.adapted:
        return y_BLn
    adapters = {name: value[...].astype(x_BLd.dtype) for name, value in layer.adapters.items()}
    last = [name for name, value in adapters.items() if value.shape[-1] == wide]
    if len(last) != 1:
        raise ValueError(
            f"adapters {sorted(last)} of a sparse projection have {wide} columns each, so that it is not cut "
            "over tp; choose a smaller rank, or --mesh.tp 1"
        )
    adapters[last[0]] = moved(adapters[last[0]])
    return y_BLn + layer.method.adapt(x_BLd, adapters)


def summed_over_rows(function, parameters, *arrays):
    """The sum of `function(parameters, *arrays)` over the rows of arrays (B, ...); each device takes its own.

    So what a loop within adds to the gradient of a parameter is summed over devices once, after the loop.

    parameters: a list of variables."""
    over = _over()
    if not over:
        return function(parameters, *arrays)

    def local(parameters, *arrays):
        return jax.lax.psum(function(parameters, *arrays), over)

    cuts = [PartitionSpec(over) if isinstance(one, Copies) else PartitionSpec() for one in parameters]
    specs = cuts, *(PartitionSpec(over) for _ in arrays)
    return _on_shards(local, specs, PartitionSpec())(parameters, *arrays)


def _on_shards(function, in_specs, out_specs):
    """The function on each shard of tokens."""
    options = {"axis_names": set(_over()), "check_vma": False}
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **options)


def _over() -> tuple[str, ...]:
    """The mesh axes that cut the batch in the context, without those that are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(axis for axis in _axes("batch") if axis not in mesh.manual_axes)


def _axes(name: str | None) -> tuple[str, ...]:
    """The mesh axes of several devices that cut a logical axis."""
    (found,) = s24.sharding.spec(name)
    sizes, axes = jax.sharding.get_abstract_mesh().shape, (found,) if isinstance(found, str) else found or ()
    return tuple(axis for axis in axes if sizes[axis] > 1)


def _spec(names, without) -> PartitionSpec:
    """How an array with these logical axes is cut, but for some mesh axes."""
    return PartitionSpec(
        *(tuple(axis for axis in _axes(name) if axis not in without) or None for name in names)
    )
