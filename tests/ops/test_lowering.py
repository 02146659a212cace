"""Programs for CUDA lower on a machine without one, and call the kernels of their platform."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import cusparselt, decision, hardware, native, operation
from jax_sparse24.dispatch.decision import named
from jax_sparse24.ops.features import top_features
from jax_sparse24.ops.gated import gated_backward, gated_backward_pack
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.mvue import mvue_pack24_strided
from jax_sparse24.ops.packed24 import pack24_strided
from jax_sparse24.ops.packed_vnm import gather_vnm, repack_vnm
from jax_sparse24.ops.saved import pack_counted, saved_backward
from jax_sparse24.ops.slope import slope_mvue_pack24
from tests.ops import cases
from tests.ops.cases import CASES

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
ROOT = Path(__file__).parent.parent.parent
X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)


def lowered(f, *platforms, x=X) -> str:
    # A function of its own: kernels that are there or not must not come from an earlier trace.
    return jax.jit(lambda x: f(x)).trace(x).lower(lowering_platforms=platforms).as_text()


@pytest.fixture(params=[True, False], ids=["with CUDA kernels", "without"])
def built(request, monkeypatch):
    """Programs are lowered as if the CUDA module were built, or were not."""
    jax.clear_caches()
    cuda = (object(), None) if request.param else (None, "not built")
    monkeypatch.setitem(native._loaded, "cuda", cuda)
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_calls_the_kernel_if_it_is_there(case, built):
    text = lowered(lambda x: case.call(x, None), "cuda")
    if built:
        # The product of a packed operand is measured; what unpacks it is a kernel too.
        assert f"@{'s24_unpack' if case.sums else case.on_cuda or case.target}(" in text
    else:
        assert "s24_" not in text
        assert "custom_call" not in text


def test_squared_relu_both_ways_is_one_call(built):
    x = jax.ShapeDtypeStruct((2, 128, 16), jnp.bfloat16)
    text = lowered(lambda x: s24.squared_relu24(x, (-1, -2)), "cuda", x=x)
    calls = re.findall(r"@(s24_\w+)\(.*-> \((.*)\)", text)
    rows, columns = "tensor<2x128x8xbf16>, tensor<2x128x2xui8>", "tensor<2x16x64xbf16>, tensor<2x16x16xui8>"
    assert calls == ([("s24_squared_relu_pack_both", f"{rows}, {columns}")] if built else [])
    assert lowered(lambda x: s24.squared_relu24(x, (-1, -2)), "cpu", x=x).count("@s24_") == 1


def test_packing_both_ways_by_a_mask_is_one_call(built):
    x = jax.ShapeDtypeStruct((2, 128, 16), jnp.bfloat16)
    given, searched = (lambda x: s24.pack24(x, (-1, -2), x > 0)), s24.transposable_pack24
    cuda = [re.findall(r"@(s24_\w+)\(", lowered(f, "cuda", x=x)) for f in (given, searched)]
    assert cuda == ([["s24_pack_masked_both"], ["s24_transposable_pack"]] if built else [[], []])
    cpu = [re.findall(r"@(s24_\w+)\(", lowered(f, "cpu", x=x)) for f in (given, searched)]
    assert cpu == [["s24_pack_masked_both"], ["s24_transposable_mask", "s24_pack_masked_both"]]


@pytest.mark.parametrize(
    ("target", "pack"),
    [
        ("s24_pack", pack24_strided),
        ("s24_mvue_pack", lambda x: mvue_pack24_strided(jax.random.key(0), x)),
    ],
)
def test_strided_rows_are_read_where_they_are_on_cuda(target, pack, built):
    x = jax.ShapeDtypeStruct((128, 16), jnp.bfloat16)
    cuda, cpu = (lowered(pack, platform, x=x) for platform in ("cuda", "cpu"))
    assert re.findall(r"@(s24_\w+)\(", cuda) == ([f"{target}_strided"] if built else [])
    assert re.findall(r"@(s24_\w+)\(", cpu) == [target]
    assert ("transpose" in cuda) != built
    assert "transpose" in cpu


@pytest.mark.parametrize("shape", [(128, 24), (64, 24), (128, 20)], ids=str)
def test_gradients_of_inputs_and_their_estimates_are_one_call_on_cuda(shape):
    """If they fall into whole tiles; nothing else is computed."""

    def made(x):
        return slope_mvue_pack24(jax.random.key(3), x, x, "squared_relu", False, implementation="ffi")

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = lowered(made, "cuda", x=x)
    in_tiles = shape == (128, 24)
    found = re.findall(r"@(s24_\w+)\(", text)
    assert found == (["s24_slope_mvue"] if in_tiles else ["s24_mvue_pack"])
    if in_tiles:
        assert "stablehlo.multiply" not in text
        call = re.search(r"custom_call @s24_slope_mvue\(.*", text).group(0)
        assert "-> (tensor<128x24xbf16>, tensor<24x64xbf16>, tensor<24x16xui8>)" in call
        for name, value in {"relu": 0, "exact": 0}.items():
            assert f"{name} = {value} : i64" in call
    assert re.findall(r"@(s24_\w+)\(", lowered(made, "cpu", x=x)) == ["s24_mvue_pack"]


@pytest.mark.parametrize("shape", [(128, 24), (64, 24)], ids=str)
def test_saved_activations_are_one_call_each_way_on_cuda(shape, built):
    """If they fall into whole tiles: no array is moved, and nothing dense of their size is made."""

    def parts(x):
        packed, counts = pack_counted(x, True)
        return saved_backward(packed, x, top_features(counts, 0.1, 128), "squared_relu")

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    calls = re.findall(r"@(s24_\w+)\(.*-> \(?(.*)", lowered(parts, "cuda", x=x))
    if not built or shape[0] % 128:
        assert not {"s24_saved_backward", "s24_pack_counted"} & {name for name, _ in calls}
        return
    packed, most, found = calls
    assert packed == ("s24_pack_counted", "tensor<128x12xbf16>, tensor<128x3xui8>, tensor<1x24xui8>)")
    assert most == ("s24_features", "tensor<3xi32>")
    along = "tensor<24x64xbf16>, tensor<24x16xui8>, tensor<3x128xbf16>"
    assert found == ("s24_saved_backward", f"tensor<128x12xbf16>, {along}, {along})")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_of_saved_activations_is_one_call_on_a_cpu(dtype):
    """Whatever their size: no array is moved, and nothing dense of their size is made."""

    def parts(x):
        return saved_backward(s24.pack24(x, -1), x, jnp.asarray([1, 5]), "squared_relu")

    text = lowered(parts, "cpu", x=jax.ShapeDtypeStruct((44, 20), dtype))
    assert re.findall(r"@(s24_\w+)\(", text) == ["s24_pack", "s24_saved_backward"]
    assert "transpose" not in text


@pytest.mark.parametrize("shape", [(128, 1024), (128, 512)], ids=str)
def test_blocks_are_packed_again_in_one_call_on_cuda(shape, built):
    """If they fall into whole tiles: neither an array nor anything moved between."""

    def again(x):
        return repack_vnm(s24.pack_vnm(x, 64, 16), collected=True)

    text = lowered(again, "cuda", x=jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    calls = re.findall(r"@(s24_\w+)\(", text)
    if not built or shape[1] < 1024:
        assert calls == (["s24_vnm_pack", "s24_vnm_unpack", "s24_vnm_pack"] if built else [])
        return
    assert calls == ["s24_vnm_pack", "s24_vnm_repack"]
    assert "transpose" not in text


def test_attributes_and_layouts_of_a_call(built):
    text = lowered(lambda x: s24.squared_relu24(x, 0), "cuda")
    if not built:
        return
    call = re.search(r"custom_call @s24_squared_relu_pack\(.*", text).group(0)
    assert "trailing = 1 : i64" in call
    assert "operand_layouts = [dense<[1, 0]>" in call
    assert "result_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<[1, 0]>" in call
    assert "(tensor<8x16xbf16>) -> (tensor<16x4xbf16>, tensor<16x1xui8>)" in call


@pytest.mark.parametrize(
    ("axes", "side", "flags"),
    [
        ((-1, -2), "right", (1, 1)),
        ((-1, -1), "right", (1, 1)),
        ((-2, -2), "right", (0, 1)),
        ((-1, -2), "left", (0, 0)),
        ((-1, -1), "left", (1, 0)),
    ],
)
def test_products_of_cusparselt(monkeypatch, axes, side, flags):
    """The custom calls: what makes the compressed matrix; the product, its workspace and attributes."""
    monkeypatch.setattr(decision, "library_obstacle", lambda: None)
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

    def product(x):
        packed = s24.pack24(x, axes[side == "right"], implementation="reference")
        operands = (packed, x) if side == "left" else (x, packed)
        return contract(*operands, *axes, decision=named("cusparselt", 7))

    text = lowered(product, "cuda", x=x)
    call = re.search(r"custom_call @s24_cusparselt_matmul\(.*", text).group(0)
    for name, value in zip(("dense_k_last", "out_packed_last"), flags, strict=True):
        assert f"{name} = {value} : i64" in call
    assert "algorithm = 7 : i64" in call
    # 64 x 64: 4096 bytes of values, and 512 of metadata fill 8 rows more.
    types = "(tensor<64x32xbf16>, tensor<64x8xui8>) -> tensor<72x32xbf16>"
    assert types in re.search(r"custom_call @s24_cusparselt_compress\(.*", text).group(0)
    workspace = re.search(r"\(tensor<72x32xbf16>, tensor<64x64xbf16>\) -> .*tensor<(\d+)xui8>", call)
    assert int(workspace.group(1)) >= 1 << 20


def lowered_library_call(monkeypatch, product, *args) -> tuple[str, str]:
    """(the custom call of cuSPARSELt 0.10.0, the program) of a function of `args`."""
    monkeypatch.setattr(decision, "library_obstacle", lambda: None)
    monkeypatch.setattr(cusparselt, "version", lambda: (0, 10, 0))
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    text = jax.jit(lambda *a: product(*a)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.search(r"custom_call @s24_cusparselt_matmul\(.*", text).group(0), text


@pytest.mark.parametrize(
    ("activation", "code", "after"), [(None, 0, ()), ("relu", 1, ()), ("gelu", 0, ("add", "tanh"))]
)
def test_epilogues_of_cusparselt(monkeypatch, activation, code, after):
    """A bias is a third operand and ReLU an attribute; GELU follows on the product."""
    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 96), (128, 64)))
    bias = jax.ShapeDtypeStruct((96,), jnp.float32)

    def product(x, w, bias):
        packed = s24.pack24(w, -2, implementation="reference")
        return s24.matmul(x, packed, bias=bias, activation=activation, implementation="cusparselt")

    call, text = lowered_library_call(monkeypatch, product, x, w, bias)
    assert f"activation = {code} : i64" in call
    operands = "tensor<112x32xbf16>, tensor<128x64xbf16>"
    assert f"({operands}{'' if after else ', tensor<96xbf16>'}) -> (tensor<128x96xbf16>" in call
    behind = text.split(call)[1].split("    return ")[0]
    assert all(f"stablehlo.{name} " in behind for name in after)
    assert after or "stablehlo.add " not in behind


@pytest.mark.parametrize(("b_axis", "copies"), [(-1, 0), (-2, 1)])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_8_bit_products_of_cusparselt(monkeypatch, b_axis, copies, out):
    """Both operands along K: of a dense one that lies otherwise, one transposed copy."""
    w = jax.ShapeDtypeStruct((96, 128), jnp.float8_e4m3fn)
    x = jax.ShapeDtypeStruct((32, 128) if b_axis == -1 else (128, 32), jnp.float8_e4m3fn)

    def product(w, x):
        return contract(s24.pack24(w, -1), x, -1, b_axis, None, out, decision=named("cusparselt", 5))

    call, text = lowered_library_call(monkeypatch, product, w, x)
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[out]
    types = "(tensor<128x64xf8E4M3FN>, tensor<32x128xf8E4M3FN>)"
    assert f"{types} -> (tensor<96x32x{short}>" in call
    assert "dense_k_last = 1 : i64" in call
    assert "algorithm = 5 : i64" in call
    assert text.count("stablehlo.transpose") == copies


@pytest.mark.parametrize("scales", ["tensor", "row", "delayed"])
def test_a_block_in_8_bits(monkeypatch, scales):
    """F1, F2, B1 and B3 are of e4m3, B2 and B4 of bfloat16; no barrier keeps activations and gradients from
    being rounded where they are made, and nothing is transposed."""
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    method, (T, d, f) = s24.methods.FST(fp8=scales), (256, 128, 384)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, d), (d, f), (f, d), (T, d))]
    state = {w: method.state_shapes(x.shape, w) for w, x in zip(("w1", "w2"), arrays[1:3], strict=True)}

    def block(x, w1, w2, dy, state):
        run = lambda *a: s24.sparse_ffn(*a, method, state, jax.random.key(1), implementation="cusparselt")  # noqa: E731
        y, vjp = jax.vjp(run, x, w1, w2)
        return y, *vjp(dy)

    jax.clear_caches()
    _, text = lowered_library_call(monkeypatch, block, *arrays, state)
    calls = re.findall(r"@s24_cusparselt_matmul\(.*: \(tensor<\d+x(\d+)x(\w+)>, tensor<(\d+)x(\d+)x", text)
    float8 = {(2 * int(half), int(K)) for half, dtype, _, K in calls if dtype == "f8E4M3FN"}
    assert [call[1] for call in calls].count("f8E4M3FN") == 4 and float8 == {(d, d), (f, f)}
    assert [call[1] for call in calls].count("bf16") == 2
    assert "optimization_barrier" not in text
    assert not re.search(r"stablehlo.transpose .*x(bf16|f8E4M3FN)>", text)
    jax.clear_caches()


FLOAT8_DOT = r"dot_general .*xf8E4M3FN>, tensor<\d+x\d+xf8E4M3FN>"


@pytest.mark.filterwarnings("ignore:jax uses a GPU")
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_sums_of_dense_8_bit_products_have_float32(monkeypatch, scales):
    """F1, F2, B1 and B3 of a block on Hopper without cuSPARSELt, also where the default is less."""
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setattr(decision, "library_obstacle", lambda: "cuSPARSELt is not here")
    method, (T, d, f) = s24.methods.FST(fp8=scales, mvue=None), (32, 16, 48)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, d), (d, f), (f, d), (T, d))]
    state = {w: method.state_shapes(x.shape, w) for w, x in zip(("w1", "w2"), arrays[1:3], strict=True)}

    def block(x, w1, w2, dy, state):
        y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state), x, w1, w2)
        return y, *vjp(dy)

    jax.clear_caches()
    with jax.default_matmul_precision("default"):
        text = jax.jit(block).trace(*arrays, state).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(f".*{FLOAT8_DOT}.*", text)
    assert len(found) == 4
    for line in found:
        assert "accumulation_type = f32" in line and "allow_imprecise_accumulation = false" in line, line
    jax.clear_caches()


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_dense_8_bit_products_of_other_gpus_and_of_cpus(monkeypatch, capability):
    """They take no algorithm: XLA would refuse it."""
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: capability)
    x = jax.ShapeDtypeStruct((32, 32), jnp.float8_e4m3fn)
    (line,) = re.findall(f".*{FLOAT8_DOT}.*", lowered(lambda x: s24.matmul(x, x), "cuda", x=x))
    assert "HIGHEST" in line and "algorithm" not in line
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    (line,) = re.findall(f".*{FLOAT8_DOT}.*", lowered(lambda x: s24.matmul(x, x), "cpu", x=x))
    assert "HIGHEST" in line and "algorithm" not in line


VECTORS = [(1, 32, 32), (32, 32, 1), (32, 1, 32)]


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "depth", "columns"), VECTORS)
def test_dense_8_bit_products_of_vectors(monkeypatch, rows, depth, columns, out):
    """One token, as in generation: XLA refuses an algorithm for it, and multiplies and sums itself. It does
    so in the type of the result, where two numbers of 8 bits give one that is too large for float16."""
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    operands = [jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn) for s in ((rows, depth), (depth, columns))]
    text = lowered(lambda ab: s24.matmul(*ab, preferred_element_type=out), "cuda", x=operands)
    (line,) = re.findall(f".*{FLOAT8_DOT}.*", text)
    assert "HIGHEST" in line and "algorithm" not in line
    assert line.endswith(f"-> tensor<{rows}x{columns}xf32>")


@pytest.mark.parametrize(("rows", "alone", "asks"), [(4, False, False), (5, False, True), (4, True, True)])
def test_dense_8_bit_products_that_xla_may_cut_into_vectors(monkeypatch, rows, alone, asks):
    """As many tokens as devices, without `specs`; but not on one device's own shard, which nothing cuts."""
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    operands = [jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn) for s in ((rows, 32), (32, 32))]

    def product(ab):
        return s24.matmul(*ab)

    if alone:
        P, kinds = jax.sharding.PartitionSpec, (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("dp",), axis_types=kinds)
        specs = {"in_specs": ([P("dp"), P()],), "out_specs": P("dp")}
        product = jax.shard_map(product, mesh=mesh, **specs)
    (line,) = re.findall(f".*{FLOAT8_DOT}.*", lowered(product, "cuda", x=operands))
    assert ("algorithm" in line) == asks


