"""One call for both sides of a stack, where the two lie behind each other in memory.

What a step does to the left factors it does to the right ones. On a GPU either leaves half of the
device idle, or waits on a chain of small products, so that one launch for both takes hardly longer
than a launch for one. Two tensors (batch, ...) that lie in one piece are then taken for one of
(2·batch, ...), which costs nothing; everything here works member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from . import kernels

T = TypeVar("T")


def both(
    function: Callable[..., T], *pairs: Sequence[Tensor], shared: Sequence[Tensor] = ()
) -> tuple[T, T]:
    """``function`` of the left ones and of the right ones of ``pairs``, in one call or in two.

    It must work member by member on tensors (batch, ...), and return one or a named tuple of them.
    Tall factors are never copied for this; what is r×r, or a number a member, is. What comes last,
    if anything, is ``shared``: numbers (batch,) that both sides have, which stay (batch,) where the
    rest is (2·batch, ...). `tall.per_member` and the kernels count on that.
    """
    lefts, rights = zip(*pairs, strict=True)
    if kernels.serve(lefts[0]) and not torch.compiler.is_compiling():
        joined = [_whole(left, right) for left, right in pairs]
        whole = [x for x in joined if x is not None]
        if len(whole) == len(pairs):
            return halves(function(*whole, *shared))
    return function(*lefts, *shared), function(*rights, *shared)


def as_one(left: Tensor, right: Tensor) -> Tensor:
    """Two tensors (batch, ...) of one shape as one (2·batch, ...): a view of both, or a copy."""
    lying = _lying(left, right)
    return torch.cat((left, right)) if lying is None else lying


def halves(made: T) -> tuple[T, T]:
    """The inverse of `as_one`, of a tensor or of all tensors of a named tuple."""
    if isinstance(made, Tensor):
        return cast(tuple[T, T], made.chunk(2))
    left, right = zip(*(x.chunk(2) for x in cast(Sequence[Tensor], made)), strict=True)
    kind = cast(Callable[..., T], type(made))
    return kind(*left), kind(*right)


def empty_like_both(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Room for results of these shapes, behind each other if they are the same."""
    if left.shape != right.shape:
        return torch.empty_like(left), torch.empty_like(right)
    return halves(left.new_empty(2 * left.shape[0], *left.shape[1:]))


def _whole(left: Tensor, right: Tensor) -> Tensor | None:
    """Both as one, unless they are of different shapes, or tall and lie apart."""
    if left.shape != right.shape:
        return None
    tall = left.dim() > 1 and left.shape[-2] != left.shape[-1]
    return _lying(left, right) if tall else as_one(left, right)


def _lying(left: Tensor, right: Tensor) -> Tensor | None:
    """Both as a view, if ``right`` begins where a next member of ``left`` would."""
    if (
        torch.compiler.is_compiling()
        or left.untyped_storage()._cdata != right.untyped_storage()._cdata
    ):
        return None
    members, shape, strides = left.shape[0], left.shape[1:], left.stride()[1:]
    distance = right.storage_offset() - left.storage_offset()
    if shape != right.shape[1:] or strides != right.stride()[1:] or distance <= 0:
        return None
    step = distance // members
    if step * members != distance or (members > 1 and left.stride(0) != step):
        return None
    return left.as_strided((2 * members, *shape), (step, *strides))
