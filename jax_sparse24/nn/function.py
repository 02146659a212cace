"""`Function`: how a training loop sees a model that is a function of a pytree of parameters, whatever its
library is."""

import collections
import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse24.interception import Found, abstractly, checked, evaluate, is_array, parted, paths_of
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.view import Blocks
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.patterns import key_of


class Products(Found):
    """The products of a `Function` by their names, each with a state of its own.

    A name is the path of the parameter, with " (2)" and so on for further products with it.

    method, implementation, where: as in `Function`.
    fits: whether each product can be sparse; None to find out, with masks made on the spot.
    own_state: state and noise key of each product; None to collect the matrices in place of multiplying."""

    branches = False  # one branch cannot hand out what it multiplies by

    def __init__(self, method, implementation, where, fits=None, own_state=None):
        super().__init__(method, implementation, where, "Function")
        self.finds, self.fits, self.own_state = fits is None, {} if fits is None else fits, own_state
        self.met: collections.Counter[str] = collections.Counter()
        self.collected: dict[str, jax.Array] = {}

    def named(self, path):
        if not self.method.linear_plan().rows:
            self.unfit.setdefault(path, f"the method is {self.method}")
            return None
        self.met[path] += 1
        name = path if self.met[path] == 1 else f"{path} ({self.met[path]})"
        if not self.finds and name not in self.fits:
            raise ValueError(
                f"Function: the function multiplies by {name}, but did not with the arguments of example=; "
                "give an example that runs the same products."
            )
        return name if self.finds or self.fits[name] else None

    def refuse(self, path, name, error):
        if not self.finds:
            raise type(error)(f"{name}: {error}") from error
        self.fits[name] = False
        super().refuse(path, name, error)

    def multiply(self, name, x, w):
        if self.finds:
            y = self.product(x, w, self.method.init(w), jax.random.key(0))
            self.fits[name] = True
            return y
        if self.own_state is None:
            self.collected[name] = w
            return jnp.zeros((*x.shape[:-1], w.shape[1]), x.dtype)
        own = self.own_state[name]
        key = key_of(own["key"]) if self.method.stochastic else None
        return self.product(x, w, own["state"]["w"], key)

    def inside(self, slices=None):
        inner = copy.copy(self)
        inner.met, inner.collected = self.met.copy(), {}
        inner.own_state = self.own_state if slices is None or self.own_state is None else slices
        return inner

    def scanned(self, run):
        if self.own_state is None:
            return {}
        inner = self.inside()
        inner.own_state = None
        run(inner)
        return {name: self.own_state[name] for name in inner.collected}

    def left(self, inner, told):
        self.met = inner.met
        self.collected |= told

    @property
    def matrices(self):
        return self.collected


@dataclass(frozen=True)
class FunctionModel:
    """What the loss of a `Function` gets: a call with the arguments after the parameters computes what the
    function does, in a sparse phase with sparse products.

    params: the pytree of parameters, with all leaves that it had.
    function: as in `Function`.
    products: how its products run; None in a dense phase, in which the function runs as it is."""

    params: Any
    function: Callable
    products: Products | None

    def __call__(self, *args, **options):
        if self.products is None:
            return self.function(self.params, *args, **options)
        return evaluate(self.function, self.products.inside(), self.params, args, options)