def test_blocks_for_cuda(built):
    """V:N:M: selection, packing with and without a mask, both ways back, and the product in every layout."""
    x, like = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    programs = {
        "s24_vnm_mask": lambda x: s24.vnm_mask(x, 16, 8, axis=-2, exact=True),
        "s24_vnm_pack": lambda x: s24.pack_vnm(x, 16, 8),
        "s24_vnm_pack_masked": lambda x: s24.pack_vnm(x, 16, 8, mask=x > 0),
        "s24_vnm_unpack": lambda x: s24.pack_vnm(x, 16, 8).todense(),
        "s24_vnm_gather": lambda x: gather_vnm(x, s24.pack_vnm(like, 16, 8)),
    }
    for target, program in programs.items():
        text = lowered(program, "cuda", x=x)
        assert (f"@{target}(" in text) == built
        assert built or "custom_call" not in text
    call = re.search(r"custom_call @s24_vnm_mask\(.*", lowered(programs["s24_vnm_mask"], "cuda", x=x))
    for attribute in ("trailing = 1", "v = 16", "m = 8", "exact = 1") if built else ():
        assert f"{attribute} : i64" in call.group(0)


@pytest.mark.parametrize("transposed", [False, True])
def test_gated_activations_for_cuda(monkeypatch, transposed):
    """Forward, backward and backward with packing are one call each, without a transpose in either order."""
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    keys = jnp.zeros((2, 2), jnp.uint32)
    options = {"transposed": transposed, "implementation": "ffi"}
    dz = jnp.ones((8, 16) if transposed else (16, 8), jnp.bfloat16)
    programs = {
        "s24_gated": lambda x: s24.gated(x, x, "gelu", **options),
        "s24_gated_backward": lambda x: gated_backward(x, x, dz, "gelu", **options),
        "s24_gated_backward_pack": lambda x: gated_backward_pack(x, x, dz, keys, "gelu", False, **options),
    }
    out = "tensor<8x16xbf16>" if transposed else "tensor<16x8xbf16>"
    for target, program in programs.items():
        text = lowered(program, "cuda", x=jax.ShapeDtypeStruct((16, 8), jnp.bfloat16))
        call = re.search(rf"custom_call @{target}\(.*", text).group(0)
        assert "stablehlo.transpose" not in text
        assert out in call.rsplit("->", 1)[1]
        flags = {"gelu": 1, "transposed": int(transposed)}
        flags |= {"dz_transposed": 0} if "backward" in target else {}
        flags |= {"exact": 0} if "pack" in target else {}
        for name, value in flags.items():
            assert f"{name} = {value} : i64" in call


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dense_axis", [-1, -2])
def test_products_of_blocks_for_cuda(monkeypatch, side, dense_axis, dtype):
    """The kernel of 16-bit floats gathers whole rows: a dense operand that lies otherwise is transposed."""
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    axis = -1 if side == "left" else -2

    def product(x):
        packed = s24.pack_vnm(x, 16, 8, axis=axis, implementation="reference")
        operands = (packed, x) if side == "left" else (x, packed)
        axes = (axis, dense_axis) if side == "left" else (dense_axis, axis)
        return contract(*operands, *axes, "ffi")

    text = lowered(product, "cuda", x=jax.ShapeDtypeStruct((64, 64), dtype))
    call = re.search(r"custom_call @s24_vnm_matmul\(.*", text).group(0)
    k_last = dense_axis == -1 and dtype == "float32"
    dense = re.search(r"(%\w+)\)", call).group(1)
    assert (f"{dense} = stablehlo.transpose" in text) == (dense_axis == -1 and not k_last)
    flags = {"v": 16, "m": 8, "dense_k_last": int(k_last), "out_packed_last": int(side == "right")}
    for name, value in flags.items():
        assert f"{name} = {value} : i64" in call


