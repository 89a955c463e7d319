"""Triton kernels on numbers a member, (batch,) float32 and booleans.

None of them does more than a microsecond's work: what counts is that each is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .sizes import parts

_BLOCK = 128


@triton.jit
def _over_root_kernel(
    scale_ptr, square_ptr, out_ptr, members, stride, least, factor,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = member < members
    root = tl.sqrt_rn(tl.load(square_ptr + member, mask=there, other=1.0))
    root = tl.where(root == float("inf"), float("nan"), root)
    least, factor = single(least), single(factor)
    root = tl.where(root < least, least, root)  # and NaN stays NaN
    if SCALED:
        factor *= tl.load(scale_ptr + member * stride, mask=there, other=0.0)
    tl.store(out_ptr + member, tl.div_rn(factor, root), mask=there)


def over_root(square: Tensor, least: float, factor: float, scale: Tensor | None) -> Tensor:
    """``factor scale / max(√square, least)`` (batch,); ``scale`` may be of stride 0."""
    square = square.contiguous()
    out, members = torch.empty_like(square), len(square)
    _over_root_kernel[(parts(members, _BLOCK),)](
        square if scale is None else scale, square, out, members,
        0 if scale is None else scale.stride(0), least, factor,
        SCALED=scale is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _grown_kernel(
    scale_ptr, square_ptr, out_ptr, members, stride, share, power, BLOCK: tl.constexpr
):  # fmt: skip
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = member < members
    square = single(share) * tl.load(square_ptr + member, mask=there, other=1.0)
    growth = tl.exp2(0.5 * single(power) * tl.log2(square))
    scale = tl.load(scale_ptr + member * stride, mask=there, other=0.0)
    tl.store(out_ptr + member, scale * growth, mask=there)


def grown(scale: Tensor, square: Tensor, share: float, power: float) -> Tensor:
    """``scale √(share square)^power`` (batch,); ``scale`` may be of stride 0."""
    square = square.contiguous()
    out, members = torch.empty_like(square), len(square)
    _grown_kernel[(parts(members, _BLOCK),)](
        scale, square, out, members, scale.stride(0), share, power, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _sum(x_ptr, member, there, columns, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.float32)
    for k in range(columns):
        found += tl.load(x_ptr + member * columns + k, mask=there, other=0.0)
    return found


@triton.jit
def _total_kernel(left_ptr, right_ptr, out_ptr, members, i, j, BLOCK: tl.constexpr):
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = member < members
    found = _sum(left_ptr, member, there, i, BLOCK) + _sum(right_ptr, member, there, j, BLOCK)
    tl.store(out_ptr + member, found, mask=there)


def total(left: Tensor, right: Tensor) -> Tensor:
    """The sums (batch,) of all numbers (batch, I) and (batch, J) of a member."""
    out = left.new_empty(len(left))
    _total_kernel[(parts(len(left), _BLOCK),)](
        left.contiguous(), right.contiguous(), out, len(left), left.shape[1], right.shape[1],
        BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _largest(norms_ptr, member, there, blocks, BLOCK: tl.constexpr):
    """The largest of each member's norms, or NaN if one is."""
    found = tl.zeros((BLOCK,), tl.float32)
    for k in range(blocks):
        norm = tl.load(norms_ptr + member * blocks + k, mask=there, other=0.0)
        found = tl.where((norm > found) | (norm != norm), norm, found)  # and NaN stays NaN
    return found


@triton.jit
def _within_kernel(
    left_ptr, right_ptr, alive_ptr, members, i, j, largest, BLOCK: tl.constexpr
):  # fmt: skip
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = member < members
    left = _largest(left_ptr, member, there, i, BLOCK)
    right = _largest(right_ptr, member, there, j, BLOCK)
    tl.store(alive_ptr + member, left + right <= single(largest), mask=there)


def within(left: Tensor, right: Tensor, largest: float) -> Tensor:
    """Members (batch,) whose largest norms, of (batch, I) and (batch, J), add up to no more."""
    alive = torch.empty(len(left), dtype=torch.bool, device=left.device)
    _within_kernel[(parts(len(left), _BLOCK),)](
        left.contiguous(), right.contiguous(), alive, len(left), left.shape[1], right.shape[1],
        largest, BLOCK=_BLOCK,
    )  # fmt: skip
    return alive


@triton.jit
def _count(counts_ptr, happened, there):
    counted = tl.load(counts_ptr, mask=there, other=0)
    tl.store(counts_ptr, counted + happened.to(tl.int64), mask=there)


@triton.jit
def _marked(mark_ptr, member, stride, second, there):
    """Whether members are marked on either side, of which the second lies so far behind."""
    mark_ptr += member * stride
    marked = tl.load(mark_ptr, mask=there, other=0) != 0
    return marked | (tl.load(mark_ptr + second, mask=there, other=0) != 0)


@triton.jit
def _count_kernel(
    counts_ptr, alive_ptr, mark_1, mark_2, mark_3, members, between,
    stride_1, stride_2, stride_3, second_1, second_2, second_3,
    ROW_1: tl.constexpr, ROW_2: tl.constexpr, ROW_3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Who is not alive goes to row 0, who is and is marked to the mark's, if it has one."""
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = member < members
    alive = tl.load(alive_ptr + member, mask=there, other=0) != 0
    counts_ptr += member
    _count(counts_ptr, alive == 0, there)
    if ROW_1 > 0:
        marked = alive & _marked(mark_1, member, stride_1, second_1, there)
        _count(counts_ptr + ROW_1 * between, marked, there)
    if ROW_2 > 0:
        marked = alive & _marked(mark_2, member, stride_2, second_2, there)
        _count(counts_ptr + ROW_2 * between, marked, there)
    if ROW_3 > 0:
        marked = alive & _marked(mark_3, member, stride_3, second_3, there)
        _count(counts_ptr + ROW_3 * between, marked, there)


def count(counts: Tensor, alive: Tensor, marks: Sequence[Tensor | None]) -> None:
    """Add to ``counts`` (1 + marks, batch) who is not ``alive``, and who is and is marked.

    Rows of counts, which may lie apart, hold integers. Up to three marks are (batch,), of any
    stride, or (2·batch,) of both sides behind each other; ``alive`` is (batch,).
    """
    alive, members = alive.contiguous(), len(alive)
    rows = [row for row, mark in enumerate(marks, 1) if mark is not None]
    given = [mark for mark in marks if mark is not None]
    strides = [mark.stride(0) for mark in given]
    seconds = [mark.stride(0) * (len(mark) - members) for mark in given]
    spare = 3 - len(given)
    nothing = [0] * spare
    _count_kernel[(parts(members, _BLOCK),)](
        counts, alive, *given, *[alive] * spare, members, counts.stride(0),
        *strides, *nothing, *seconds, *nothing, *rows, *nothing, BLOCK=_BLOCK,
    )  # fmt: skip
