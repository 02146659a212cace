"""The native module: it imports, knows its versions, and its shared definitions are the published ones."""

import functools
import itertools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse24.dispatch import decision, native
from jax_sparse24.dispatch.hardware import hardware
from jax_sparse24.ops.reference import mvue, packed24, select, soft, transposable

_cpu = pytest.importorskip("jax_sparse24._cpu", reason="the native module is not built")

FFI = Path(native.__file__).parent.parent.parent / "ffi"


def test_available_and_versions():
    assert native.available() == (True, "")
    versions = native.versions()
    sources = "".join(file.read_text() for folder in ("call", "cpu") for file in (FFI / folder).glob("*.cc"))
    targets = re.findall(r'S24_TARGET\("(s24_\w+)"', sources)
    assert sorted(versions["targets"]) == sorted(_cpu.registrations()) == sorted(targets)
    assert len(targets) > 20
    assert versions["isa"] in ("amx", "avx512", "avx2", "generic")
    assert versions["ffi_built"] == _cpu.ffi_api_version()
    # Built with the oldest supported headers, so that every supported jaxlib accepts the handlers.
    assert versions["ffi_built"] == (0, 3)
    assert versions["ffi_built"] <= versions["ffi_runtime"]


@pytest.mark.parametrize("built", [(0, 4), (1, 0), (1, 3)])
def test_newer_build_is_refused(built):
    with pytest.raises(ImportError, match=rf"{built[0]}\.{built[1]}.*0\.3.*[Rr]einstall"):
        native.check_versions(built, (0, 3))


def test_older_build_is_accepted():
    native.check_versions((0, 3), (0, 3))
    native.check_versions((0, 3), (0, 5))


def test_mismatch_registers_nothing(monkeypatch):
    """A refused handler would keep the CPU backend from starting: the check comes first."""
    registered = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    monkeypatch.setattr(native, "_runtime_version", lambda: (0, 2))
    with pytest.raises(ImportError, match=r"built with XLA FFI 0\.3 .* has 0\.2"):
        native._load()
    assert not registered


def test_missing_module_says_how_to_get_it(monkeypatch):
    absent = native._MODULES["cpu"]._replace(names=("jax_sparse24._absent", "no_such_package._absent"))
    monkeypatch.setitem(native._MODULES, "cpu", absent)
    module, reason = native._load("cpu")
    assert module is None
    assert "jax_sparse24._absent is not installed" in reason and "`pip install -e .`" in reason
    for platform in native.PLATFORMS:
        monkeypatch.setitem(native._loaded, platform, (None, reason))
    assert native.available() == (False, reason)
    assert native.versions()["built"] is False
    with pytest.raises(RuntimeError, match=r"cannot call s24_prune: .*not installed"):
        native.call("s24_prune", jax.ShapeDtypeStruct((4,), jnp.float32), jnp.zeros(4), trailing=0)


@pytest.fixture
def no_cuda(monkeypatch):
    """The kernels of CUDA are looked for in a package of a wheel alone, `tests_of_cuda13`."""
    wheel = native._MODULES["cuda"]._replace(names=("tests_of_cuda13._cuda",))
    monkeypatch.setitem(native._MODULES, "cuda", wheel)
    monkeypatch.setattr(native, "_WHEEL", "tests_of_cuda13")


def test_kernels_of_cuda_come_from_a_wheel_of_the_same_release(no_cuda, monkeypatch, tmp_path):
    assert native._load("cuda")[1].startswith(
        "the native module tests_of_cuda13._cuda is not installed; with"
    )
    package = tmp_path / "tests_of_cuda13"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_cuda.py").write_text(
        "def ffi_api_version(): return 0, 3\ndef registrations(): return {'s24_test': 1}\n"
    )
    info = tmp_path / "tests_of_cuda13-0.0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tests_of_cuda13\nVersion: 0.0.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: registered.append((a, k)))
    own = re.escape(native.releases.__version__)
    rule = rf"jax_sparse24 is {own} and tests_of_cuda13 0\.0\.9, .* both wheels .* uninstall tests_of"
    with pytest.raises(ImportError, match=rule):
        native._load("cuda")
    assert not registered
    monkeypatch.setattr(native.releases, "__version__", "0.0.9")
    module, reason = native._load("cuda")
    assert module.__name__ == "tests_of_cuda13._cuda" and reason is None
    assert registered == [(("s24_test", 1), {"platform": "CUDA"})]


