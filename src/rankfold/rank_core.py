"""The best rank-r approximation that a truncated-SVD retraction asks for, wholly in r×r."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, tall
from .linalg import frobenius, identity_like, inverse


class RankCore(NamedTuple):
    """Best rank-r approximation of ``U core Vᵀ + X Vᵀ + U Yᵀ`` in coefficients, each (..., r, r).

    It is ``(U left + X) overlap⁻¹ (V + Y right)ᵀ`` with ``overlap = I + rightᵀ YᵀY right``.
    ``inverse`` is that of ``left``, and ``unconverged`` ``(...,)`` marks members whose last
    iteration still moved the subspace.
    """

    left: Tensor
    right: Tensor
    inverse: Tensor
    unconverged: Tensor


def best_rank_core(core: Tensor, xx: Tensor, yy: Tensor, guess: Tensor) -> RankCore:
    """Alternating least squares for the rank-r approximation, wholly in r×r coefficients.

    ``core`` is S + γK, ``xx`` and ``yy`` the Gram matrices of the orthogonal parts γX and γY, all
    (..., r, r), and ``guess`` a matrix near the inverse of ``core`` for steps that are not too
    long. Each half step keeps one side's coefficient of U (or V) at the identity, which
    in float32 costs κ of the core where normal equations would cost κ². The error falls by
    (σ_{r+1}/σ_r)² an iteration, from t³ at the start for a step of relative size t.
    """
    iterations = rank_iterations(core.dtype)
    if kernels.serve_small(core):
        found = kernels.refine.best_rank_core(
            core, xx, yy, guess, iterations, left_to_move(core.dtype)
        )
        return RankCore(*found)
    moved, settled = [], None
    if kernels.serve(core):
        # The guess is a step away from it, the others less: a round of Newton's iteration first.
        guess = guess.expand_as(core)
        error = tall.add_product(identity_like(core), core, guess, alpha=-1.0)
        guess = tall.add_product(guess, guess, error)
    left, left_inverse = core, inverse(core, guess)
    right, pulled = left_inverse.mT, torch.zeros_like(core)
    for _ in range(iterations):
        old = (left, left_inverse, right, pulled)
        right = inverse(tall.add_product(core.mT, xx, left_inverse), right)
        pulled = yy @ right
        left = core + pulled
        left_inverse = inverse(left, left_inverse)
        if settled is not None:
            stays, new = settled[..., None, None], (left, left_inverse, right, pulled)
            left, left_inverse, right, pulled = map(torch.where, (stays,) * 4, old, new)
        if tall.can_ask(core):
            settled = _is_settled(left_inverse, old[1], right, xx, yy)
            if settled.all():
                return RankCore(left, right, left_inverse, ~settled)
        # How far Y right moved; the first of these means nothing, and the last two count.
        moved.append(((right - old[2]) * (pulled - old[3])).sum((-2, -1)).clamp_min(0).sqrt())
    return RankCore(left, right, left_inverse, _still_moving(*moved[-2:]))


def _is_settled(inverse: Tensor, before: Tensor, right: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """Members (...) that no further iteration of `best_rank_core` would change but for rounding.

    The next changes ``right`` by right xx (before − inverse) right, and with it the inverse.
    """
    size = frobenius(right)
    change = size * frobenius(xx) * frobenius(inverse - before)
    change *= 1 + frobenius(inverse) * frobenius(yy) * size
    return change < torch.finfo(right.dtype).eps


def rank_iterations(dtype: torch.dtype) -> int:
    """How often `best_rank_core` iterates."""
    return 5 if dtype == torch.float64 else 3


def _still_moving(before: Tensor, last: Tensor) -> Tensor:
    """Which members (...) have not converged, by how far the last two iterations moved."""
    # What is left after the last is by its share of the one before: last · min(last / before, 1).
    return last * torch.minimum(last, before) > left_to_move(last.dtype) * before


def left_to_move(dtype: torch.dtype) -> float:
    """The share of a distance that `best_rank_core` may have left to move."""
    return float(torch.finfo(dtype).eps ** (2 / 3))
