"""Products that run over the rows of tall factors (..., m, r). All else in a step is r×r.

Few and wide on purpose: each reads its arguments once, so that on a GPU one kernel can serve it.
Coefficients are (..., r, r) and broadcast over leading dimensions.

On a CPU a factor lies in memory by rows or by columns, as its parameter does, and so does what is
made of it here: a product is as fast either way, and a change from one to the other costs as much
as one. Elsewhere by rows, which is what kernels read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels

# On a CPU inner products go by parts of this many numbers, or of a divisor that is not too small.
_INNER = 64
_SHORTEST_INNER = 16


def overlap(x: Tensor, y: Tensor) -> Tensor:
    """``xᵀ y``, (..., r, r)."""
    if kernels.serve(x, y):
        return kernels.tall.sums(x, y, cross=True)[0]
    return x.mT @ y


def gram(x: Tensor) -> Tensor:
    """``xᵀ x``, (..., r, r)."""
    if kernels.serve(x):
        return kernels.tall.sums(x, None, own=True)[0]
    return x.mT @ x


def turned_gram(x: Tensor, coefficient: Tensor) -> Tensor:
    """``CᵀC`` of ``C = x coefficient``, (..., r, r)."""
    if kernels.serve_small(x):
        return kernels.tall.sums(None, x, coefficient, square=True)[0]
    return gram(turn(x, coefficient))


def turned_square(x: Tensor, coefficient: Tensor, only: Tensor | None = None) -> Tensor:
    """``‖x coefficient‖²`` over the last two dimensions, (...).

    Where it is asked for of some members (batch,) ``only``, it may be anything for the others.
    """
    if kernels.serve(x):
        return kernels.tall.square(x, coefficient, only)
    return square(turn(x, coefficient))


def square(x: Tensor) -> Tensor:
    """``‖x‖²`` over the last two dimensions, (...)."""
    if kernels.serve(x):
        return kernels.tall.square(x)
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))  # no copy of x in between
    return norms.square()


class TurnedGrams(NamedTuple):
    """``AᵀC`` and ``CᵀC`` of ``C = T coefficient``, each (..., r, r)."""

    cross: Tensor
    square: Tensor


def turned_grams(a: Tensor, t: Tensor, coefficient: Tensor) -> TurnedGrams:
    """Overlap and Gram matrix of ``t coefficient``."""
    if kernels.serve_small(a, t):
        return TurnedGrams(*kernels.tall.sums(a, t, coefficient, cross=True, square=True))
    turned = turn(t, coefficient)
    return TurnedGrams(overlap(a, turned), gram(turned))


class Grams(NamedTuple):
    """``UᵀU``, ``UᵀX`` and ``XᵀX``, each (..., r, r)."""

    own: Tensor
    cross: Tensor
    square: Tensor


def grams(u: Tensor, x: Tensor) -> Grams:
    """All overlaps of two tall factors."""
    if kernels.serve_small(u, x):
        return Grams(*kernels.tall.sums(u, x, own=True, cross=True, square=True))
    return Grams(gram(u), overlap(u, x), gram(x))


class Plus(NamedTuple):
    """A further term ``weight x`` of a combination, with x (..., m, r)."""

    x: Tensor
    weight: float


def subtract(
    t: Tensor,
    u: Tensor,
    coefficient: Tensor,
    weight: float = 1.0,
    plus: Plus | None = None,
    *,
    given: bool = False,
) -> Tensor:
    """``weight t − u coefficient``, with a further term if there is one.

    A ``t`` that is given away may be written into.
    """
    if kernels.serve(t, u):
        return kernels.moves.combine(u, coefficient, t, weight, sign=-1.0, plus=plus, given=given)
    if plus is not None:
        made = torch.add(weight * t, plus.x, alpha=plus.weight)
        return add_product(made, u, coefficient, alpha=-1.0, given=True)
    return add_product(t, u, coefficient, beta=weight, alpha=-1.0, given=given)


class Measured(NamedTuple):
    """A vector (..., m, r), and the square of its norm (...)."""

    rows: Tensor
    square: Tensor


def measured_subtract(
    t: Tensor, u: Tensor, coefficient: Tensor, weight: float, plus: Plus | None
) -> Measured:
    """`subtract`, and the square of what it makes."""
    if kernels.serve(t, u):
        return Measured(*kernels.moves.subtract(t, weight, u, coefficient, plus))
    made = subtract(t, u, coefficient, weight, plus)
    return Measured(made, square(made))


def turn(t: Tensor, c_t: Tensor, plus: Plus | None = None) -> Tensor:
    """``t c_t``, with a further term if there is one."""
    if kernels.serve(t):
        return kernels.moves.combine(None, None, t, c_t, plus=plus)
    if plus is not None:
        return add_product(plus.x, t, c_t, beta=plus.weight)
    return (c_t.mT @ t.mT).mT if by_columns(t) else t @ c_t


class Lifted(NamedTuple):
    """A vector (..., m, r), and its inner product (...) with the gradient it was made of."""

    rows: Tensor
    inner: Tensor


def lift(g: Tensor, c_g: Tensor, a: Tensor, c_a: Tensor) -> Lifted:
    """``g c_g − a c_a``, and how far it lies along ``g``."""
    if kernels.serve(g, a):
        return Lifted(*kernels.moves.lift(g, c_g, a, c_a))
    made = add_product(turn(g, c_g), a, c_a, alpha=-1.0, given=True)
    return Lifted(made, inner(g, made))


def inner(x: Tensor, y: Tensor) -> Tensor:
    """``⟨x, y⟩`` over the last two dimensions, (...)."""
    x, y = (each.mT if by_columns(x) else each for each in (x, y))
    # No copy of x y in between, and not one long product, which takes five times as long.
    length = x.shape[-1]
    part = math.gcd(length, _INNER)
    shape = (*x.shape[:-2], -1, part if part >= _SHORTEST_INNER else length)
    made: Tensor = x.reshape(shape)[..., None, :] @ y.reshape(shape)[..., None]
    return made.flatten(-3).sum(-1)


def combine(a: Tensor, c_a: Tensor, t: Tensor, c_t: Tensor) -> Tensor:
    """``a c_a + t c_t``."""
    if kernels.serve(a, t):
        return kernels.moves.combine(a, c_a, t, c_t)
    return add_product(turn(a, c_a), t, c_t, given=True)


def move(a: Tensor, c_a: Tensor, t: Tensor, c_t: Tensor, alive: Tensor) -> Tensor:
    """``a + a c_a + t c_t``, and ``a`` itself for members (batch,) that are not ``alive``."""
    if kernels.serve(a, t):
        return kernels.moves.combine(a, c_a, t, c_t, add_a=True, alive=alive)
    return choose(add_product(add_product(a, a, c_a), t, c_t, given=True), a, alive)


def step(
    a: Tensor, t: Tensor, scale: Tensor, alive: Tensor | None = None, weight: float = 1.0
) -> Tensor:
    """``weight a + scale t`` with a ``scale`` (batch,), ``weight a`` for members not ``alive``."""
    if kernels.serve(a, t):
        return kernels.moves.step(a, t, scale, alive, weight)
    a = a if weight == 1 else weight * a
    moved = torch.addcmul(a, per_member(scale, t), t)
    return moved if alive is None else choose(moved, a, alive)


class Ahead(NamedTuple):
    """A step from a vector (batch, ...), and the same step once more from there."""

    once: Tensor
    twice: Tensor


def steps(a: Tensor, t: Tensor, scale: Tensor, weight: float) -> Ahead:
    """``weight a + scale t`` with a ``scale`` (batch,), and the same of what this makes."""
    if kernels.serve(a, t):
        return Ahead(*kernels.moves.steps(a, t, scale, weight))
    once = step(a, t, scale, weight=weight)
    return Ahead(once, step(once, t, scale, weight=weight))


def choose(yes: Tensor, no: Tensor, mask: Tensor) -> Tensor:
    """``yes`` for the members (batch,) of the mask, ``no`` for the others, to the last bit.

    ``yes`` is given away: it may be what is returned, with ``no`` written into it.
    """
    if can_ask(mask) and mask.all():
        return yes
    if kernels.serve(yes, no) and yes.is_contiguous() and no.is_contiguous():
        return kernels.moves.restore(yes, no, mask)
    return torch.where(per_member(mask, yes), yes, no)


def can_ask(x: Tensor) -> bool:
    """Whether asking for a value of ``x`` is free: on a CPU, outside of compilation.

    Elsewhere the host would wait for the device.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def per_member(scale: Tensor, like: Tensor) -> Tensor:
    """(batch,) broadcast against ``like`` (batch, ...), or both sides of it behind each other."""
    if 2 * len(scale) == len(like):
        scale = scale.repeat(2)
    return scale.reshape(-1, *([1] * (like.dim() - 1)))


def add_product(
    base: Tensor,
    x: Tensor,
    c: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    given: bool = False,
) -> Tensor:
    """``beta base + alpha x c``, in one operation; ``base`` and ``c`` broadcast.

    A ``base`` that is given away, and of the shape of the result, may be written into.
    """
    shape = (*x.shape[:-1], c.shape[-1])
    if x.dim() != 3 or c.shape[:-2] != x.shape[:-2]:
        c = c.expand(*x.shape[:-2], *c.shape[-2:])
        base, x, c = (y.reshape(-1, *y.shape[-2:]) for y in (base.expand(shape), x, c))
    add = torch.Tensor.baddbmm_ if given else torch.baddbmm
    if by_columns(x):
        return add(base.mT, c.mT, x.mT, beta=beta, alpha=alpha).mT.view(shape)
    return add(base, x, c, beta=beta, alpha=alpha).view(shape)


def by_columns(x: Tensor) -> bool:
    """Whether columns of ``x`` (..., m, r) lie in one piece each, and may stay so: on a CPU."""
    return x.device.type == "cpu" and x.stride(-2) == 1 and x.stride(-1) != 1
