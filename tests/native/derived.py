"""Calls of native targets, derived from the shared cases of operations, tests/ops/sizes.py."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from unittest import mock

import jax
import numpy as np

from jax_sparse24.dispatch import decision, hardware, native, operation
from tests.ops.sizes import SIZED, Calls, Sized

Array = tuple[tuple[int, ...], str]
CAPABILITY = "9.0"  # of the GPU that tests pretend to have


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and dtypes of operands and results, by name, and attributes. misplaced: the number of the array
    that begins behind a multiple of its dtype and of nothing more, if there is one."""

    operands: dict[str, Array]
    results: dict[str, Array]
    attributes: dict[str, object] = dataclasses.field(default_factory=dict)
    misplaced: int | None = None

    @property
    def signature(self) -> tuple:
        """Equal for calls that a handler cannot tell apart."""
        sides = (tuple(self.operands.values()), tuple(self.results.values()))
        return *sides, tuple(sorted(self.attributes.items(), key=str)), self.misplaced

    def map(self, dimension: Callable[[tuple, int], int], attribute: Callable[[tuple, int], int]) -> "Call":
        """The call with other dimensions and attributes, by their places in it."""

        def arrays(side):
            return {
                name: (tuple(dimension((side, name, i), n) for i, n in enumerate(shape)), dtype)
                for name, (shape, dtype) in getattr(self, side).items()
            }

        attributes = {name: attribute(("attributes", name), n) for name, n in self.attributes.items()}
        return Call(arrays("operands"), arrays("results"), attributes)


