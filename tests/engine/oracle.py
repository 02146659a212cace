"""What the engines compute, in float64 numpy, written from the papers' table and not from the engine's.

Groups of four lie along the contraction axis of each product: F1 `X W1` along d, F2 `Y2 W2` along f, B1
`dY3 W2'` along the output width, B2 `Y2' dY3` along T, B3 `dY1 W1'` along f, B4 `X' dY1` along T. A `cut`
maps (product, operand) to a function of (array, axis) that makes the operand sparse there.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

# 2 ** -(bits of the significand)
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def wide(x) -> np.ndarray:
    """A float array of any width as float64."""
    return np.asarray(x).astype(np.float64)


def top2(a: np.ndarray, axis: int) -> np.ndarray:
    """Largest two magnitudes of every four along `axis`; the lower index wins a tie."""
    g = np.moveaxis(a, axis, -1)
    g = g.reshape(*g.shape[:-1], -1, 4)
    order = np.argsort(-np.abs(g), axis=-1, kind="stable")
    keep = np.zeros(g.shape, bool)
    np.put_along_axis(keep, order[..., :2], True, axis=-1)
    pruned = np.where(keep, g, 0.0)
    return np.moveaxis(pruned.reshape(*pruned.shape[:-2], -1), -1, axis)


def masked(mask):
    """Cut that keeps what `mask` says, whatever the axis."""
    return lambda a, axis: np.where(np.asarray(mask), a, 0.0)


def drawn(value):
    """Cut that replaces the operand by a given array."""
    return lambda a, axis: wide(value)


def along(axis, function=top2):
    """Cut along a fixed axis, not along the contracted one."""
    return lambda a, _: function(a, axis)


@dataclasses.dataclass(frozen=True)
class Real:
    """A value with the size its rounding errors scale with: the same program run on absolute values."""

    value: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, x):
        x = wide(x)
        return cls(x, np.abs(x))

    def __matmul__(self, other):
        return Real(self.value @ other.value, self.scale @ other.scale)

    def __mul__(self, other):
        return Real(self.value * other.value, self.scale * other.scale)

    def __add__(self, other):
        return Real(self.value + other.value, self.scale + other.scale)

    @property
    def T(self):
        return Real(self.value.T, self.scale.T)

    def sum(self):
        return Real(self.value.sum(0), self.scale.sum(0))


class Table:
    """Operands of products, with the cuts of a plan."""

    def __init__(self, cuts):
        self.cuts = cuts

    def __call__(self, product: str, operand: str, a: Real, axis: int) -> Real:
        cut = self.cuts.get((product, operand))
        if cut is None:
            return a
        value = cut(a.value, axis)
        # An unbiased draw may be larger than what it estimates; what is cut away leaves no error behind.
        return Real(value, np.where(value != 0, np.maximum(a.scale, np.abs(value)), 0.0))


def linear(x, w, dy, cuts) -> dict[str, Real]:
    """Y, dX and dW of `Y = X W`."""
    x, w, dy = Real.of(x), Real.of(w), Real.of(dy)
    on = Table(cuts)
    return {
        "y": on("fwd", "x", x, 1) @ on("fwd", "w", w, 0),
        "dx": on("dgrad", "dy", dy, 1) @ on("dgrad", "w", w, 1).T,
        "dw": on("wgrad", "x", x, 0).T @ on("wgrad", "dy", dy, 0),
    }


def _sigmoid(y):
    return 1 / (1 + np.exp(-y))


def _gelu(y):
    inner = np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    return 0.5 * y * (1 + np.tanh(inner))


def _gelu_slope(y):
    inner = np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * y * (1 - np.tanh(inner) ** 2) * np.sqrt(2 / np.pi) * (
        1 + 3 * 0.044715 * y**2
    )


# name -> (value, size of its errors, slope, size of the slope's errors)
ACTIVATIONS = {
    "squared_relu": (
        lambda y: np.maximum(y, 0) ** 2,
        lambda s: s**2,
        lambda y: 2 * np.maximum(y, 0),
        lambda s: 2 * s,
    ),
    "relu": (lambda y: np.maximum(y, 0), lambda s: s, lambda y: (y > 0) * 1.0, lambda s: np.ones_like(s)),
    "gelu": (_gelu, lambda s: 1.2 * s, _gelu_slope, lambda s: 1.2 + s),
    "silu": (
        lambda y: y * _sigmoid(y),
        lambda s: 1.2 * s,
        lambda y: _sigmoid(y) * (1 + y * (1 - _sigmoid(y))),
        lambda s: 1.2 + s,
    ),
}


def ffn(x, w1, w2, b1, dy3, activation, cuts) -> dict[str, Real]:
    """Y3 of `act(X W1 + b1) W2`, and what the backward pass makes of dY3."""
    x, w1, w2, dy3 = Real.of(x), Real.of(w1), Real.of(w2), Real.of(dy3)
    value, value_scale, slope, slope_scale = ACTIVATIONS[activation]
    on = Table(cuts)
    y1 = on("F1", "x", x, 1) @ on("F1", "w1", w1, 0)
    if b1 is not None:
        y1 = y1 + Real.of(b1)
    y2 = Real(value(y1.value), value_scale(y1.scale))
    dy2 = on("B1", "dy3", dy3, 1) @ on("B1", "w2", w2, 1).T
    dy1 = dy2 * Real(slope(y1.value), slope_scale(y1.scale))
    return {
        "y": on("F2", "y2", y2, 1) @ on("F2", "w2", w2, 0),
        "dx": on("B3", "dy1", dy1, 1) @ on("B3", "w1", w1, 1).T,
        "dw1": on("B4", "x", x, 0).T @ on("B4", "dy1", dy1, 0),
        "dw2": on("B2", "y2", y2, 0).T @ on("B2", "dy3", dy3, 0),
        "db1": dy1.sum(),
        "dy1": dy1,
    }


def assert_close(got, want: Real, dtype: str, K: int, roundings: int, name: str = "") -> None:
    """|got - want| <= roundings (u + K 2**-24) scale for every element; in the norm, less.

    u is the roundoff of the dtype, K the longest contraction (sums are float32, or float64 for that dtype),
    `roundings` how many results are rounded one after the other. In the norm the errors of random data
    average out, so that K enters by its root and the size of the result takes the place of the scale.
    """
    got = wide(got)
    assert got.shape == want.value.shape, f"{name}: shape {got.shape}, expected {want.value.shape}"
    u, sums = ROUNDOFF[dtype], min(ROUNDOFF[dtype], 2.0**-24)
    error = np.abs(got - want.value)
    bound = roundings * (u + K * sums) * want.scale
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (
        f"{name}{worst}: {got[worst]} is not {want.value[worst]} "
        f"(error {error[worst]:.2e}, bound {bound[worst]:.2e})"
    )
    relative = np.linalg.norm(error) / np.linalg.norm(want.value)
    limit = 3 * roundings * (u + np.sqrt(K) * sums)
    assert relative <= limit, f"{name}: relative error {relative:.2e} in the norm, limit {limit:.2e}"


def matrices(seed: int, dtype: str, *shapes):
    """Gaussian matrices with entries of order one."""
    rng = np.random.default_rng([seed, 24])
    return [jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for shape in shapes]


def integers(seed: int, dtype: str, *shapes, largest: int = 4):
    """Small whole numbers: every product and sum of the linear engine is exact in float32, in any order."""
    rng = np.random.default_rng([seed, 42])
    return [jnp.asarray(rng.integers(-largest, largest + 1, shape), dtype) for shape in shapes]
