"""cuSPARSELt: where the library is found, what it multiplies, and which of its algorithms are tried."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax

from jax_sparse24.ops import _ffi
from jax_sparse24.patterns import FLOAT8

# 0.8.0 chooses slow algorithms on Hopper; older releases have another interface.
OLDEST = (0, 8, 1)
# The order of its metadata is known in closed form for these; it is documented nowhere.
CAPABILITIES = ("9.0",)
DTYPES = ("bfloat16", "float16", FLOAT8.name)
# Releases in which these were compared with float64 on an H200.
FLOAT8_IN = EPILOGUES_IN = ((0, 10, 0),)
CODES = {None: 0, "relu": 1, "gelu": 2}  # of activations, in the calls
# Dtypes of operands and results for which the library has GELU (by tanh).
GELU = ((FLOAT8.name, "bfloat16"),)
# By release, whose numbers may differ; dtype, and whether D and the result are column-major: the fastest
# nearly everywhere on an H200.
PREFERRED = {
    (0, 10, 0): {
        ("bfloat16", True, True): 17,
        ("bfloat16", False, True): 17,
        ("bfloat16", True, False): 20,
        ("bfloat16", False, False): 3,
        (FLOAT8.name, True, True): 8,
    }
}
# float16: 36 to 45 of 0.8.0 end the process with an illegal instruction on an H200; of later releases they
# were not tried.
TRIED = {"bfloat16": 64, "float16": 36, FLOAT8.name: 64}
INSTALL = "pip install 'nvidia-cusparselt-cu13>=0.8.1' (or -cu12)"
# Of a matrix of 16-bit numbers; of 8-bit ones twice as much.
MULTIPLES = {"rows of the packed operand": 16, "K": 32, "columns of the dense operand": 8}


@functools.cache
def problem() -> str:
    """Why the library cannot be used in this process, or an empty string. Opens it."""
    return _open() or gate(version())


def _open() -> str:
    """Opens the library, if it is not open: an empty string, or why that fails."""
    built, reason = _ffi.available("cuda")
    if not built:
        return reason
    cuda, reasons = _ffi.module("cuda"), []
    for path in (*_paths(), ""):
        reason = cuda.load_cusparselt(str(path))
        if not reason:
            return ""
        reasons.append(reason)
    return f"{reasons[-1]}; {INSTALL}"


def gate(found: tuple[int, int, int]) -> str:
    """Why a version of the library is refused, or an empty string; (0, 0, 0): it does not start."""
    if found == (0, 0, 0):
        return "cuSPARSELt does not start on this device"
    if found < OLDEST:
        have, least = (".".join(map(str, v)) for v in (found, OLDEST))
        return f"cuSPARSELt {have} is too old, it must be {least} or newer; {INSTALL}"
    return ""


@functools.cache
def version() -> tuple[int, int, int]:
    """(major, minor, patch) of the library, which it opens; zeros if it does not start."""
    return decoded(0 if _open() else _ffi.module("cuda").cusparselt_version())


def decoded(number: int) -> tuple[int, int, int]:
    """(major, minor, patch) of the library's version number: 803 is 0.8.3, 1000 is 0.10.0."""
    return number // 1_000_000, number // 100 % 10_000, number % 100


def _paths():
    """Both places where its wheels put it."""
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations if packages else []:
        for place in ("cusparselt", "cu13", "cu12"):
            path = Path(folder) / place / "lib/libcusparseLt.so.0"
            if path.is_file():
                yield path


def float8_problem() -> str:
    """Why the version that is open multiplies no 8-bit floats here, or an empty string."""
    if version() in FLOAT8_IN:
        return ""
    known, here = (", ".join(".".join(map(str, v)) for v in vs) for vs in (FLOAT8_IN, [version()]))
    return f"products of {FLOAT8.name} were verified with cuSPARSELt {known}, here is {here}"


@dataclasses.dataclass(frozen=True)
class Product:
    """out(rows, cols) = P(rows, depth) D(depth, cols), P packed; which of D and out are column-major."""

    rows: int
    depth: int
    cols: int
    dense_k_last: bool
    out_packed_last: bool
    dtype: str
    out_dtype: str

    @classmethod
    def of(cls, axes: tuple[int, int], side: str, dtype, shape: tuple[int, int, int], out_dtype=None):
        """The product (M, K, N) with contracted `axes` whose operand on `side` is packed. out_dtype: bfloat16
        of 8-bit operands, else theirs."""
        (M, K, N), right, float8 = shape, side == "right", dtype == FLOAT8
        k_last = axes[0 if right else 1] == -1 or float8
        out_dtype = out_dtype or ("bfloat16" if float8 else dtype)
        return cls(N if right else M, K, M if right else N, k_last, right, str(dtype), str(out_dtype))

    def misfit(self) -> str:
        """Why the library does not multiply it, or an empty string."""
        if self.dtype not in DTYPES:
            return f"its operands are {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not {self.dtype}"
        float8 = self.dtype == FLOAT8.name
        results = ("bfloat16", "float16", "float32") if float8 else (self.dtype,)
        if self.out_dtype not in results:
            return f"its result of {self.dtype} is {' or '.join(results)}, not {self.out_dtype}"
        sizes = (self.rows, self.depth, self.cols)
        for size, (what, multiple) in zip(sizes, MULTIPLES.items(), strict=True):
            multiple *= 1 + float8
            if size % multiple:
                return f"{what} must be a multiple of {multiple}, got {size}"
        return float8_problem() if float8 else ""

    def applies(self, bias, activation: str | None) -> bool:
        """Whether the library adds a bias to the sums and applies an activation."""
        something = (bias is not None or activation is not None) and self.depth > 0
        known = activation != "gelu" or (self.dtype, self.out_dtype) in GELU
        return something and known and version() in EPILOGUES_IN

    def _ask(self, activation: str | None, algorithm: int) -> tuple[int, int, int]:
        flags = (self.dense_k_last, self.out_packed_last, self.dtype, self.out_dtype, CODES[activation])
        return _ffi.module("cuda").cusparselt_needs(self.rows, self.depth, self.cols, *flags, algorithm)

    def workspace(self, algorithm: int, activation: str | None = None) -> int:
        """Bytes of workspace. Asked of the library where it runs; a bound for a program that is lowered
        elsewhere."""
        if jax.default_backend() == "gpu" and not problem():
            return max(self._ask(activation, algorithm)[0], 16)
        return 1 << 27

    def algorithms(self) -> list[int]:
        """The ids that are tried in a search, -1 for the library's own choice."""
        *_, count = self._ask(None, -1)
        return [-1, *range(min(count, TRIED[self.dtype]))]

    @property
    def preferred(self) -> int:
        """The algorithm where nothing was measured."""
        known = PREFERRED.get(version(), {})
        return known.get((self.dtype, self.dense_k_last, self.out_packed_last), -1)