@contextmanager
def on_platform(name: str, call: Callable, capability: str = CAPABILITY):
    """Operations are traced as on a machine of this platform with all kernels; `call` is in place of
    `native.call`. capability: of its GPU."""

    def only(*operands, default=None, **branches):
        return branches.get(name, default)(*operands)

    with ExitStack() as stack:
        jax.clear_caches()
        for owner, attribute, value in (
            (native, "call", call),
            (jax.lax, "platform_dependent", only),
            (decision, "platform", lambda: name),
            (operation, "platform", lambda: name),
            (hardware, "capability", lambda: capability),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        if name != "cpu":
            stack.enter_context(mock.patch.dict(native._loaded, {name: (object(), None)}))
        yield
    jax.clear_caches()


def native_calls(jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Those of a program and of the programs inside of it, in their order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inner, "eqns"):
                yield from native_calls(inner)


def _recorded(sized: Sized, made: Calls) -> list[tuple[str, Call]]:
    """The calls of the targets that are meant, in their order."""
    found = []
    for function, arrays in made:
        jaxpr = jax.make_jaxpr(lambda *a, function=function: function(*a, "ffi"))(*arrays)
        for equation in native_calls(jaxpr):
            target, attributes = equation.params["target_name"], dict(equation.params["attributes"])
            operands, results = (
                {f"{side} {i}": (x.aval.shape, str(x.aval.dtype)) for i, x in enumerate(arrays)}
                for side, arrays in (("operand", equation.invars), ("result", equation.outvars))
            )
            if target in sized.targets:
                found.append((target, Call(operands, results, attributes)))
    return found


@dataclasses.dataclass(frozen=True)
class Template:
    """A call of a target as a function of sizes.

    powers: place in the call -> the power of each size there: 1, -1, or 0 where it is not named."""

    target: str
    sized: Sized
    base: Call
    powers: Mapping[tuple, Mapping[str, int]]

    def at(self, **sizes) -> Call:
        """The call with some of the sizes changed; where they do not divide, dimensions are rounded up."""
        ratios = {name: Fraction(n) / self.sized.sizes[name] for name, n in sizes.items()}

        def scaled(place, n):
            for name, power in self.powers.get(place, {}).items():
                # What is divided by nothing is counted as one.
                n = n * (ratios.get(name, 1) ** power if ratios.get(name, 1) else 1 if power < 0 else 0)
            return math.ceil(n)

        return self.base.map(scaled, scaled)


def _places(call: Call) -> dict[tuple, int]:
    found = {}

    def see(place, n):
        found[place] = n
        return n

    call.map(see, see)
    return found


def _powers(
    sized: Sized, make: Callable[..., Calls], dtype: str, base: list[tuple[str, Call]]
) -> list[dict[tuple, dict[str, int]]]:
    """Of each call, from what it becomes when a size is doubled."""
    powers: list[dict] = [{} for _ in base]
    for name, size in sized.sizes.items():
        twice = _recorded(sized, make(dtype, **sized.sizes | {name: 2 * size}))
        for found, (target, before), (other, after) in zip(powers, base, twice, strict=True):
            assert target == other
            doubled = _places(after)
            for place, n in _places(before).items():
                assert doubled[place] in (n, 2 * n, n / 2), (target, name, place, n, doubled[place])
                if doubled[place] != n:
                    found.setdefault(place, {})[name] = 1 if doubled[place] > n else -1
    return powers


def _templates_of(sized: Sized, make: Callable[..., Calls]) -> Iterator[Template]:
    known: list[tuple[list, list]] = []  # of dtypes whose calls have the same sizes in the same places
    for dtype in sized.dtypes:
        base = _recorded(sized, make(dtype, **sized.sizes))
        places = [(target, _places(call)) for target, call in base]
        powers = next((powers for other, powers in known if other == places), None)
        if powers is None:
            powers = _powers(sized, make, dtype, base)
            known.append((places, powers))
        for own, (target, call) in zip(powers, base, strict=True):
            yield Template(target, sized, call, own)


@functools.cache
def templates(platform: str, more: bool = False) -> tuple[Template, ...]:
    """Of all targets of a platform that are not the library's, those of `Sized.make` or of `Sized.more`."""
    with on_platform(platform, native.call):
        of_platform = [sized for sized in SIZED if sized.only in ("", platform)]
        return tuple(
            template
            for sized in of_platform
            for template in _templates_of(sized, sized.more if more else sized.make)
        )


def templates_of(sized: Sized, platform: str) -> list[Template]:
    """All of one entry of `SIZED`."""
    return [t for more in (False, True) for t in templates(platform, more) if t.sized is sized]


def free(sized: Sized) -> list[str]:
    """The sizes that may be anything, even zero, but for what they are multiples of."""
    return [name for name in sized.sizes if name not in sized.forbidden and name not in sized.least]


def multiples(sized: Sized, platform: str) -> dict[str, int]:
    own = sized.on_cuda if platform == "cuda" else {}
    return {name: own.get(name, sized.multiples.get(name, 1)) for name in sized.sizes}


def random_sizes(own: list[Template], platform: str, rng: np.random.Generator, most: int) -> dict[str, int]:
    """Sizes around those at which kernels change their way, small ones, and now and then zero.

    own: the calls at these sizes, of one entry of `SIZED`. most: elements of their largest array."""
    sized = own[0].sized
    while True:
        found = {name: int(rng.choice(sized.choices[name])) for name in sized.choices}
        limit = np.log2(most) * rng.random() ** 0.5  # of a size, in bits
        for name, multiple in multiples(sized, platform).items():
            if name not in found:
                near = rng.integers(1, 4) * 2 ** rng.integers(12) // 2
                n = rng.integers(1, 41) if rng.integers(3) == 0 else near + rng.integers(-2, 3)
                found[name] = multiple * int(np.clip(n, 1, max(1, 2**limit / multiple)))
                if name in free(sized) and rng.integers(32) == 0:
                    found[name] = 0
        calls = [(template.base, template.at(**found)) for template in own]
        pairs = [pair for calls in calls for pair in zip(*map(_arrays, calls), strict=True)]
        # A workspace that is always the same has no part in this.
        if all(a == base or math.prod(a[0]) <= most for base, a in pairs):
            return found


def _arrays(call: Call) -> list[Array]:
    return [*call.operands.values(), *call.results.values()]