@pytest.mark.parametrize("transposed", ["regrouped", "plain"])
def test_weight_gradients_of_blocks_move_no_tokens(monkeypatch, transposed):
    """B2 and B4 of Venom gather rows of dY3 and X themselves, also for strided groups, and B2 writes the rows
    of its result, also of collected features, to their places: nothing moves them before or behind."""
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    method, (T, d, f) = (
        s24.methods.Venom(routing="none", weights="dense", transposed=transposed),
        (256, 128, 1024),
    )
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, d), (d, f), (f, d), (T, d))]

    state = {w: method.state_shapes(x.shape, w) for w, x in zip(("w1", "w2"), arrays[1:3], strict=True)}

    def block(x, w1, w2, dy, state):
        y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state, implementation="ffi"), x, w1, w2)
        return y, *vjp(dy)

    jax.clear_caches()
    text = jax.jit(block).trace(*arrays, state).lower(lowering_platforms=("cuda",)).as_text()
    strided = int(transposed == "regrouped")
    calls = re.findall(
        r"(%\w+) = .*@s24_vnm_matmul\(.*, (%\w+)\) .*collected = (\d) : .*"
        rf"strided = {strided} : .*-> tensor<(\w+)xbf16>",
        text,
    )
    (b2, *first), (_, *second) = (call for call in calls if call[3] in (f"{f}x{d}", f"{d}x{f}"))
    assert first == ["%arg3", str(strided), f"{f}x{d}"]  # dY3, as it comes
    assert second == ["%arg0", "0", f"{d}x{f}"]  # X
    assert re.search(rf"return .*, {b2} : .*tensor<{f}x{d}xbf16>\n", text)
    jax.clear_caches()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_calls_the_kernel(case):
    text = lowered(lambda x: case.call(x, "ffi" if case.sums else None), "cpu")
    assert f"@{case.target}(" in text


