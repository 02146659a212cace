"""`verify` checks what a model's sparse layers claim: masks and their age, products, estimates."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse24.engine.ffn import sparse_ffn
from jax_sparse24.engine.linear import sparse_dot, weight_in
from jax_sparse24.engine.operand import Request
from jax_sparse24.engine.plan import FFN as FFN_PRODUCTS
from jax_sparse24.engine.plan import LINEAR
from jax_sparse24.nn.ffn import FFN
from jax_sparse24.nn.linear import Linear, checksum
from jax_sparse24.nn.state import equinox_of, layers_of

DRAWS = 64  # of an estimate, to compare their mean with what they estimate
TOKENS = 32  # at least so many run through a product
SIGMAS = 6.0  # how far the mean of draws may be away


@dataclasses.dataclass(frozen=True)
class Line:
    """What was checked of one layer.

    path: of the layer in the model.
    holds: the claims that hold, in words.
    wrong: the claims that do not, with values and what to do."""

    path: str
    holds: tuple[str, ...]
    wrong: tuple[str, ...]

    def __str__(self):
        return f"{self.path}: {'; '.join([*(f'WRONG: {text}' for text in self.wrong), *self.holds])}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `s24.verify` found.

    lines: one for each sparse layer, and for each feed-forward block that runs as one."""

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether all claims hold."""
        return not any(line.wrong for line in self.lines)

    def __str__(self):
        return "\n".join(map(str, self.lines))


def verify(model: Any, *, raises: bool = True) -> Report:
    """Checks every claim of a model's sparse layers, outside of jit.

    Of each layer in sparse mode these are that its sparse weights have no more non-zeros in a group than the
    pattern allows, along the axis that each product contracts (both, for a transposable mask); that stored
    masks are those of the present weights, and no older than the method's period; that the output and the
    gradient of the input are those of a dense product with the masked weight, for random numbers; and that
    the mean of many draws of an unbiased estimate is what it estimates. A feed-forward block whose layers are
    all sparse is compared with the reference as a whole. Stacked layers are checked one by one.

    model: an NNX module with layers of `s24.nn`, or an Equinox module of `s24.sparsify`.
    raises: whether claims that do not hold raise; False to find them in the report.

    Returns: a `Report`; print it.
    Raises: TypeError if `model` is no such module; ValueError if it has no layer of `s24.nn`, or if a claim
        does not hold."""
    library = equinox_of(model)
    model = library.products(model) if library else model
    layers = layers_of("verify", model)
    blocks = {
        ".".join(map(str, path)) or "the model": block
        for path, block in nnx.iter_modules(model)
        if isinstance(block, FFN) and all(part.active for part in block.parts.values())
    }
    inside = {id(part) for block in blocks.values() for part in block.parts.values()}
    lines, estimates, doubtful = [], {}, set()
    for path, layer in layers:
        if not layer.active:
            lines.append(Line(path, ("dense mode, so that its products are dense",), ()))
            continue
        lines.append(_line(path, _of_layer(layer, estimates, id(layer) in inside)))
        if lines[-1].wrong:
            doubtful.add(id(layer))
    for path, block in blocks.items():
        if doubtful.isdisjoint(map(id, block.parts.values())):
            lines.append(_line(path, [_of_block(block)]))
    report = Report(tuple(lines))
    if raises and not report.ok:
        raise ValueError("verify: " + "\n".join(str(line) for line in report.lines if line.wrong))
    return report


def _line(path: str, found: Iterable[tuple[bool, str]]) -> Line:
    found = list(dict.fromkeys(found))
    return Line(path, *(tuple(text for good, text in found if good == kind) for kind in (True, False)))


def _of_layer(layer: Linear, estimates: dict, in_block: bool) -> Iterator[tuple[bool, str]]:
    """Whether each claim holds, with its words."""
    method, alone = layer.method, layer.role == "w"
    products, plan = (LINEAR, method.linear_plan()) if alone else (FFN_PRODUCTS, method.ffn_plan())
    try:
        layer.check_current()
    except ValueError as error:
        yield False, str(error).removeprefix("Linear: ")
    yield from _age(layer)
    weights, lead = layer.weight, layer.weight.shape[:-2]
    for index in np.ndindex(lead):
        w = weights[index]
        state = {name: value[index] for name, value in layer.method_state().items()}
        where = f" of layer {index[0] if len(index) == 1 else index} of the stack" if index else ""
        if lost := int((~jnp.isfinite(w)).sum()):
            kept = ", so that a refresh leaves its masks as they are" if layer.ages else ""
            yield False, f"{lost} of the weights{where} are NaN or Inf{kept}"
            continue
        for product, row in plan.rows:
            if row.operand == layer.role:
                good, text = _groups(w, state, product, row, dict(products[product])[row.operand])
                yield good, text if good else text + where
        if not in_block:
            good, text = _products(layer, w, state)
            yield good, text if good else text + where
    for product, row in plan.rows:
        if row.by.stochastic:
            key = row.by, layer.implementation
            if key not in estimates:
                estimates[key] = _unbiased(row.by, layer.implementation)
            good, text = estimates[key]
            yield good, f"{product}: {text}"


def _age(layer: Linear) -> Iterator[tuple[bool, str]]:
    if not layer.ages:
        return
    method = layer.method
    step, refreshed = np.asarray(layer.step[...]), np.asarray(layer.refreshed[...])
    old = int((step - refreshed)[refreshed >= 0].max(initial=0))
    if old >= method.refresh_every:
        yield (
            False,
            (
                f"masks are {old} steps old, and {type(method).__name__} refreshes them every "
                f"{method.refresh_every}: call s24.refresh(model, step) in every optimiser step"
            ),
        )
    unmoved = np.asarray(checksum(layer.weight)) == np.asarray(layer.checksum[...])
    current = unmoved & ((refreshed == step) | (refreshed < 0))
    state = layer.method_state()
    if "mask" in state and current.all():
        fresh = method.refresh(state, layer.weight, layer.role)["mask"]
        if share := float(jnp.mean(fresh != state["mask"])):
            told = f"the mask differs in {share:.2%} of its entries from that of the weights, which have not "
            told += "moved since it was computed: something else wrote it; call s24.refresh(model)"
            yield False, told
        else:
            yield True, "the mask is that of the weights"
    elif old < method.refresh_every:
        yield True, f"masks {old} steps old, of at most {method.refresh_every - 1}"


def _groups(w, state, product: str, row, axis: int) -> tuple[bool, str]:
    """Whether the sparse weight of a product has at most n non-zeros in each group of m."""
    by, axis = row.by.chosen(axis)
    n, m = map(int, by.pattern.split(":")[-2:])
    kept = by.kept(w, axis, state)
    counts = jnp.moveaxis(kept, axis, -1).reshape(-1, m).sum(-1)
    along = {-1: "out", -2: "in"}[axis]
    if (counts > n).any():
        return False, (
            f"{product}: {int((counts > n).sum())} of {counts.size} groups of {m} weights along {along} "
            f"keep more than {n}, though the product contracts along it"
        )
    return True, f"{product}: weights {n}:{m} along {along}"


def _probe(shape, dtype) -> jax.Array:
    values = np.random.default_rng(math.prod(shape)).standard_normal(shape, np.float32)
    return jnp.asarray(values, dtype)


@functools.partial(jax.jit, static_argnames=("multiply", "method", "implementation"))
def _run(x, dy, weights, state, multiply, method, implementation):
    """An output and the gradient of the input, for the gradient of the output dy.

    multiply: a function of the engine."""
    key = jax.random.key(0) if method.stochastic else None
    y, pull = jax.vjp(lambda x: multiply(x, *weights, method, state, key, implementation=implementation), x)
    return y, pull(dy)[0]


def _products(layer: Linear, w, state) -> tuple[bool, str]:
    """Whether output and gradient of the input are those of dense products with the masked weight."""
    method, dtype = layer.method, jnp.dtype(layer.dtype or w.dtype)
    plan = method.linear_plan()
    w = w.astype(dtype)
    x, dy = _probe((TOKENS, w.shape[0]), dtype), _probe((TOKENS, w.shape[1]), dtype)
    y, dx = _run(x, dy, (w,), state, sparse_dot, method, layer.implementation)
    cut = {product: weight_in(product, w, method, state) for product in ("fwd", "dgrad")}
    exact = {"precision": "highest", "preferred_element_type": jnp.float32}
    wants = {"the output": (y, jnp.matmul(x, cut["fwd"], **exact))}
    if plan.row("dgrad") is None or plan.row("dgrad").operand == "w":
        wants["the gradient of the input"] = dx, jnp.matmul(dy, cut["dgrad"].T, **exact)
    return _close(wants, dtype, "those of dense products with the masked weight")


def _close(wants, dtype, what: str) -> tuple[bool, str]:
    allowed, worst = 16 * float(jnp.finfo(dtype).eps), 0.0
    for name, (got, want) in wants.items():
        far = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max()
        error = float(far / jnp.maximum(jnp.abs(want).max(), 1e-30))
        if not error <= allowed:
            told = f"by {error:.1e} of the largest entry, {allowed:.1e} being allowed"
            return False, f"{name} differs from {what} {told}"
        worst = max(worst, error)
    return True, f"{' and '.join(wants)} are {what}, to {worst:.0e}"


def _of_block(block: FFN) -> tuple[bool, str]:
    """Whether a block gives what the reference gives, output and gradients."""
    up, down = block.parts["up"], block.parts["down"]
    method, lead = up.method, up.weight.shape[:-2]
    sizes = [int(n) for _, row in method.ffn_plan().rows for n in (*row.by.pattern.split(":"), row.by.rows)]
    tokens = math.lcm(TOKENS, method.token_multiple, *sizes)
    at = (0,) * len(lead)
    dtype = jnp.dtype(up.dtype or up.kernel.dtype)
    w1, w2 = (part.weight[at].astype(dtype) for part in (up, down))
    state = {
        role: {name: value[at] for name, value in part.method_state().items()}
        for role, part in (("w1", up), ("w2", down))
    }
    x, dy = _probe((tokens, w1.shape[0]), dtype), _probe((tokens, w2.shape[1]), dtype)
    multiply = _ffn_with(block.activation)
    outcomes = [_run(x, dy, (w1, w2), state, multiply, method, i) for i in (up.implementation, "reference")]
    names = ("the output", "the gradient of the input")
    pairs = dict(zip(names, zip(*outcomes, strict=True), strict=True))
    return _close(pairs, dtype, "those of the reference")


@functools.cache
def _ffn_with(activation: str):
    return functools.partial(sparse_ffn, activation=activation)


def _unbiased(by, implementation) -> tuple[bool, str]:
    """Whether the mean of many draws of a sparsifier is what it estimates."""
    g = _probe((TOKENS, 8), jnp.float32)
    draw = jax.jit(lambda key: _dense(by(g, -2, Request({}, key, implementation))))
    keys = jax.random.bits(jax.random.key(0), (DRAWS, 2), jnp.uint32)
    draws = np.stack([np.asarray(draw(key)) for key in keys]).astype(np.float64)
    error = draws.mean(0) - np.asarray(g)
    # Per element a variance of 64 draws is rough; the sum over all elements has a normal law.
    total, spread = error.sum(), np.sqrt((draws.var(0, ddof=1) / DRAWS).sum())
    signed = (error * np.sign(g)).sum()
    z = max(abs(total), abs(signed)) / max(spread, 1e-12)
    if z > SIGMAS:
        return False, f"the mean of {DRAWS} draws of {by} lies {z:.1f} standard errors from what it estimates"
    return True, f"{by} is unbiased, {z:.1f} standard errors of {DRAWS} draws"


def _dense(x):
    return x if isinstance(x, jax.Array) else x.todense()
