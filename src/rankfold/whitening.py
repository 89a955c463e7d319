"""Directions of each factor's part alone, whose singular values are all one, or tilted past that.

A step along X (XᵀX)^(-1/2) moves as far along what a gradient has little of as along what it has
much of. Natural gradients go further, and along what they have little of the most: a *tilt* δ is
so much of that way, X (XᵀX)^(-(1+δ)/2). The *balance* ρ does the same to rows, which are the
coordinates that a layer reads or writes: they are divided by their norms to the ρ before and after.
Neither changes a direction's Frobenius norm, nor looks at the gauge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, linalg, tall
from .linalg import squared_norm_weighted, trace
from .schatten import SMALLEST, SMALLEST_PART, inverse_root, least_square, stretches
from .together import both

# `SMALLEST` in a second pass over what a first one has raised, where all are at most 1.
_SMALLEST_RAISED = 2.0**-4
# Of roots of a matrix with eigenvalues from `SMALLEST` on: beside these its ridge is nothing.
_SMALLEST_OF_ROOTS = 2.0**-12
_LARGEST_RAISED = 1 + 2.0**-4
# Rows below this share of the largest are raised by as much as one that has it.
_SMALLEST_ROW = 2.0**-8

TILTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # found by products: every half is a root more


class Manner(NamedTuple):
    """How parts are whitened: norms count from ``floor`` on, and the two powers above.

    These are for ``members`` (batch,) alone, or for all where that is None.
    """

    floor: float
    tilt: float = 0.0
    balance: float = 0.0
    members: Tensor | None = None

    def chosen(self, new: Tensor, old: Tensor | float) -> Tensor:
        """``new`` (batch, ...) of its members, and ``old`` of the others."""
        if self.members is None:
            return new
        return torch.where(tall.per_member(self.members, new), new, old)


class Direction(NamedTuple):
    """Rows (batch, I, m, r), C (batch, I, r, r) and the squares ‖rows_i C_i‖² (batch, I).

    ``rows`` times C is the direction.
    """

    rows: Tensor
    turn: Tensor
    squares: Tensor


def whiten_both(
    parts: Sequence[Tensor],
    turns: tuple[Tensor, Tensor] | None,
    manner: Manner,
    shares: tuple[Tensor, Tensor] | None = None,
) -> tuple[Direction, Direction]:
    """`whiten` of both sides of a vector: the partners of a factor are those of the other side."""
    factors = sum(x.shape[1] for x in parts)
    members = None if manner.members is None else (manner.members, manner.members)
    named = {"turn": turns, "share": shares, "members": members}
    pairs = {name: pair for name, pair in named.items() if pair is not None}

    def side(x: Tensor, *values: Tensor) -> Direction:
        told = dict(zip(pairs, values, strict=True))
        how = manner._replace(members=told.get("members"))
        return whiten(x, told.get("turn"), factors - x.shape[1], how, told.get("share"))

    return both(side, parts, *pairs.values())


def whiten(
    x: Tensor, turn: Tensor | None, partners: int, manner: Manner, share: Tensor | None = None
) -> Direction:
    """The direction of each X_i = ``x turn``, (batch, I, m, r) times (batch, 1, r, r), or ``x``.

    X_i is what a factor's part does to all of its products side by side, so that their root mean
    square over ``partners`` is 1. Where that of its norm is below the floor, or its norm far below
    that of the whole side, the direction is shorter by as much, so that zero stays zero. ``share``
    (batch,) is what is made of each.
    """
    if manner.balance:
        x, turn = x if turn is None else tall.turn(x, turn), None
        x, weights = _balanced(x, manner)
    made, squares = _even(x, turn, partners, manner, share)
    if manner.balance:
        x = x * weights
    made = made if turn is None else turn @ made
    if manner.tilt or manner.balance:
        # Of the rows: by a Gram matrix, what is raised most would be its rounding.
        made = _of_square(made, squares, tall.turned_square(x, made, manner.members), manner)
    return Direction(x, made, squares)


def _of_square(made: Tensor, square: Tensor, now: Tensor, manner: Manner) -> Tensor:
    """What is ``made`` (batch, I, r, r) with the squares that they should have, (batch, I)."""
    if kernels.serve_small(made):
        return kernels.whiten.of_square(made, square, now, manner.members)
    ratio = manner.chosen(square / now.clamp_min(least_square(now)), 1.0)
    return ratio.sqrt()[..., None, None] * made


def _even(
    x: Tensor, turn: Tensor | None, partners: int, manner: Manner, share: Tensor | None
) -> tuple[Tensor, Tensor]:
    """C_i, tilted, for rows as they are, and what ‖X_i C_i‖² is without a tilt.

    Gradients of attention have singular values of 2⁻¹⁰ of their norm by the dozen, whose squares a
    Gram matrix in float32 has lost. Hence two passes: the second Gram matrix is of what the first
    one has raised. Those below 2⁻¹² count for less.
    """
    gram = tall.gram(x) if turn is None else tall.turned_gram(x, turn)
    own = trace(gram)
    scale = own.clamp_min(least_square(own))
    first = inverse_root(gram, scale)
    raised = tall.turned_gram(x, first if turn is None else turn @ first)
    if kernels.serve_small(raised):
        return kernels.whiten.even(
            raised, first, own, share, manner.members, _numbers(partners, manner)
        )
    second = inverse_root(raised, torch.ones_like(own), _SMALLEST_RAISED)
    # Of what overflows both are infinite, and what comes of it is NaN, which stops its member.
    least = (SMALLEST_PART**2 * own).sum(-1, keepdim=True).clamp_min(partners * manner.floor**2)
    square = partners * (own / least).clamp_max(1)
    if share is not None:
        square = square * share[:, None].square()
    squares = square * squared_norm_weighted(second, raised)
    if manner.tilt:
        power = _power(first * (SMALLEST * scale.sqrt())[..., None, None], manner.tilt)
        second = manner.chosen(second @ power, second)
    return square.sqrt()[..., None, None] * (first @ second), squares


def _numbers(partners: int, manner: Manner) -> kernels.whiten.Numbers:
    """What a kernel has to know."""

    def spectrum(smallest: float, low: float) -> kernels.whiten.Spectrum:
        return kernels.whiten.Spectrum(smallest, low, len(stretches(low, torch.float32)))

    halvings = [spectrum(_SMALLEST_OF_ROOTS, low) for low in _lows(manner.tilt)]
    return kernels.whiten.Numbers(
        floor=partners * manner.floor**2,
        partners=partners,
        smallest=SMALLEST,
        part=SMALLEST_PART**2,
        raised=spectrum(_SMALLEST_RAISED, _SMALLEST_RAISED),
        halvings=halvings if manner.tilt else None,
        largest=_LARGEST_RAISED,
    )


def _power(x: Tensor, power: float) -> Tensor:
    """Symmetric ``x`` (..., r, r), eigenvalues from about `SMALLEST` to 1, to one of `TILTS`.

    Rounding takes some past 1, where a gradient has a lower rank than its factor.
    """
    scale = torch.full_like(x[..., 0, 0], _LARGEST_RAISED)
    for low in _lows(power):
        x = linalg.sym(x @ inverse_root(x, scale, _SMALLEST_OF_ROOTS, low))
    return x


def _lows(power: float) -> list[float]:
    """Where the inverse roots begin that take eigenvalues from `SMALLEST` on to ``power``."""
    found, low = [], SMALLEST
    while 0 < power < 1:
        low = low**0.5  # of the next matrix
        found.append(low / _LARGEST_RAISED**0.5)
        power *= 2
    return found


def _balanced(x: Tensor, manner: Manner) -> tuple[Tensor, Tensor]:
    """Rows of ``x`` (batch, I, m, r) times weights (batch, I, m, 1), 1 for the largest row."""
    if kernels.serve(x):
        return kernels.whiten.balanced(x, manner.balance, _SMALLEST_ROW, manner.members)
    least = linalg.least_norm(x.dtype)
    sizes: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    share = sizes / sizes.amax(-2, keepdim=True).clamp_min(least)
    weights = (share.square() + _SMALLEST_ROW**2) ** (-manner.balance / 2)
    weights = manner.chosen(weights, 1.0)
    return x * weights, weights
