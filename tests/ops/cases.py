"""The operations as functions of one array, for tests that hold for all of them.

A case is `call(x, implementation)`; `x` is (..., 4 m, 4 n).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24
from jax_sparse24.ops.packed24 import gather24
from tests.ops.data import adversarial, device

KEY = jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable
    target: str  # native kernel that it runs on CPU
    sums: bool = False  # a product: implementations may differ in rounding
    on_cuda: str = ""  # the kernel there, if it is another one

    def data(self, shape, dtype="float32", seed=0):
        """Adversarial bits; for a product finite numbers, as it says nothing about payloads of NaN."""
        if self.sums:
            return device(np.random.default_rng(seed).normal(size=shape), dtype)
        return device(adversarial(shape, dtype, seed))

    def __repr__(self):
        return self.name


def _packed(x, impl, axis=-1):
    return s24.pack24(x, axis, implementation=impl)


def _gather(x, impl):
    return gather24(x, _packed(jnp.flip(x, -1), impl).metadata, -1, impl)


def _double(axis):
    return lambda x, impl: s24.double_prune24(x, axis, implementation=impl)


def _mvue(exact):
    return lambda x, impl: s24.mvue24(KEY, x, -1, exact, implementation=impl)


CASES = [
    Case("mask24", lambda x, impl: s24.mask24(x, -1, implementation=impl), "s24_mask"),
    Case("prune24", lambda x, impl: s24.prune24(x, -1, implementation=impl), "s24_prune"),
    Case("soft24", lambda x, impl: s24.soft24(x, -1, implementation=impl), "s24_soft"),
    Case(
        "transposable_mask24",
        lambda x, impl: s24.transposable_mask24(x, implementation=impl),
        "s24_transposable_mask",
    ),
    Case("double_prune24-rows", _double(-1), "s24_double_prune"),
    Case("double_prune24-columns", _double(-2), "s24_double_prune"),
    Case("mvue24-exact", _mvue(True), "s24_mvue"),
    Case("mvue24-approximate", _mvue(False), "s24_mvue"),
    Case("mvue_pack24", lambda x, impl: mvue_pack24(KEY, x, -2, implementation=impl), "s24_mvue_pack"),
    Case("pack24", lambda x, impl: s24.pack24(x, -1, implementation=impl), "s24_pack"),
    Case("pack24-columns", lambda x, impl: s24.pack24(x, -2, implementation=impl), "s24_pack"),
    Case(
        "pack24-mask",
        lambda x, impl: s24.pack24(x, -1, jnp.signbit(x), implementation=impl),
        "s24_pack_masked",
    ),
    Case(
        "pack24-mask-both",
        lambda x, impl: s24.pack24(x, (-1, -2), jnp.signbit(x), implementation=impl),
        "s24_pack_masked_both",
    ),
    Case(
        "transposable_pack24",
        lambda x, impl: s24.transposable_pack24(x, implementation=impl),
        "s24_transposable_mask",
        on_cuda="s24_transposable_pack",
    ),
    Case("todense", lambda x, impl: _packed(x, impl).todense(implementation=impl), "s24_unpack"),
    Case("gather24", _gather, "s24_gather"),
    Case(
        "squared_relu24",
        lambda x, impl: s24.squared_relu24(x, implementation=impl),
        "s24_squared_relu_pack",
    ),
    Case(
        "matmul-a",
        lambda x, impl: s24.matmul(_packed(x, impl), jnp.swapaxes(x, -1, -2), implementation=impl),
        "s24_matmul",
        sums=True,
    ),
    Case(
        "matmul-b",
        lambda x, impl: s24.matmul(jnp.swapaxes(x, -1, -2), _packed(x, impl, -2), implementation=impl),
        "s24_matmul",
        sums=True,
    ),
]
ALONG_AN_AXIS = {
    "mask24": lambda x, axis, **kw: s24.mask24(x, axis, **kw),
    "prune24": lambda x, axis, **kw: s24.prune24(x, axis, **kw),
    "soft24": lambda x, axis, **kw: s24.soft24(x, axis, **kw),
    "pack24": lambda x, axis, **kw: s24.pack24(x, axis, **kw),
    "squared_relu24": lambda x, axis, **kw: s24.squared_relu24(x, axis, **kw),
    "mvue24": lambda x, axis, **kw: s24.mvue24(KEY, x, axis, **kw),
}
