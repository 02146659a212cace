"""`verify`: what sparse layers claim holds, and is found where it does not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24 import verification
from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import MVUE

d, f = 8, 16
FST, STE = s24.methods.FST(refresh_every=4), s24.methods.STE()


@pytest.fixture
def model():
    return nnx.Dict(a=s24.nn.Linear(d, f, method=FST, rngs=nnx.Rngs(0)))


def wrong(model):
    with pytest.raises(ValueError, match=r"^verify: a: WRONG") as found:
        s24.verify(model)
    report = s24.verify(model, raises=False)
    assert not report.ok and f"verify: {report}" == str(found.value)
    return str(report)


def test_a_line_says_what_holds(model):
    report = s24.verify(model)
    assert report.ok and len(report.lines) == 1
    for text in (
        "a: the mask is that of the weights; fwd: weights 2:4 along in; dgrad: weights 2:4 along out; ",
        "the output and the gradient of the input are those of dense products with the masked weight, to ",
        "wgrad: MVUE, exact is unbiased, ",
    ):
        assert text in str(report)
    s24.nn.set_sparse(model, False)
    assert str(s24.verify(model)) == "a: dense mode, so that its products are dense"


def test_masks_that_are_none_are_found(model):
    mask = model.a.state["mask"]
    mask[...] = mask[...].at[:3, 0].set(True).at[3, 0].set(False)
    told = wrong(model)
    assert "fwd: 1 of 32 groups of 4 weights along in keep more than 2" in told
    assert "something else wrote it" in told


def test_a_mask_that_is_not_transposable_is_found(model):
    model.a.state["mask"][...] = s24.mask24(model.a.kernel[...], 0)
    told = wrong(model)
    assert "dgrad: " in told and "weights along out keep more than 2" in told and "fwd: weights 2:4" in told


def test_masks_of_other_weights_and_old_masks_are_found(model):
    kernel = model.a.kernel[...]
    model.a.kernel[...] = -kernel[::-1]
    assert "are those of another kernel" in wrong(model)
    s24.refresh(model, 0)
    assert s24.verify(model).ok
    model.a.step[...] = jnp.int32(3)
    assert "masks 3 steps old, of at most 3" in str(s24.verify(model))
    model.a.step[...] = jnp.int32(4)
    assert "masks are 4 steps old, and FST refreshes them every 4: call s24.refresh" in wrong(model)


@dataclasses.dataclass(frozen=True)
class Short(MVUE):
    def __call__(self, x, axis, request):
        return 0.9 * super().__call__(x, axis, request)


@dataclasses.dataclass(frozen=True)
class Biased(s24.methods.Method):
    def linear_plan(self):
        return Plan.of(LINEAR, wgrad=Row("dy", Short()))


def test_an_estimate_that_is_biased_is_found():
    model = nnx.Dict(a=s24.nn.Linear(d, f, method=Biased(), rngs=nnx.Rngs(0)))
    assert "standard errors from what it estimates" in wrong(model)


@pytest.mark.parametrize("part", ["the output", "the gradient of the input"])
def test_a_product_of_other_weights_is_found(part, monkeypatch):
    model = nnx.Dict(a=s24.nn.Linear(d, f, method=STE, rngs=nnx.Rngs(0)))
    right = verification.sparse_dot

    def other(x, w, *args, **options):
        y = right(x, w, *args, **options)
        more = 0.01 * x @ w
        return y + more if part == "the output" else y + more - jax.lax.stop_gradient(more)

    monkeypatch.setattr(verification, "sparse_dot", other)
    assert f"{part} differs from those of dense products with the masked weight by " in wrong(model)


@pytest.mark.slow
def test_blocks_are_compared_with_the_reference():
    model = s24.nn.FFN(d, f, method=s24.methods.Activation24(), rngs=nnx.Rngs(0))
    report = s24.verify(model)
    assert [line.path for line in report.lines] == ["down", "up", "the model"]
    assert "are those of the reference" in str(report.lines[-1])


def test_neurons_that_were_never_put_in_order_are_found():
    venom = s24.methods.Venom(v=16, m=8, clusters=2)
    report = s24.verify(s24.nn.FFN(d, f, method=venom, rngs=nnx.Rngs(0)), raises=False)
    assert "which Venom has not put in order yet" in str(report)


def test_stacked_layers_are_checked_one_by_one():
    layer = nnx.Linear(d, f, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.stack([layer.kernel[...], layer.kernel[...][::-1]]))
    layer.bias = nnx.Param(jnp.zeros((2, f)))
    model = nnx.Dict(a=s24.sparsify(layer, FST))
    assert s24.verify(model).ok
    mask = model.a.state["mask"]
    mask[...] = mask[...].at[1, :4, 0].set(True)
    assert "of layer 1 of the stack" in wrong(model)


def test_layers_with_general_kernels_are_checked():
    model = nnx.Dict(a=nnx.Einsum("BTD,NDH->BTNH", (2, d, 4), rngs=nnx.Rngs(0)))
    s24.sparsify(model, STE)
    assert s24.verify(model).ok


def test_what_has_no_sparse_layer_says_so():
    with pytest.raises(TypeError, match=r"verify: needs the model, an nnx\.Module, got int"):
        s24.verify(3)
    with pytest.raises(ValueError, match="verify: this Linear has 0 sparse layers"):
        s24.verify(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def test_weights_that_are_no_numbers_are_found_though_masks_leave_them_out():
    model = s24.nn.FFN(16, 32, method=s24.methods.FST(), rngs=nnx.Rngs(0))
    place = tuple(jnp.argwhere(~s24.nn.masks(model)["up"]["kernel"])[0].tolist())
    model.up.kernel[...] = model.up.kernel[...].at[place].set(jnp.nan)
    s24.refresh(model)
    with pytest.raises(ValueError, match="up: WRONG: 1 of the weights are NaN or Inf"):
        s24.verify(model)
