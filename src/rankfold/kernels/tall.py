"""Triton kernels for sums over the rows of tall float32 factors, r up to 128.

One program takes one factor and one run of its rows. Sums over rows are made in the same order
every time: each program writes what it summed, and the few parts of a factor are added afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .products import PRECISION, dot_split, half_gram, overlap, split
from .sizes import Shape, padded, schedule

# Sums are better made by fewer: what each has summed is written, and added up by another launch.
_SUMMING_PROGRAMS = 192

# Measured on an H200. Sums take all columns: several at once up to rank 64, above it one, of a
# factor with itself or with another.
_SUMS = Shape(64, 64, 4, 2)
_OWN, _CROSS = Shape(64, 128, 8, 3), Shape(32, 128, 8, 3)
_SQUARES = Shape(64, 64, 4, 2)


@triton.jit
def _sums_kernel(
    a_ptr, t_ptr, turn_ptr, scale_ptr, own_ptr, cross_ptr, square_ptr,
    m, r, run, parts, repeat, repeat_scale, members,
    R: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, LYING: tl.constexpr,
    STEP: tl.constexpr, OWN: tl.constexpr, CROSS: tl.constexpr, SQUARE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of AᵀA, AᵀC and CᵀC with C = T turn, over ``run`` rows; A + scale T for A if asked.

    Blocks of rows are added up outside the tensor cores, which round towards zero.
    """
    factor = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols = tl.arange(0, R)
    square = cols[:, None] * r + cols[None, :]
    inside = (cols[:, None] < r) & (cols[None, :] < r)
    if TURN:
        turn = tl.load(turn_ptr + (factor // repeat) * r * r + square, mask=inside, other=0.0)
        if LYING:
            turn = tl.trans(turn)
        turn_1, turn_2, turn_3 = split(turn, PRECISION)
    if STEP:
        scale = tl.load(scale_ptr + factor // repeat_scale % members)
    if OWN:
        own_sum = tl.zeros((R, R), tl.float32)
    if CROSS:
        cross_sum = tl.zeros((R, R), tl.float32)
    if SQUARE:
        square_sum = tl.zeros((R, R), tl.float32)
    last = tl.minimum(part * run + run, m)
    for start in range(part * run, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        place = factor * m * r + rows[:, None] * r + cols[None, :]
        there = (rows[:, None] < last) & (cols[None, :] < r)
        if OWN or CROSS:
            a = tl.load(a_ptr + place, mask=there, other=0.0)
        if STEP:
            a += scale * tl.load(t_ptr + place, mask=there, other=0.0)
        if OWN:
            own_sum += half_gram(a, PRECISION)
        if CROSS or SQUARE:
            c = tl.load(t_ptr + place, mask=there, other=0.0)
            if TURN:
                c = dot_split(c, turn_1, turn_2, turn_3, PRECISION)
        if CROSS:
            cross_sum += overlap(a, c, PRECISION)
        if SQUARE:
            square_sum += half_gram(c, PRECISION)
    out = (factor * parts + part) * r * r + square
    if OWN:
        tl.store(own_ptr + out, own_sum + tl.trans(own_sum), mask=inside)
    if CROSS:
        tl.store(cross_ptr + out, cross_sum, mask=inside)
    if SQUARE:
        tl.store(square_ptr + out, square_sum + tl.trans(square_sum), mask=inside)


@triton.jit
def _square_kernel(
    t_ptr, turn_ptr, only_ptr, norm_ptr, m, r, run, repeat, repeat_only,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of ‖T turn‖² or ‖T‖², over ``run`` rows and some columns; of some members only."""
    factor = tl.program_id(1).to(tl.int64)
    part = (factor * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0)
    norm_ptr += part + tl.program_id(0)
    if MASKED:  # noqa: SIM102  (the one is known when a kernel is compiled, the other is not)
        if tl.load(only_ptr + factor // repeat_only) == 0:
            tl.store(norm_ptr, 0.0)
            return
    cols = tl.arange(0, R)
    own = tl.program_id(0) * COLS + tl.arange(0, COLS)
    if TURN:
        square = cols[:, None] * r + own[None, :]
        inside = (cols[:, None] < r) & (own[None, :] < r)
        turn = tl.load(turn_ptr + (factor // repeat) * r * r + square, mask=inside, other=0.0)
        turn_1, turn_2, turn_3 = split(turn, PRECISION)
    total = tl.zeros((ROWS, COLS), tl.float32)
    first = tl.program_id(2) * run
    last = tl.minimum(first + run, m)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        place = t_ptr + factor * m * r + rows * r
        if TURN:
            there = (rows < last) & (cols[None, :] < r)
            c = tl.load(place + cols[None, :], mask=there, other=0.0)
            c = dot_split(c, turn_1, turn_2, turn_3, PRECISION)
        else:
            there = (rows < last) & (own[None, :] < r)
            c = tl.load(place + own[None, :], mask=there, other=0.0)
        total += c * c
    tl.store(norm_ptr, tl.sum(tl.sum(total, 1), 0))


def sums(
    a: Tensor | None,
    t: Tensor | None,
    turn: Tensor | None = None,
    *,
    own: bool = False,
    cross: bool = False,
    square: bool = False,
    step: Tensor | None = None,
) -> list[Tensor]:
    """Those asked for of AᵀA, AᵀC and CᵀC, each (..., r, r), with ``C = t turn``.

    With a ``step``, numbers (batch,) or half as many for both halves, the first is that of
    ``a + step t``, and no other may be asked for.

    ``a`` and ``t`` are (..., m, r); ``turn`` is (..., r, r), fewer of them than factors if they
    come in runs that share one. Above rank 64 a program has room for one product, and no turn.
    """
    first = a if a is not None else t
    assert first is not None
    lead, (m, r) = first.shape[:-2], first.shape[-2:]
    factors, size = lead.numel(), padded(r)
    assert size <= 64 or (turn is None and own + cross + square == 1)
    assert step is None or (own and not cross and not square)
    large = _CROSS if cross else _OWN
    shape = (large if size > 64 else _SUMS).of(size)
    run, shares = schedule(factors, m, shape.rows, _SUMMING_PROGRAMS)
    matrices = first.new_empty(own + cross + square, factors, shares, r, r)
    unbound = iter(matrices)
    made = [next(unbound) if wanted else first for wanted in (own, cross, square)]
    a, t = (first if x is None else x.contiguous() for x in (a, t))
    # A transposed one is turned where it is read.
    lying = turn is not None and turn.mT.is_contiguous() and not turn.is_contiguous()
    turns = first if turn is None else turn.mT if lying else turn.contiguous()
    repeat = 1 if turn is None else factors // turn.shape[:-2].numel()
    _sums_kernel[(factors, shares)](
        a, t, turns, first if step is None else step, *made, m, r, run, shares, repeat,
        factors // len(first), 1 if step is None else len(step),
        R=size, ROWS=shape.rows, TURN=turn is not None, LYING=lying, STEP=step is not None,
        OWN=own, CROSS=cross, SQUARE=square, PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    added = matrices[:, :, 0] if shares == 1 else matrices.sum(2)
    return [x.view(*lead, r, r) for x in added]


def stepped_gram(a: Tensor, t: Tensor, scale: Tensor) -> Tensor:
    """The Gram matrix (..., r, r) of ``a + scale t`` for factors (batch, ..., m, r)."""
    return sums(a, t, own=True, step=scale)[0]


def square(t: Tensor, turn: Tensor | None = None, only: Tensor | None = None) -> Tensor:
    """``‖t turn‖²`` or ``‖t‖²`` of each factor (..., m, r), (...).

    Zero but for the members (batch,) ``only``, where these are given.
    """
    t = t.contiguous()
    lead, (m, r) = t.shape[:-2], t.shape[-2:]
    factors, size = lead.numel(), padded(t.shape[-1])
    shape = _SQUARES.of(size)
    run, shares = schedule(factors, m, shape.rows)
    columns = size // shape.columns
    norms = t.new_empty(factors, shares * columns)
    _square_kernel[(columns, factors, shares)](
        t, t if turn is None else turn.contiguous(), t if only is None else only, norms,
        m, r, run, 1 if turn is None else factors // turn.shape[:-2].numel(),
        1 if only is None else factors // only.numel(),
        R=size, ROWS=shape.rows, COLS=shape.columns, TURN=turn is not None,
        MASKED=only is not None, PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return norms.sum(1).view(lead)
