"""Triton kernels over the rows of tall float32 factors, r up to 128.

One program takes one factor and one run of its rows. Sums over rows are made in the same order
every time: each program writes what it summed, and the few parts of a factor are added afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import PRECISION, dot, half_gram, overlap
from .sizes import padded, parts

_PROGRAMS = 512  # enough to keep every multiprocessor of today's GPUs busy
# Sums are better made by fewer: what each has summed is written, and added up by another launch.
_SUMMING_PROGRAMS = 192


class Shape(NamedTuple):
    """What a program takes at a time, and how it is launched."""

    rows: int
    columns: int
    warps: int
    stages: int


# Up to rank 64, and above it. Measured on an H200. Sums take all columns.
_SUMS = Shape(64, 64, 4, 2), Shape(32, 128, 8, 3)
_COMBINE = Shape(64, 64, 4, 2), Shape(64, 64, 4, 2)


@triton.jit
def _sums_kernel(
    a_ptr, t_ptr, turn_ptr, own_ptr, cross_ptr, square_ptr,
    m, r, run, parts, repeat,
    R: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
    OWN: tl.constexpr, CROSS: tl.constexpr, SQUARE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of AᵀA, AᵀC and CᵀC with C = T turn, over ``run`` rows.

    Blocks of rows are added up outside the tensor cores, which round towards zero.
    """
    factor = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cols = tl.arange(0, R)
    square = cols[:, None] * r + cols[None, :]
    inside = (cols[:, None] < r) & (cols[None, :] < r)
    if TURN:
        turn = tl.load(turn_ptr + (factor // repeat) * r * r + square, mask=inside, other=0.0)
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
        if OWN:
            own_sum += half_gram(a, PRECISION)
        if CROSS or SQUARE:
            c = tl.load(t_ptr + place, mask=there, other=0.0)
            if TURN:
                c = dot(c, turn, PRECISION)
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
    t_ptr, turn_ptr, norm_ptr, m, r, run, repeat,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of ‖T turn‖² or ‖T‖², over ``run`` rows and some columns."""
    factor = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, R)
    own = tl.program_id(0) * COLS + tl.arange(0, COLS)
    if TURN:
        square = cols[:, None] * r + own[None, :]
        inside = (cols[:, None] < r) & (own[None, :] < r)
        turn = tl.load(turn_ptr + (factor // repeat) * r * r + square, mask=inside, other=0.0)
    total = tl.zeros((ROWS, COLS), tl.float32)
    first = tl.program_id(2) * run
    last = tl.minimum(first + run, m)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        place = t_ptr + factor * m * r + rows * r
        if TURN:
            there = (rows < last) & (cols[None, :] < r)
            c = tl.load(place + cols[None, :], mask=there, other=0.0)
            c = dot(c, turn, PRECISION)
        else:
            there = (rows < last) & (own[None, :] < r)
            c = tl.load(place + own[None, :], mask=there, other=0.0)
        total += c * c
    part = (factor * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0)
    tl.store(norm_ptr + part + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _combine_kernel(
    a_ptr, c_a_ptr, t_ptr, c_t_ptr, plus_ptr, alive_ptr, out_ptr,
    m, r, run, repeat_a, repeat_t, repeat_alive, sign, weight, plus_weight,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HAS_A: tl.constexpr, ADD_A: tl.constexpr, TURN_T: tl.constexpr,
    PLUS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sign A c_A plus T c_T or weight T, plus A if asked; A alone for members not alive.

    Some columns of it a program.
    """
    factor = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, R)
    own = tl.program_id(0) * COLS + tl.arange(0, COLS)
    square = cols[:, None] * r + own[None, :]
    inside = (cols[:, None] < r) & (own[None, :] < r)
    if HAS_A:
        c_a = tl.load(c_a_ptr + (factor // repeat_a) * r * r + square, mask=inside, other=0.0)
        c_a = (c_a * sign).to(tl.float32)
    if TURN_T:
        c_t = tl.load(c_t_ptr + (factor // repeat_t) * r * r + square, mask=inside, other=0.0)
    if MASKED:
        alive = tl.load(alive_ptr + factor // repeat_alive)
    first = tl.program_id(2) * run
    last = tl.minimum(first + run, m)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        place = factor * m * r + rows[:, None] * r + cols[None, :]
        there = (rows[:, None] < last) & (cols[None, :] < r)
        own_place = factor * m * r + rows[:, None] * r + own[None, :]
        own_there = (rows[:, None] < last) & (own[None, :] < r)
        if TURN_T:
            t = tl.load(t_ptr + place, mask=there, other=0.0)
            out = dot(t, c_t, PRECISION)
        else:
            out = (tl.load(t_ptr + own_place, mask=own_there, other=0.0) * weight).to(tl.float32)
        if HAS_A:
            a = tl.load(a_ptr + place, mask=there, other=0.0)
            out += dot(a, c_a, PRECISION)
        if PLUS:
            out += tl.load(plus_ptr + own_place, mask=own_there, other=0.0) * plus_weight
        if (ADD_A or MASKED) and COLS < R:
            a = tl.load(a_ptr + own_place, mask=own_there, other=0.0)
        if ADD_A:
            out += a
        if MASKED:
            out = tl.where(alive, out, a)
        tl.store(out_ptr + own_place, out, mask=own_there)


@triton.jit
def _step_kernel(
    a_ptr, t_ptr, scale_ptr, alive_ptr, out_ptr, size, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """A + scale T of one member, or A."""
    member = tl.program_id(0).to(tl.int64)
    where = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = where < size
    where += member * size
    a = tl.load(a_ptr + where, mask=there)
    alive = True
    if MASKED:
        alive = tl.load(alive_ptr + member)
    if alive:
        a += tl.load(scale_ptr + member) * tl.load(t_ptr + where, mask=there)
    tl.store(out_ptr + where, a, mask=there)


@triton.jit
def _restore_kernel(new_ptr, old_ptr, alive_ptr, size, BLOCK: tl.constexpr):
    """Writes the old values over the new ones of a member that is not alive."""
    member = tl.program_id(0).to(tl.int64)
    if tl.load(alive_ptr + member) == 0:
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            where = start + tl.arange(0, BLOCK)
            there = where < size
            where += member * size
            tl.store(new_ptr + where, tl.load(old_ptr + where, mask=there), mask=there)


def restore(new: Tensor, old: Tensor, alive: Tensor) -> Tensor:
    """``new`` (batch, ...), with ``old`` written over members (batch,) that are not ``alive``.

    Both contiguous. Where all are alive, no row is touched.
    """
    size = new[0].numel()
    # Few programs a member, since nearly always they have nothing to do.
    grid = (len(new), min(8, parts(size, 4096)))
    _restore_kernel[grid](new, old, alive, size, BLOCK=4096)
    return new


def step(a: Tensor, t: Tensor, scale: Tensor, alive: Tensor | None = None) -> Tensor:
    """``a + scale t`` for tensors (batch, ...), ``a`` itself for members (batch,) not ``alive``."""
    a, t = a.contiguous(), t.contiguous()
    out = torch.empty_like(a)
    size = a[0].numel()
    grid = (len(a), parts(size, 4096))
    mask = scale if alive is None else alive
    _step_kernel[grid](a, t, scale, mask, out, size, BLOCK=4096, MASKED=alive is not None)
    return out


def _schedule(factors: int, m: int, rows: int, programs: int = _PROGRAMS) -> tuple[int, int]:
    """Rows a program takes, and how many programs share a factor."""
    share = min(parts(m, rows), max(1, parts(programs, factors)))
    run = parts(parts(m, share), rows) * rows
    return run, parts(m, run)


def _shape(shapes: tuple[Shape, Shape], size: int) -> Shape:
    """That for matrices of this padded rank, and no more columns than these have."""
    small, large = shapes
    shape = large if size > 64 else small
    return shape._replace(columns=min(size, shape.columns))


def sums(
    a: Tensor | None,
    t: Tensor | None,
    turn: Tensor | None = None,
    *,
    own: bool = False,
    cross: bool = False,
    square: bool = False,
) -> list[Tensor]:
    """Those asked for of AᵀA, AᵀC and CᵀC, each (..., r, r), with ``C = t turn``.

    ``a`` and ``t`` are (..., m, r); ``turn`` is (..., r, r), fewer of them than factors if they
    come in runs that share one. Above rank 64 a program has room for one product, and no turn.
    """
    first = a if a is not None else t
    assert first is not None
    lead, (m, r) = first.shape[:-2], first.shape[-2:]
    factors, size = lead.numel(), padded(r)
    assert size <= 64 or (turn is None and own + cross + square == 1)
    shape = _shape(_SUMS, size)
    run, shares = _schedule(factors, m, shape.rows, _SUMMING_PROGRAMS)
    matrices = first.new_empty(own + cross + square, factors, shares, r, r)
    unbound = iter(matrices)
    made = [next(unbound) if wanted else first for wanted in (own, cross, square)]
    a, t = (first if x is None else x.contiguous() for x in (a, t))
    turns = first if turn is None else turn.contiguous()
    repeat = 1 if turn is None else factors // turn.shape[:-2].numel()
    _sums_kernel[(factors, shares)](
        a, t, turns, *made, m, r, run, shares, repeat,
        R=size, ROWS=shape.rows, TURN=turn is not None,
        OWN=own, CROSS=cross, SQUARE=square, PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    added = matrices[:, :, 0] if shares == 1 else matrices.sum(2)
    return [x.view(*lead, r, r) for x in added]


def square(t: Tensor, turn: Tensor | None = None) -> Tensor:
    """``‖t turn‖²`` or ``‖t‖²`` of each factor (..., m, r), (...)."""
    t = t.contiguous()
    lead, (m, r) = t.shape[:-2], t.shape[-2:]
    factors, size = lead.numel(), padded(t.shape[-1])
    shape = _shape(_COMBINE, size)
    run, shares = _schedule(factors, m, shape.rows)
    columns = size // shape.columns
    norms = t.new_empty(factors, shares * columns)
    _square_kernel[(columns, factors, shares)](
        t, t if turn is None else turn.contiguous(), norms, m, r, run,
        1 if turn is None else factors // turn.shape[:-2].numel(),
        R=size, ROWS=shape.rows, COLS=shape.columns, TURN=turn is not None, PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return norms.sum(1).view(lead)


def combine(
    a: Tensor | None,
    c_a: Tensor | None,
    t: Tensor,
    c_t: Tensor | float,
    *,
    sign: float = 1.0,
    plus: tuple[Tensor, float] | None = None,
    add_a: bool = False,
    alive: Tensor | None = None,
    given: bool = False,
) -> Tensor:
    """``sign a c_a + t c_t``, plus a further weighted term, plus ``a`` if asked.

    A ``t`` that is ``given`` away is written into, where ``c_t`` is a number: every element of it
    is then read by the program that writes it, and before.

    ``a`` itself for members not ``alive``. ``a`` and ``t`` are (..., m, r), coefficients
    (..., r, r) and ``alive`` (batch,) fewer than factors if they come in runs that share one.
    """
    size = padded(t.shape[-1])
    shape = _shape(_COMBINE, size)
    if size > 64 and a is not None and isinstance(c_t, Tensor):
        # Inferred from profiles of whole steps on an H200: a launch with two products this large
        # takes about four times as long as one with a single product. ``a`` itself, the largest
        # term, is still added last.
        turned = combine(None, None, t, c_t, plus=plus)
        return combine(a, c_a, turned, 1.0, sign=sign, add_a=add_a, alive=alive)
    t = t.contiguous()
    lead, (m, r) = t.shape[:-2], t.shape[-2:]
    factors = lead.numel()
    run, shares = _schedule(factors, m, shape.rows)
    out = t if given and not isinstance(c_t, Tensor) else torch.empty_like(t)
    left, right = (c.contiguous() if isinstance(c, Tensor) else t for c in (c_a, c_t))
    shared = (c.shape[:-2].numel() if isinstance(c, Tensor) else factors for c in (c_a, c_t))
    repeat_a, repeat_t = (factors // count for count in shared)
    _combine_kernel[(size // shape.columns, factors, shares)](
        t if a is None else a.contiguous(), left, t, right,
        t if plus is None else plus[0].contiguous(), t if alive is None else alive, out,
        m, r, run, repeat_a, repeat_t, 1 if alive is None else factors // alive.numel(),
        sign, 1.0 if isinstance(c_t, Tensor) else c_t, 1.0 if plus is None else plus[1],
        R=size, ROWS=shape.rows, COLS=shape.columns, HAS_A=a is not None, ADD_A=add_a,
        TURN_T=isinstance(c_t, Tensor), PLUS=plus is not None, MASKED=alive is not None,
        PRECISION=PRECISION, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
