"""Triton kernels for the r×r part of a step on orthonormal factors, float32.

Corrections for r up to 128, landings up to 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tall import Grams
from ..together import empty_like_both
from .floats import single
from .products import dot
from .refine import launch, root_changes, tile
from .sizes import padded


@triton.jit
def _skew(x):
    return 0.5 * (x - tl.trans(x))


@triton.jit
def _skew_total(source, blocks, square, inside, r, R: tl.constexpr):
    total = tl.zeros((R, R), tl.float32)
    for k in range(blocks):
        total += tl.load(source + k * r * r + square, mask=inside, other=0.0)
    return _skew(total)


@triton.jit
def _corrections_kernel(
    left_ptr, right_ptr, left_out, right_out, i, j, r,
    l_sym, l_skew, l_own, l_other, r_sym, r_skew, r_own, r_other,
    R: tl.constexpr,
):  # fmt: skip
    """One program a member: totals over its blocks first, then every block's correction."""
    l_sym, l_skew, l_own, l_other = single(l_sym), single(l_skew), single(l_own), single(l_other)
    r_sym, r_skew, r_own, r_other = single(r_sym), single(r_skew), single(r_own), single(r_other)
    member = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, R)[:, None]
    cols = tl.arange(0, R)[None, :]
    square = rows * r + cols
    inside = (rows < r) & (cols < r)
    left_ptr += member * i * r * r
    left_out += member * i * r * r
    right_ptr += member * j * r * r
    right_out += member * j * r * r
    left = _skew_total(left_ptr, i, square, inside, r, R)
    right = _skew_total(right_ptr, j, square, inside, r, R)
    common = left * l_own + right * l_other
    for k in range(i):
        x = tl.load(left_ptr + k * r * r + square, mask=inside, other=0.0)
        out = (x - _skew(x)) * l_sym + _skew(x) * l_skew + common
        tl.store(left_out + k * r * r + square, out, mask=inside)
    common = right * r_own + left * r_other
    for k in range(j):
        x = tl.load(right_ptr + k * r * r + square, mask=inside, other=0.0)
        out = (x - _skew(x)) * r_sym + _skew(x) * r_skew + common
        tl.store(right_out + k * r * r + square, out, mask=inside)


@triton.jit
def _landing_kernel(
    own_ptr, cross_ptr, square_ptr, scale_ptr, change_ptr, share_ptr, norm_ptr,
    r, repeat, members, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The Gram matrix of a moved factor, its inverse root, and what they do to the columns."""
    place, inside, eye = tile(r, R)
    block = tl.program_id(0)
    g = tl.load(scale_ptr + block // repeat % members)
    cross = g * tl.load(cross_ptr + place, mask=inside, other=0.0)
    off = 0.5 * (cross + tl.trans(cross))
    gram = tl.load(own_ptr + place, mask=inside, other=eye)
    gram -= dot(off, gram, PRECISION)
    gram -= dot(gram, off, PRECISION)
    cross -= dot(off, cross, PRECISION)
    gram += cross + tl.trans(cross)
    gram += g * g * tl.load(square_ptr + place, mask=inside, other=0.0)
    _, turn = root_changes(gram, eye, PRECISION)
    scaling = eye + turn
    product = dot(gram, scaling, PRECISION) * scaling
    tl.store(norm_ptr + block, tl.sqrt(tl.sum(tl.sum(tl.where(inside, product, 0.0), 1), 0)))
    tl.store(share_ptr + place, g * scaling, mask=inside)
    change = turn - dot(off, scaling, PRECISION)
    tl.store(change_ptr + place, change, mask=inside)


def corrections(
    left: Tensor, right: Tensor, left_weights: tuple[float, ...], right_weights: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Corrections of all blocks, (batch, I, r, r) and (batch, J, r, r), from their overlaps."""
    left, right = left.contiguous(), right.contiguous()
    made = empty_like_both(left, right)
    batch, i, r, _ = left.shape
    size = padded(r)
    # Some matrices at once in registers: those of more threads where they are larger.
    _corrections_kernel[(batch,)](
        left, right, *made, i, right.shape[1], r, *left_weights, *right_weights,
        R=size, num_warps=4 if size <= 64 else 16,
    )  # fmt: skip
    return made


@triton.jit
def _side_square(square_ptr, cross_ptr, blocks, r, inner, INNER: tl.constexpr, R: tl.constexpr):
    """The sum over a member's blocks of tr ΞᵀΞ − inner ‖UᵀΞ‖²."""
    rows = tl.arange(0, R)
    cols = tl.arange(0, R)[None, :]
    inside = (rows[:, None] < r) & (cols < r)
    found = tl.zeros((R,), tl.float32)
    for k in range(blocks):
        first = k * r * r
        found += tl.load(square_ptr + first + rows * (r + 1), mask=rows < r, other=0.0)
        if INNER:
            cross = tl.load(cross_ptr + first + rows[:, None] * r + cols, mask=inside, other=0.0)
            found -= inner * tl.sum(cross * cross, 1)
    return tl.sum(found, 0)


@triton.jit
def _length_kernel(
    l_square, l_cross, r_square, r_cross, out_ptr, i, j, r, inner,
    INNER: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    left, right = member * i * r * r, member * j * r * r
    inner = single(inner)
    length = j * _side_square(l_square + left, l_cross + left, i, r, inner, INNER, R)
    length += i * _side_square(r_square + right, r_cross + right, j, r, inner, INNER, R)
    # Not tl.maximum, which would make zero of NaN.
    tl.store(out_ptr + member, tl.where(length < 0.0, 0.0, length))


def length(left: Grams, right: Grams, inner: float) -> Tensor:
    """J Σ(‖Ξ_i‖² − inner ‖U_iᵀΞ_i‖²) + I Σ(…) (batch,), never negative, from what both overlap.

    That is (batch, I, r, r) on the left, and (batch, J, r, r) on the right.
    """
    given = [x.contiguous() for x in (left.square, left.cross, right.square, right.cross)]
    batch, i, r, _ = given[0].shape
    out = given[0].new_empty(batch)
    _length_kernel[(batch,)](
        *given, out, i, given[2].shape[1], r, inner, INNER=inner != 0, R=padded(r), num_warps=4
    )
    return out


class Polar(NamedTuple):
    """The polar factor of U + γΞ as U + U ``change`` + Ξ ``share``, and its ``norm``.

    ``change`` and ``share`` are (batch, blocks, r, r), norms (batch, blocks).
    """

    change: Tensor
    share: Tensor
    norm: Tensor


def landing(own: Tensor, cross: Tensor, square: Tensor, scale: Tensor) -> Polar:
    """Where a step γΞ from U ends.

    What of UᵀΞ is symmetric is rounding, and taken out first.
    ``own``, ``cross`` and ``square`` are (batch, blocks, r, r), ``scale`` is (batch,), or half as
    long and the same for both halves.
    """
    own, cross, square, scale = (x.contiguous() for x in (own, cross, square, scale))
    change, share = torch.empty_like(own), torch.empty_like(own)
    norm = own.new_empty(own.shape[:-2])
    r = own.shape[-1]
    _landing_kernel[(norm.numel(),)](
        own, cross, square, scale, change, share, norm,
        r, own.shape[1], len(scale), **launch(r),
    )  # fmt: skip
    return Polar(change, share, norm)