def test_the_reference_calls_no_kernel():
    for case in CASES:
        assert "s24_" not in lowered(lambda x, case=case: case.call(x, "reference"), "cpu")


def test_one_program_for_both_platforms(built):
    text = lowered(lambda x: s24.prune24(x, 1), "cpu", "cuda")
    assert "@s24_prune(" in text
    assert ("stablehlo.compare" in text) != built  # the reference is in it only where there is no kernel
    assert "platform_index" in text


def test_gradients_lower_for_cuda(built):
    def loss(x):
        y = s24.matmul(s24.pack24(s24.soft24(x, 1), 1), x.T)
        return jnp.sum(s24.squared_relu24(y).todense()) + jnp.sum(s24.double_prune24(x, 0) * x)

    assert ("s24_" in lowered(jax.grad(loss), "cuda")) == built


@pytest.mark.slow
def test_every_handler_of_cuda_is_called_by_a_case(monkeypatch):
    """So does compute-sanitizer. (cuSPARSELt's handlers run its kernels.)"""
    jax.clear_caches()
    for module in (decision, hardware, operation):
        monkeypatch.setattr(module, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    found = cases.called("cuda", jax.eval_shape)
    folders = [ROOT / "ffi" / name for name in ("call", "cuda")]
    sources = "".join(file.read_text() for folder in folders for file in folder.glob("*.cc"))
    targets = set(re.findall(r'S24_TARGET\("(s24_\w+)"', sources)) - {"s24_cusparselt_compress"}
    assert len(targets) > 20 and not targets - found
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_reference_multiplies_16_bits_as_they_are(side, dtype):
    """On CUDA, where they are exact in float32; XLA:CPU cannot, and widens them. 8 bits become 16 first."""
    w, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 128), (128, 32)))

    def product(w, x):
        if side == "left":
            return s24.matmul(s24.pack24(w, -1, implementation="reference"), x, implementation="reference")
        packed = s24.pack24(w.T, -2, implementation="reference")
        return s24.matmul(x.T, packed, implementation="reference")

    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "bf16"}[dtype]
    for platform, operand in (("cuda", short), ("cpu", "f32")):
        text = jax.jit(product).trace(w, x).lower(lowering_platforms=(platform,)).as_text()
        (types,) = re.findall(
            r"dot_general .*: \(tensor<.*x(\w+)>, tensor<.*x(\w+)>\) -> tensor<.*x(\w+)>", text
        )
        assert types == (operand, operand, "f32"), platform