class Function(Blocks):
    """The view of a function of a pytree of parameters, for models of any library, which stay as they are.

        view = s24.Function(model.apply, variables, s24.methods.FST(), (x,))
        loop = s24.Loop(view, loss, tx, steps)

    Products with parameters are found in a trace, as by `s24.intercept`; each has what the method keeps: its
    masks, a noise key, and the age of the masks. Parameters stay those of the dense model:
    `loop.model(state).params` is the trained pytree.

    function: takes the parameters first, such as the `apply` of a Linen model.
    params: a pytree whose arrays of floats are trained, and whose other leaves stay as they are, such as an
        Equinox module.
    method: from `s24.methods`, one with a plan for single layers and without adapters; `Dense()` to train
        without sparse products.
    example: the other arguments of the function, a tuple of arrays or of their shapes; their values do not
        matter.
    where: as in `s24.intercept`.
    key: a PRNG key, from which every product gets its noise key; None for `jax.random.key(0)`.
    implementation: as in `s24.sparse_dot`.

    Raises: TypeError and ValueError as `s24.intercept` does, and ValueError for a method with adapters."""

    def __init__(
        self,
        function: Callable,
        params: Any,
        method: Method,
        example: Sequence,
        where: str | None = None,
        *,
        key: jax.Array | None = None,
        implementation: str | None = None,
    ):
        checked("Function", function, method, where, implementation)
        if method.trains_adapters:
            raise ValueError(f"Function: {method} trains low-rank adapters; use it without them, or s24.nn.")
        if method.histories:
            raise ValueError(
                f"Function: {method} scales by what earlier steps have seen, which this view does not "
                'observe; use s24.nn, or fp8="tensor".'
            )
        if not isinstance(example, tuple | list):
            got = type(example).__name__
            raise TypeError(
                f"Function: example must be a tuple of the function's other arguments, got {got}."
            )
        self.function, self.method, self.methods = function, method, (method,)
        self.key = key_words("Function", jax.random.key(0) if key is None else key)

        def shaped(leaf):
            return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)

        def trained(leaf):
            return shaped(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)

        _, self._rebuild = parted(params, trained)
        self.params = jax.tree.map(lambda leaf: leaf if trained(leaf) else None, params)
        self.example = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if shaped(leaf) else leaf,
            tuple(example),
        )
        self._options = (method, implementation, where)

        self._found = Products(*self._options)
        abstractly(functools.partial(evaluate, function, self._found), params, self.example)
        if method.linear_plan().rows:
            self._found.check(params)

    def explain(self) -> str:
        """Says of each parameter with two axes or more what its products are.

        Returns: lines with a path, a shape, and whether its products are sparse; if not, why."""
        return self._found.lines(self._whole(self.params))

    def _whole(self, params):
        """The parameters with the leaves that are not trained."""
        return self._rebuild(jax.tree.leaves(params))

    def arrange(self, params, own):
        raise NotImplementedError(f"{self.method}: a function has no neurons to be put in order.")

    def weights(self, params):
        return {name: {"w": w} for name, w in sorted(self._matrices(params).items())}

    @functools.cached_property
    def _matrices(self) -> Callable[[Any], dict[str, jax.Array]]:
        """What the sparse products multiply by, by their names, of the parameters."""

        def collect(params):
            products = Products(*self._options, fits=self._found.fits)
            shapes, rebuild = parted(self.example, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
            zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
            evaluate(self.function, products, self._whole(params), rebuild(zeros))
            return products.matrices

        return jax.jit(collect)

    def masks(self, params, own, sparse):
        """The masks in use, for the optimiser.

        params, own: as `split` returned them.
        sparse: whether the phase is.

        Returns: a tree like the parameters, of bool arrays, True where a weight is kept, and a scalar True
            for those without masks; {} in a dense phase. A weight that any product keeps is kept."""
        if not sparse:
            return {}
        found = {name: masks["w"] for name, masks in self.in_use(params, own).items() if masks}
        matrices, back = jax.vjp(self._matrices, params)

        def products_of(each):  # of how many masked products that a mask of `each` names a weight is part
            counted = {
                name: each(found[name]).astype(w.dtype) if name in found else jnp.zeros_like(w)
                for name, w in matrices.items()
            }
            return jax.tree.leaves(back(counted)[0])

        masked = {re.sub(r" \(\d+\)$", "", name) for name in found}
        kept = [
            (keep > 0) | (taken == 0) if path in masked else jnp.ones((), bool)
            for path, keep, taken in zip(
                paths_of(params), products_of(lambda mask: mask), products_of(jnp.ones_like), strict=True
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(params), kept)

    def model(self, params, own, sparse, adapters=True):
        """What the loss gets in a phase.

        params, own: as `split` returned them.
        sparse: whether the phase is.
        adapters: as in every view; there are none.

        Returns: a `FunctionModel`."""
        sparse = sparse and bool(self._found.taken)
        folded = self.folded(own) if sparse else None
        products = Products(*self._options, fits=self._found.fits, own_state=folded) if sparse else None
        return FunctionModel(self._whole(params), self.function, products)