def test_a_module_that_does_not_load_leaves_the_reference(monkeypatch, tmp_path):
    """As one that was built for a newer system."""
    package = tmp_path / "tests_of_cpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_cpu.py").write_text("raise ImportError('version GLIBC_2.99 not found')")
    monkeypatch.syspath_prepend(tmp_path)
    built = native._MODULES["cpu"]._replace(names=("tests_of_cpu._cpu",))
    monkeypatch.setitem(native._MODULES, "cpu", built)
    module, reason = native._load("cpu")
    assert module is None
    assert re.match(
        r"the native module tests_of_cpu\._cpu does not load \(version GLIBC_2\.99 not found\); ", reason
    )
    monkeypatch.setitem(native._loaded, "cpu", (None, reason))
    monkeypatch.setattr(decision, "platform", lambda: "cpu")
    assert decision.decide("prune24", jnp.float32) == decision.Decision("reference", reason)
    with pytest.raises(RuntimeError, match=re.escape(f"cannot run: {reason}")):
        decision.decide("prune24", jnp.float32, "ffi")


def test_a_gpu_without_kernels_is_told_once(monkeypatch):
    reason = (
        native._load("cuda")[1] if native.module("cuda") is None else "there is no module; pip install it"
    )
    monkeypatch.setitem(native._loaded, "cuda", (None, reason))
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            found = decision.decide("prune24", jnp.float32)
    assert found.runs == "reference" and found.reason == reason
    assert [str(one.message) for one in told] == [
        f"jax uses a GPU, on which jax_sparse24 has no kernels: {reason}."
    ]
    with pytest.raises(RuntimeError, match=rf"cannot run: {re.escape(reason)}"):
        decision.decide("prune24", jnp.float32, "ffi")


def test_philox_known_answers():
    """The vectors published with Random123."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert _cpu.philox(0, 0, 0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert _cpu.philox(*[ones] * 6) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert _cpu.philox(0xA4093822, 0x299F31D0, *pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_tile_patterns():
    """All choices of two columns per row that use every column twice, in lexicographic order."""
    pairs = list(itertools.combinations(range(4), 2))
    valid = [
        code
        for code in itertools.product(range(6), repeat=4)
        if all(sum(column in pairs[p] for p in code) == 2 for column in range(4))
    ]
    assert len(valid) == 90
    assert _cpu.tile_patterns() == valid


def test_backstop_errors_name_the_value():
    like = jax.ShapeDtypeStruct((6,), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"s24_prune.*\(6,\).*multiple of 4"):
        jax.block_until_ready(native.call("s24_prune", like, jnp.zeros(6), trailing=0))
    integers = jax.ShapeDtypeStruct((8,), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="x must be float32, bfloat16 or float16"):
        jax.block_until_ready(native.call("s24_prune", integers, jnp.zeros(8, jnp.int32), trailing=0))


@pytest.fixture(params=_cpu.isas())
def isa(request):
    """Every set of kernels that this processor can run, in turn."""
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(_cpu.isas()[0])


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads /proc/cpuinfo")
def test_tiles_are_used_where_the_processor_has_them():
    """Their set is part of the machine's name, so that its tables are for such machines alone."""
    flags = set(re.search(r"^flags\s*:(.*)$|\Z", Path("/proc/cpuinfo").read_text(), re.M).group().split())
    assert "amx" not in _cpu.isas() or {"amx_tile", "amx_bf16", "avx512_vbmi2"} <= flags
    if hardware().platform == "cpu":
        assert hardware().name.split("-")[-2] == native.versions()["isa"]


