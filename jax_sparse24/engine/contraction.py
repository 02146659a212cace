"""Contractions of an input with a kernel of any shape, as products of matrices.

Sparse products take a matrix (in, out). `Contraction` says which axes of a kernel are "in" and which are
"out", and moves the axes of the input and of the result accordingly."""

import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Contraction:
    """How a kernel is a matrix, and how its product with an input is one of matrices.

    Axes of the kernel count from its end, so that a stack of kernels may have leading axes.

    inputs: axes of the input that are contracted, each with the axis of the kernel at the same place.
    contracted: axes of the kernel that are contracted, negative, in rising order.
    free: all other axes of the kernel, negative, in rising order.
    order: for each axis of the result the axis that it is among those that are left of the input, followed by
        `free`."""

    inputs: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    order: tuple[int, ...]

    def matrix(self, kernel: jax.Array) -> jax.Array:
        """The kernel as a matrix.

        kernel: its axes of a stack, followed by those of the contraction.

        Returns: (..., in, out)."""
        shape, lead = kernel.shape, kernel.ndim - len(self.contracted) - len(self.free)
        axes = [*range(lead), *(kernel.ndim + axis for axis in (*self.contracted, *self.free))]
        sizes = [math.prod(shape[axis] for axis in group) for group in (self.contracted, self.free)]
        return kernel.transpose(axes).reshape(*shape[:lead], *sizes)

    def like_kernel(self, matrix: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `matrix`.

        matrix: (..., in, out).
        shape: of the kernel.

        Returns: an array of this shape."""
        lead = len(shape) - len(self.contracted) - len(self.free)
        axes = [*range(lead), *(len(shape) + axis for axis in (*self.contracted, *self.free))]
        moved = matrix.reshape([shape[axis] for axis in axes])
        return moved.transpose([axes.index(axis) for axis in range(len(shape))])

    def product(
        self, x: jax.Array, shape: tuple[int, ...], multiply: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The result of the contraction.

        x: the input.
        shape: of the kernel.
        multiply: the product of (..., in) with the matrix, (..., out).

        Returns: the result, with its axes in their order."""
        left = [axis for axis in range(x.ndim) if axis not in self.inputs]
        sizes = [x.shape[axis] for axis in left]
        inside = math.prod(x.shape[axis] for axis in self.inputs)
        y = multiply(x.transpose((*left, *self.inputs)).reshape(*sizes, inside))
        return y.reshape(*sizes, *(shape[axis] for axis in self.free)).transpose(self.order)


def of_axes(inputs: Sequence[int], contracted: Sequence[int], ndim: int, kernel_ndim: int) -> Contraction:
    """The contraction of `jax.lax.dot_general` without axes of a batch.

    inputs: axes of the input that are contracted.
    contracted: the axes of the kernel, in the same order.
    ndim: number of axes of the input.
    kernel_ndim: number of axes of the kernel.

    Returns: a `Contraction`, whose result has the input's axes first."""
    pairs = sorted((k % kernel_ndim - kernel_ndim, x % ndim) for x, k in zip(inputs, contracted, strict=True))
    axes = tuple(k for k, _ in pairs)
    free = tuple(axis for axis in range(-kernel_ndim, 0) if axis not in axes)
    return Contraction(tuple(x for _, x in pairs), axes, free, tuple(range(ndim - len(axes) + len(free))))


def of_einsum(equation: str, ndim: int | None = None) -> Contraction:
    """The contraction of an einsum whose second operand is the kernel.

    equation: such as "BTD,DNH->BTNH" or "...F,NHF->...NH".
    ndim: number of axes of the input; None where only the kernel's part matters.

    Returns: a `Contraction`.
    Raises: ValueError for an equation that is not one product of matrices, such as one with an axis that
        operands and result all have."""
    equation = equation.replace(" ", "")
    found = re.fullmatch(r"([a-zA-Z.]+),([a-zA-Z]+)->([a-zA-Z.]+)", equation)
    if not found:
        raise ValueError(f"the equation {equation!r} is not of the form 'input,kernel->result'")
    x, kernel, result = found.groups()
    if "..." in x:
        spare = [letter for letter in string.ascii_letters if letter not in equation]
        more = "".join(spare[: 1 if ndim is None else max(ndim - len(x) + 3, 0)])
        x, result = x.replace("...", more), result.replace("...", more)
    inside = [letter for letter in kernel if letter in x]
    for letter in kernel:
        if (letter in x) == (letter in result):
            what = "operands and result all have" if letter in x else "the kernel alone has"
            raise ValueError(f"the equation {equation!r} has the axis {letter!r}, which {what}")
    left = [letter for letter in x if letter not in inside]
    names = [*left, *(letter for letter in kernel if letter not in inside)]
    if "." in x + result or sorted(names) != sorted(result) or len({*x}) < len(x) or not inside:
        raise ValueError(f"the equation {equation!r} is no product of an input with a matrix")
    contracted = [kernel.index(letter) for letter in inside]
    made = of_axes([x.index(letter) for letter in inside], contracted, len(x), len(kernel))
    return Contraction(made.inputs, made.contracted, made.free, tuple(names.index(n) for n in result))
