"""Views of an array as groups of four, and exact bit tests.

XLA:CPU flushes subnormals to zero in arithmetic and comparisons, so whatever decides a selection works on
integer bits. It slices, joins and selects bfloat16 through float32, which rewrites NaN, so elements move as
integers.

What an operation calls for every member of a group is wrapped in `jax.jit`, so that it is traced once and not
once a member."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 4


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """Bit layout of an IEEE-like format of `bits` bits with `mantissa` explicit mantissa bits."""

    dtype: jnp.dtype
    uint: jnp.dtype
    bits: int
    mantissa: int

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        """Bits of +Inf: all exponent bits set."""
        return (self.sign - 1) & ~((1 << self.mantissa) - 1)

    @property
    def max_exponent(self) -> int:
        return self.infinity >> self.mantissa

    def tiny(self):
        """Smallest normal number."""
        return jnp.asarray(float(jnp.finfo(self.dtype).tiny), self.dtype)

    def power_of_two(self, exponent_field):
        """The float whose exponent field is given and whose mantissa is zero."""
        return lax.bitcast_convert_type(exponent_field.astype(self.uint) << self.mantissa, self.dtype)


FORMATS = {
    jnp.dtype(jnp.float16): FloatFormat(jnp.dtype(jnp.float16), jnp.uint16, 16, 10),
    jnp.dtype(jnp.bfloat16): FloatFormat(jnp.dtype(jnp.bfloat16), jnp.uint16, 16, 7),
    jnp.dtype(jnp.float32): FloatFormat(jnp.dtype(jnp.float32), jnp.uint32, 32, 23),
    jnp.dtype(jnp.float64): FloatFormat(jnp.dtype(jnp.float64), jnp.uint64, 64, 52),
}


def compute_format(dtype) -> FloatFormat:
    """Arithmetic on 16-bit floats is done in float32."""
    return FORMATS[jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)]


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, FORMATS[x.dtype].uint)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Bits of |x|: as integers they are ordered like |x|, subnormals included."""
    fmt = FORMATS[x.dtype]
    return bits(x) & fmt.uint(fmt.sign - 1)


@jax.jit
def is_nan(x: jax.Array) -> jax.Array:
    fmt = FORMATS[x.dtype]
    return magnitude_bits(x) > fmt.uint(fmt.infinity)


@jax.jit
def key(x: jax.Array) -> jax.Array:
    """Selection key: twice the bits of |x|, so ordered like |x| exactly; every NaN equal and above Inf."""
    # LLVM would make fabs of a mask of the sign, and that flushes subnormals of bfloat16: the shift drops it.
    fmt = FORMATS[x.dtype]
    doubled = bits(x) << fmt.uint(1)
    return jnp.where(doubled > fmt.uint(fmt.infinity << 1), fmt.uint((1 << fmt.bits) - 1), doubled)


@jax.jit
def flush(x: jax.Array) -> jax.Array:
    """Subnormals of x's own format to +0."""
    fmt = FORMATS[x.dtype]
    return jnp.where(magnitude_bits(x) < fmt.uint(1 << fmt.mantissa), jnp.zeros_like(x), x)


@jax.jit
def with_sign(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    """`magnitude` (not negative) with the sign of `x`; zero stays +0."""
    fmt = FORMATS[x.dtype]
    signed = lax.bitcast_convert_type(bits(magnitude) | (bits(x) & fmt.uint(fmt.sign)), x.dtype)
    return jnp.where(bits(magnitude) == 0, jnp.zeros_like(magnitude), signed)


@jax.jit
def select(condition: jax.Array, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
    """`x` where the condition holds, else `other` (+0), by bits (the module says why). Not
    differentiable."""
    words = jnp.where(condition, bits(x), 0 if other is None else bits(other))
    return lax.bitcast_convert_type(words, x.dtype)


def split(x: jax.Array, axis: int) -> list[jax.Array]:
    """The four members of every group along `axis` (negative), each `x` with that axis divided by four."""
    place = x.ndim + axis
    grouped = x.reshape((*x.shape[:place], x.shape[place] // GROUP, GROUP, *x.shape[place + 1 :]))
    return [lax.index_in_dim(grouped, i, place + 1, keepdims=False) for i in range(GROUP)]


def join(members: list[jax.Array], axis: int) -> jax.Array:
    """Inverse of `split`; with two members, the axis is half as long."""
    place = members[0].ndim + axis
    stacked = jnp.stack(members, axis=place + 1)
    length = stacked.shape[place] * len(members)
    return stacked.reshape(*stacked.shape[:place], length, *stacked.shape[place + 2 :])


def split_floats(x: jax.Array, axis: int) -> list[jax.Array]:
    """As `split`, with every bit of the floats of `x`."""
    return [lax.bitcast_convert_type(m, x.dtype) for m in split(bits(x), axis)]


def join_floats(members: list[jax.Array], axis: int) -> jax.Array:
    """As `join`, with every bit of the floats of `members`."""
    return lax.bitcast_convert_type(join([bits(m) for m in members], axis), members[0].dtype)


@jax.jit
def rank_below_two(keys: list[jax.Array]) -> list[jax.Array]:
    """Keep masks of the two largest keys of each group; ties go to the lower index."""
    keep = []
    for i in range(GROUP):
        ahead = [keys[j] >= keys[i] if j < i else keys[j] > keys[i] for j in range(GROUP) if j != i]
        keep.append(sum(a.astype(jnp.uint8) for a in ahead) < 2)
    return keep


def scaled_scores(magnitude: jax.Array, axes, fmt: FloatFormat, nan: float, infinity: float) -> jax.Array:
    """Floats that order like magnitudes given as bits, but whose sums can neither overflow nor vanish:
    magnitudes times a power of two common to `axes`. Where these hold a NaN or Inf, only such count."""
    exponent = jnp.maximum(magnitude >> fmt.mantissa, 1)
    hidden = jnp.where(magnitude >> fmt.mantissa > 0, fmt.uint(1 << fmt.mantissa), fmt.uint(0))
    significand = (magnitude & fmt.uint((1 << fmt.mantissa) - 1)) | hidden
    bias = fmt.max_exponent >> 1
    below = jnp.max(exponent, axis=axes, keepdims=True, initial=1) - exponent
    score = significand.astype(fmt.dtype) * fmt.power_of_two(bias - jnp.minimum(below, bias - 1))
    score = jnp.where(below > bias - 1, 0, score)
    inf = fmt.uint(fmt.infinity)
    broken = jnp.where(magnitude > inf, nan, jnp.where(magnitude == inf, infinity, 0.0)).astype(fmt.dtype)
    return jnp.where(jnp.any(magnitude >= inf, axis=axes, keepdims=True), broken, score)


def tree_sum(members: list[jax.Array]) -> jax.Array:
    return (members[0] + members[1]) + (members[2] + members[3])


def running_sums(members: list[jax.Array]) -> list[jax.Array]:
    sums = [members[0]]
    for member in members[1:]:
        sums.append(sums[-1] + member)
    return sums


def any_of(flags: list[jax.Array]) -> jax.Array:
    return (flags[0] | flags[1]) | (flags[2] | flags[3])