def test_unknown_isa_is_refused():
    assert _cpu.isas()[-1] == "generic"
    with pytest.raises(ValueError, match='"sse9"'):
        _cpu.use_isa("sse9")
    assert _cpu.isa() == _cpu.isas()[0]


def _adversarial_bits(dtype, shape):
    """Every exponent, both signs, NaN payloads, infinities, subnormals, zeros and ties."""
    rng = np.random.default_rng(24)
    width = {2: np.uint16, 4: np.uint32}[jnp.dtype(dtype).itemsize]
    wild = rng.integers(0, 2 ** (8 * width().itemsize), shape, dtype=np.uint64).astype(width)
    tame = np.asarray(jnp.asarray(rng.integers(-3, 4, shape), dtype)).view(width)
    return jnp.asarray(np.where(rng.random(shape) < 0.5, wild, tame).view(jnp.dtype(dtype)))


KEY = np.asarray([7, 24], np.uint32)
SCALE = np.asarray(1.37, np.float32)


@functools.cache
def _expected(shape, dtype):
    """(input, {operation: reference result}) for groups along axis -2; once for all instruction sets."""
    x = _adversarial_bits(dtype, shape)

    @jax.jit
    def results(x):
        values, metadata = packed24.pack24(x, -2)
        soft_values, soft_metadata = soft.soft_pack24(x, SCALE.astype(x.dtype), -2)
        return {
            "prune": select.prune24(x, -2),
            "soft": soft.soft24(x, SCALE.astype(x.dtype), -2),
            "soft values": soft_values,
            "soft metadata": soft_metadata,
            "mvue exact": mvue.mvue24(KEY, x, -2, True),
            "mvue sequential": mvue.mvue24(KEY, x, -2, False),
            "values": values,
            "metadata": metadata,
            "unpack": packed24.unpack24(values, metadata, -2),
        }

    return x, results(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 44, 70), d) for d in ("float32", "bfloat16", "float16")]
    + [((3, 264, 3), "bfloat16"), ((5, 36, 1), "float32")],
)
def test_kernels_of_every_isa_agree(isa, shape, dtype):
    """The reference defines the bits; all instruction sets give them, whatever the remainders."""
    x, want = _expected(shape, dtype)
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    packed_types = [jax.ShapeDtypeStruct(want[k].shape, want[k].dtype) for k in ("values", "metadata")]
    values, metadata = native.call("s24_pack", packed_types, x, trailing=1)
    scale = SCALE.astype(x.dtype)
    soft_values, soft_metadata = native.call("s24_soft_pack", packed_types, x, scale, trailing=1)
    got = {
        "prune": native.call("s24_prune", like, x, trailing=1),
        "soft": native.call("s24_soft", like, x, scale, trailing=1),
        "soft values": soft_values,
        "soft metadata": soft_metadata,
        "mvue exact": native.call("s24_mvue", like, KEY, x, trailing=1, exact=1),
        "mvue sequential": native.call("s24_mvue", like, KEY, x, trailing=1, exact=0),
        "values": values,
        "metadata": metadata,
        "unpack": native.call("s24_unpack", like, values, metadata, trailing=1),
    }
    for name, result in got.items():
        assert np.asarray(result).tobytes() == np.asarray(want[name]).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiles_of_every_isa_agree(isa, dtype):
    w = _adversarial_bits(dtype, (2, 12, 332))
    mask = native.call("s24_transposable_mask", jax.ShapeDtypeStruct(w.shape, jnp.bool_), w)
    np.testing.assert_array_equal(mask, jax.jit(transposable.transposable_mask24)(w))
    twice = native.call("s24_double_prune", jax.ShapeDtypeStruct(w.shape, w.dtype), w, first=0)
    want = jax.jit(select.double_prune24, static_argnums=1)(w, -2)
    assert np.asarray(twice).tobytes() == np.asarray(want).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("dense_k_last", [0, 1])
