"""cuSPARSELt: where the library is found, which products it multiplies, and which of its algorithms are
tried."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax

from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.generations import GENERATIONS, Generation, Layout
from jax_sparse24.dispatch.hardware import generation
from jax_sparse24.dispatch.product import Product
from jax_sparse24.patterns import FLOAT8

# 0.8.0 chooses slow algorithms on Hopper; older releases have another interface.
OLDEST = (0, 8, 1)
DTYPES = ("bfloat16", "float16", FLOAT8.name)
CODES = {None: 0, "relu": 1, "gelu": 2}  # by which calls of the library's wrapper name activations
# Dtypes of operands and results for which the library has GELU (by tanh).
GELU = ((FLOAT8.name, "bfloat16"),)
INSTALL = "pip install 'nvidia-cusparselt-cu13>=0.8.1' (or -cu12)"
# Sizes must be multiples of these for 16-bit numbers, and of twice as much for 8-bit ones.
MULTIPLES = {"rows of the packed operand": 16, "K": 32, "columns of the dense operand": 8}


@functools.cache
def problem() -> str:
    """Opens the library. Returns why it cannot be used in this process, or an empty string."""
    return _open() or gate(version())


def _open() -> str:
    """Opens the library, if it is not open. Returns why that fails, or an empty string."""
    built, reason = native.available("cuda")
    if not built:
        return reason
    cuda, reasons = native.module("cuda"), []
    for path in (*_paths(), ""):
        reason = cuda.load_cusparselt(str(path))
        if not reason:
            return ""
        reasons.append(reason)
    return f"{reasons[-1]}; {INSTALL}"


def gate(found: tuple[int, int, int]) -> str:
    """Why a version of the library is refused, or an empty string.

    found: (major, minor, patch); (0, 0, 0) if the library does not start."""
    if found == (0, 0, 0):
        return "cuSPARSELt does not start on this device"
    if found < OLDEST:
        have, least = (".".join(map(str, v)) for v in (found, OLDEST))
        return f"cuSPARSELt {have} is too old, it must be {least} or newer; {INSTALL}"
    return ""


@functools.cache
def version() -> tuple[int, int, int]:
    """Opens the library. Returns (major, minor, patch), zeros if it does not start."""
    return decoded(0 if _open() else native.module("cuda").cusparselt_version())


def decoded(number: int) -> tuple[int, int, int]:
    """(major, minor, patch) of the library's version number: 803 is 0.8.3, 1000 is 0.10.0."""
    return number // 1_000_000, number // 100 % 10_000, number % 100


def _paths():
    """The files of the library in both places where its wheels put it."""
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations if packages else []:
        for place in ("cusparselt", "cu13", "cu12"):
            path = Path(folder) / place / "lib/libcusparseLt.so.0"
            if path.is_file():
                yield path


def _runs_here() -> bool:
    """Whether programs that are traced now run on a device of the library."""
    return jax.default_backend() == "gpu" and not problem()


def float8_problem() -> str:
    """Why products of 8-bit floats are refused for the installed version, or an empty string."""
    verified = _facts().verified
    if version() in verified:
        return ""
    known, here = (", ".join(".".join(map(str, v)) for v in vs) for vs in (verified, [version()]))
    return f"products of {FLOAT8.name} were verified with cuSPARSELt {known}, here is {here}"


def _facts() -> Generation:
    """The facts about the library on this GPU; for a program that is lowered elsewhere, those of the latest
    generation that has some."""
    row = generation()
    if row is not None and row.layout:
        return row
    return [row for row in GENERATIONS if row.layout][-1]


def layout() -> Layout:
    """The layout of the compressed matrices that kernels make for the library.

    Returns: that of this GPU's generation; for a program that is lowered elsewhere, the latest known one."""
    return _facts().layout


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A product as the library describes it: out(rows, cols) = P(rows, depth) D(depth, cols), with P packed.

    rows, depth, cols: sizes.
    dense_k_last: whether D is column-major, so that the contracted axis is contiguous.
    out_packed_last: whether out is column-major, so that the axis of the packed operand is contiguous.
    dtype, out_dtype: names, of operands and result."""

    rows: int
    depth: int
    cols: int
    dense_k_last: bool
    out_packed_last: bool
    dtype: str
    out_dtype: str

    @classmethod
    def of(cls, product: Product) -> "Descriptor":
        """The description of a product whose operand on its `side` is packed."""
        (M, K, N), right, float8 = product.shape, product.side == "right", product.dtype == FLOAT8
        k_last = product.axes[0 if right else 1] == -1 or float8
        out_dtype = str(product.out_dtype or ("bfloat16" if float8 else product.dtype))
        return cls(N if right else M, K, M if right else N, k_last, right, str(product.dtype), out_dtype)

    def misfit(self) -> str:
        """Why the library cannot multiply it, or an empty string."""
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
        """Whether the library itself adds this bias to the sums and applies this activation."""
        something = (bias is not None or activation is not None) and self.depth > 0
        known = activation != "gelu" or (self.dtype, self.out_dtype) in GELU
        return something and known and version() in _facts().verified

    def _ask(self, activation: str | None, algorithm: int) -> tuple[int, int, int]:
        flags = (self.dense_k_last, self.out_packed_last, self.dtype, self.out_dtype, CODES[activation])
        return native.module("cuda").cusparselt_needs(self.rows, self.depth, self.cols, *flags, algorithm)

    def workspace(self, algorithm: int, activation: str | None = None) -> int:
        """Bytes of workspace that an algorithm needs.

        The library is asked where it runs, but not of an empty product, which it refuses and never gets; a
        program that is lowered elsewhere gets an upper bound."""
        if 0 in (self.rows, self.depth, self.cols):
            return 16
        if _runs_here():
            return max(self._ask(activation, algorithm)[0], 16)
        return 1 << 27

    def accepted(self, algorithm: int | None, activation: str | None = None) -> int | None:
        """An algorithm that was measured, at another size or without the activation; or -1, the library's own
        choice, where it is here and refuses the algorithm for this product."""
        if algorithm in (None, -1) or 0 in (self.rows, self.depth, self.cols) or not _runs_here():
            return algorithm
        try:
            self._ask(activation, algorithm)
        except RuntimeError:
            return -1
        return algorithm

    def algorithms(self) -> list[int]:
        """The numbers of the algorithms that a search tries; -1 stands for the library's own choice."""
        *_, count = self._ask(None, -1)
        return [-1, *range(min(count, _facts().tried[self.dtype]))]

    @property
    def preferred(self) -> int:
        """The algorithm to take where nothing was measured."""
        known = _facts().algorithms.get(version(), {})
        return known.get((self.dtype, self.dense_k_last, self.out_packed_last), -1)
