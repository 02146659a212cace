"""Operations as declarations: what runs, what is refused, and that nothing goes past them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse, like, trailing
from tests.ops.declared import KERNELS, OPERATIONS
from tests.ops.test_errors import raises

ROOT = Path(__file__).parent.parent.parent
X = jnp.ones((8, 16))


def twice(x, axis):
    return 2 * x


def calls(f, *args) -> list[str]:
    """The kernels in the program for CPU."""
    return re.findall(r"@(s24_\w+)\(", jax.jit(f).lower(*args).as_text())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the targets of the CPU's module")
def test_every_kernel_is_declared():
    declared = {kernel.target for kernel in KERNELS}
    registered = set(native.module("cpu").registrations())
    assert registered <= declared
    of_cuda = (o.cuda for o in OPERATIONS.values() if o.cuda is not o.cpu)
    one_pass = {kernel.target for kernel in of_cuda if isinstance(kernel, Kernel)}
    assert one_pass <= declared - registered


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_defined(name):
    """By the reference or by other operations, and at most one of its derivatives is declared."""
    operation = OPERATIONS[name]
    assert (operation.reference is None) != (operation.composed is None)
    assert operation.jvp is None or operation.vjp is None
    assert set(operation.missing) <= set(native.PLATFORMS)


def test_one_place_calls_kernels():
    found = {p.name for p in (ROOT / "jax_sparse24").rglob("*.py") if "native.call(" in p.read_text()}
    assert found == {"operation.py"}


def test_derivatives_are_declared():
    """Rules written by hand are left for what no kernel computes: a permutation and a refusal."""
    rules = re.compile(r"jax\.custom_[jv]+p")
    found = {p.name: len(rules.findall(p.read_text())) for p in (ROOT / "jax_sparse24/ops").glob("*.py")}
    assert {name: count for name, count in found.items() if count} == {"order.py": 1, "matmul.py": 1}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads programs for CPU")
def test_what_runs():
    kernel = Kernel("s24_prune", like, trailing)
    operation = Operation("twice", twice, kernel=kernel)
    for implementation, found in ((None, ["s24_prune"]), ("ffi", ["s24_prune"]), ("reference", [])):
        assert calls(lambda x, i=implementation: operation(x, axis=-1, implementation=i), X) == found
    assert operation(X.astype(jnp.bfloat16), axis=-1, implementation="reference").dtype == jnp.bfloat16
    elsewhere = Operation("twice", twice, kernel=kernel, missing={"cpu": "no CPU kernel, it is slow there"})
    assert calls(lambda x: elsewhere(x, axis=-1), X) == []
    with raises(RuntimeError, "twice: implementation 'ffi' cannot run: twice has no CPU kernel, it is slow"):
        elsewhere(X, axis=-1, implementation="ffi")
    without = Operation("twice", twice)
    assert without.decide(jnp.float32).reason == "twice has no kernel"
    with raises(RuntimeError, "twice: implementation 'ffi' cannot run: twice has no kernel"):
        without(X, axis=-1, implementation="ffi")
    unmeasured = Operation("twice", twice, kernel=kernel, measured=lambda dtype, axis: False)
    assert unmeasured.decide(jnp.float32, axis=-1).reason == (
        "XLA fuses it, and no kernel was measured to be faster here"
    )
    assert unmeasured.decide(jnp.float32, "ffi", axis=-1).runs == "ffi"
    assert calls(lambda x: unmeasured(x, axis=-1), X) == []
    assert calls(lambda x: unmeasured(x, axis=-1, implementation="ffi"), X) == ["s24_prune"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads programs for CPU")
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_one_pass_on_a_platform_is_for_what_fits(platform):
    kernel, one_pass = (Kernel(target, like, trailing) for target in ("s24_prune", "s24_soft"))

    def fits(asked, x, axis):
        return asked == platform and x.shape[0] % 8 == 0

    operation = Operation("twice", twice, kernel=kernel, **{platform: one_pass}, fits=fits)

    def lowered(on, x):
        program = jax.jit(lambda x: operation(x, axis=-1, implementation="ffi")).trace(x)
        return re.findall(r"@(s24_\w+)\(", program.lower(lowering_platforms=(on,)).as_text())

    assert lowered(platform, X) == ["s24_soft"]
    assert lowered(platform, X[:4]) == ["s24_prune"]
    assert lowered({"cpu": "cuda", "cuda": "cpu"}[platform], X) == ["s24_prune"]
    assert operation.in_one_pass(X, axis=-1) == (platform == "cpu")
    assert not operation.in_one_pass(X[:4], axis=-1)


def test_a_declared_derivative():
    """It gets what was saved, the options and the implementation, under jit and vmap alike."""
    seen = []

    def backward(saved, cotangent, *, implementation, axis):
        seen.append((implementation, axis))
        return (3 * cotangent + saved,)

    vjp = Reverse(lambda operands, results, axis: operands[0], backward)
    operation = Operation("twice", twice, vjp=vjp)
    gradient = jax.grad(lambda x: operation(x, axis=-2, implementation="reference").sum())
    for f in (gradient, jax.jit(gradient), jax.vmap(gradient)):
        assert (f(X) == 4).all()
    assert set(seen) == {("reference", -2)}
