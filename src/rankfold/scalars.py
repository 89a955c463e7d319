"""What a step computes of numbers a member, (batch,).

On a GPU every operation costs a launch here and nothing else: kernels make one of several.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import kernels, linalg


def over_root(square: Tensor, least: float, factor: float, scale: Tensor | None = None) -> Tensor:
    """``factor scale / √square`` (batch,), or over ``least`` where that is larger.

    NaN where the square has overflowed: a step of zero would pass for a finite one.
    """
    if kernels.serve_numbers(square):
        return kernels.scalars.over_root(square, least, factor, scale)
    root = linalg.overflown_is_nan(square.sqrt()).clamp_min(least)
    return (factor if scale is None else factor * scale) / root


def grown(scale: Tensor, square: Tensor, share: float, power: float) -> Tensor:
    """``scale √(share square)^power``, (batch,)."""
    if kernels.serve_numbers(square):
        return kernels.scalars.grown(scale, square, share, power)
    return scale * (share * square).sqrt() ** power


def total(left: Tensor, right: Tensor) -> Tensor:
    """The sums (batch,) of all numbers (batch, I) and (batch, J) that a member has."""
    if kernels.serve_numbers(left):
        return kernels.scalars.total(left, right)
    return left.sum(1) + right.sum(1)


def within(norms: Sequence[Tensor], largest: float) -> Tensor:
    """Members (batch,) none of whose blocks' norms (batch, blocks) is too large or not a number.

    What is bounded is the sum of the largest of either side.
    """
    left, right = norms
    if kernels.serve_numbers(left):
        return kernels.scalars.within(left, right, largest)
    return left.amax(1) + right.amax(1) <= largest


def count(counts: Tensor, alive: Tensor, marks: Sequence[Tensor | None]) -> None:
    """Add to ``counts`` (1 + marks, batch), integers, who is not ``alive``, then who is marked.

    Masks are (batch,), marks perhaps (2·batch,), those of both sides behind each other. Of a member
    that is not alive no mark counts.
    """
    if kernels.available(counts.device):
        kernels.scalars.count(counts, alive, marks)
        return
    # In place: a recorded graph goes on counting.
    for row, members in zip(counts, happened(alive, marks), strict=True):
        if members is not None:
            row.add_(members)


def happened(alive: Tensor, marks: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Who was skipped, and who was not and is marked, each (batch,), None where nobody could be."""
    return [~alive, *(None if x is None else _either(x, alive) & alive for x in marks)]


def _either(mark: Tensor, like: Tensor) -> Tensor:
    return mark if len(mark) == len(like) else mark.view(2, -1).any(0)