@pytest.mark.parametrize("out_packed_last", [0, 1])
def test_matmul_of_every_isa(isa, dense_k_last, out_packed_last):
    """Remainders of every block size, against float64."""
    p = jax.random.normal(jax.random.key(5), (101, 300))
    dense = jax.random.normal(jax.random.key(6), (85, 300) if dense_k_last else (300, 85))
    values, metadata = _pack(p)
    out = jax.ShapeDtypeStruct((85, 101) if out_packed_last else (101, 85), jnp.float32)
    flags = {"dense_k_last": dense_k_last, "out_packed_last": out_packed_last}
    got = np.asarray(native.call("s24_matmul", out, values, metadata, dense, **flags), np.float64)
    kept = np.asarray(select.prune24(p, -1), np.float64)
    right = np.asarray(dense, np.float64)
    right = right.T if dense_k_last else right
    got = got.T if out_packed_last else got
    # Each of the K/2 terms rounds once: the error scales with the sum of magnitudes.
    bound = 2.0**-24 * 150 * (np.abs(kept) @ np.abs(right))
    assert np.all(np.abs(got - kept @ right) <= bound)


def _pack(x):
    rows, length = x.shape[-2:]
    types = (
        jax.ShapeDtypeStruct((rows, length // 2), x.dtype),
        jax.ShapeDtypeStruct((rows, -(-length // 8)), jnp.uint8),
    )
    return native.call("s24_pack", types, x, trailing=0)


def test_concurrent_calls():
    """Handlers share XLA's thread pool and take part in the work: nothing blocks, nothing mixes."""
    x = jax.random.normal(jax.random.key(0), (16, 128, 512))
    pack = jax.jit(_pack)
    want = [np.asarray(pack(m)[0]) for m in x]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda i: np.asarray(pack(x[i % 16])[0]), range(160)))
    for i, values in enumerate(got):
        np.testing.assert_array_equal(values, want[i % 16])


@pytest.mark.slow
def test_nested_vmap_over_different_operands():
    """`expand_dims` gives an unmapped operand dimensions of size 1, and handlers broadcast them."""
    p = jax.random.normal(jax.random.key(1), (3, 7, 24))
    dense = jax.random.normal(jax.random.key(2), (2, 24, 9))
    values, metadata = jax.vmap(_pack)(p)
    result = jax.ShapeDtypeStruct((7, 9), jnp.float32)

    def product(values, metadata, dense):
        return native.call("s24_matmul", result, values, metadata, dense, dense_k_last=0, out_packed_last=0)

    over_packed = jax.vmap(product, in_axes=(0, 0, None))
    got = jax.jit(jax.vmap(over_packed, in_axes=(None, None, 0)))(values, metadata, dense)
    assert got.shape == (2, 3, 7, 9)
    for i, j in itertools.product(range(2), range(3)):
        np.testing.assert_array_equal(got[i, j], product(values[j], metadata[j], dense[i]))


@pytest.mark.slow
@pytest.mark.parametrize("dense_k_last", [0, 1])
@pytest.mark.parametrize("out_packed_last", [0, 1])
def test_matmul_does_not_depend_on_the_split(dense_k_last, out_packed_last):
    """Rows of one large product equal the same rows multiplied alone (other tasks), bit for bit."""
    p = jax.random.normal(jax.random.key(3), (500, 520))
    dense = jax.random.normal(jax.random.key(4), (600, 520) if dense_k_last else (520, 600))
    values, metadata = _pack(p)
    flags = {"dense_k_last": dense_k_last, "out_packed_last": out_packed_last}

    def product(values, metadata):
        rows = values.shape[0]
        shape = (600, rows) if out_packed_last else (rows, 600)
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        out = native.call("s24_matmul", out, values, metadata, dense, **flags)
        return np.asarray(out.T if out_packed_last else out)

    whole = product(values, metadata)
    np.testing.assert_array_equal(whole, product(values, metadata))
    np.testing.assert_array_equal(whole[123:130], product(values[123:130], metadata[123:130]))
