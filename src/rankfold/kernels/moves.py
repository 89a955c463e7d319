"""Triton kernels that make new rows of tall float32 factors, r up to 128.

One program takes some columns of one factor and one run of its rows. Coefficients are split for
the tensor cores before the first row, and rows of rank above 64 are taken in halves: all of it at
once would be more than a program has registers for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .products import PRECISION, add_dot, add_rough, split
from .sizes import Shape, padded, parts, schedule

# Measured on an H200: with one product, and with two, up to rank 64 and above it.
_ONE = Shape(64, 64, 4, 2)
_TWO, _TWO_LARGE = Shape(64, 64, 4, 2), Shape(64, 64, 4, 1)
_SETTLE = Shape(64, 64, 4, 1)
_MOST_COLUMNS = tl.constexpr(64)  # of rows that are multiplied at a time
# Products good to 2⁻¹⁶ are good to float32 in a sum in which they are this small.
_LITTLE = tl.constexpr(2.0**-8)


@triton.jit
def _coefficients(source, first, own, r, sign, K: tl.constexpr, PRECISION: tl.constexpr):
    """Rows from ``first`` on of the columns ``own`` of r×r coefficients times a sign, split."""
    rows = first + tl.arange(0, K)[:, None]
    inside = (rows < r) & (own[None, :] < r)
    found = tl.load(source + rows * r + own[None, :], mask=inside, other=0.0)
    return split(found * sign, PRECISION)


@triton.jit
def _columns(source, rows, last, first, r, K: tl.constexpr):
    """Columns from ``first`` on of some rows of a factor."""
    cols = first + tl.arange(0, K)[None, :]
    there = (rows[:, None] < last) & (cols < r)
    return tl.load(source + rows[:, None] * r + cols, mask=there, other=0.0)


@triton.jit
def _combine_kernel(
    a_ptr, c_a_ptr, t_ptr, c_t_ptr, plus_ptr, alive_ptr, inner_ptr, out_ptr,
    m, r, run, repeat_a, repeat_t, repeat_alive, members, sign, weight, plus_weight,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HAS_A: tl.constexpr, ADD_A: tl.constexpr, TURN_T: tl.constexpr,
    PLUS: tl.constexpr, MASKED: tl.constexpr, INNER: tl.constexpr, SQUARE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sign A c_A plus T c_T or weight T, plus A if asked; A alone for members not alive.

    Some columns of it a program, and if asked a part of its inner product with T or itself.
    """
    K: tl.constexpr = min(R, _MOST_COLUMNS)
    sign, weight, plus_weight = single(sign), single(weight), single(plus_weight)
    factor = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * COLS + tl.arange(0, COLS)
    if HAS_A:
        c_a_ptr += (factor // repeat_a) * r * r
        a1, a2, a3 = _coefficients(c_a_ptr, 0, own, r, sign, K, PRECISION)
        if R > K:
            b1, b2, b3 = _coefficients(c_a_ptr, K, own, r, sign, K, PRECISION)
    if TURN_T:
        c_t_ptr += (factor // repeat_t) * r * r
        t1, t2, t3 = _coefficients(c_t_ptr, 0, own, r, 1.0, K, PRECISION)
        if R > K:
            s1, s2, s3 = _coefficients(c_t_ptr, K, own, r, 1.0, K, PRECISION)
    if MASKED:
        alive = tl.load(alive_ptr + factor // repeat_alive % members)
    if INNER or SQUARE:
        inner = tl.zeros((ROWS,), tl.float32)
    a_ptr += factor * m * r
    t_ptr += factor * m * r
    plus_ptr += factor * m * r
    out_ptr += factor * m * r
    first = tl.program_id(2) * run
    last = tl.minimum(first + run, m)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        place = rows[:, None] * r + own[None, :]
        there = (rows[:, None] < last) & (own[None, :] < r)
        large = tl.zeros((ROWS, COLS), tl.float32)
        small = tl.zeros((ROWS, COLS), tl.float32)
        if TURN_T:
            t = _columns(t_ptr, rows, last, 0, r, K)
            large, small = add_dot(t, t1, t2, t3, large, small, PRECISION)
            if R > K:
                t = _columns(t_ptr, rows, last, K, r, K)
                large, small = add_dot(t, s1, s2, s3, large, small, PRECISION)
        if HAS_A:
            a = _columns(a_ptr, rows, last, 0, r, K)
            large, small = add_dot(a, a1, a2, a3, large, small, PRECISION)
            if R > K:
                a = _columns(a_ptr, rows, last, K, r, K)
                large, small = add_dot(a, b1, b2, b3, large, small, PRECISION)
        out = small + large
        if not TURN_T:
            out += tl.load(t_ptr + place, mask=there, other=0.0) * weight
        if PLUS:
            out += tl.load(plus_ptr + place, mask=there, other=0.0) * plus_weight
        if ADD_A or MASKED:
            a = tl.load(a_ptr + place, mask=there, other=0.0)
        if ADD_A:
            out += a
        if MASKED:
            out = tl.where(alive, out, a)
        if INNER:
            inner += tl.sum(out * tl.load(t_ptr + place, mask=there, other=0.0), 1)
        if SQUARE:
            inner += tl.sum(out * out, 1)
        tl.store(out_ptr + place, out, mask=there)
    if INNER or SQUARE:
        part = (factor * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0)
        tl.store(inner_ptr + part + tl.program_id(0), tl.sum(inner, 0))


@triton.jit
def _settle_kernel(
    a_ptr, t_ptr, change_ptr, scale_ptr, alive_ptr, out_ptr, m, r, run, repeat, members,
    R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X + X change with X = A + scale T, or A; some columns of it a program."""
    K: tl.constexpr = min(R, _MOST_COLUMNS)
    factor = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * COLS + tl.arange(0, COLS)
    change_ptr += factor * r * r
    c1, c2, c3 = _coefficients(change_ptr, 0, own, r, 1.0, K, PRECISION)
    if R > K:
        d1, d2, d3 = _coefficients(change_ptr, K, own, r, 1.0, K, PRECISION)
    cols = tl.arange(0, R)[:, None]
    inside = (cols < r) & (own[None, :] < r)
    whole = tl.load(change_ptr + cols * r + own[None, :], mask=inside, other=0.0)
    little = tl.sum(tl.sum(whole * whole, 1), 0) < _LITTLE * _LITTLE
    member = factor // repeat % members
    scale = tl.load(scale_ptr + member)
    alive = tl.load(alive_ptr + member)
    a_ptr += factor * m * r
    t_ptr += factor * m * r
    out_ptr += factor * m * r
    first = tl.program_id(2) * run
    last = tl.minimum(first + run, m)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        large = tl.zeros((ROWS, COLS), tl.float32)
        small = tl.zeros((ROWS, COLS), tl.float32)
        x = _columns(a_ptr, rows, last, 0, r, K) + scale * _columns(t_ptr, rows, last, 0, r, K)
        if little:
            small = add_rough(x, c1, c2, small, PRECISION)
        else:
            large, small = add_dot(x, c1, c2, c3, large, small, PRECISION)
        if R > K:
            x = _columns(a_ptr, rows, last, K, r, K) + scale * _columns(t_ptr, rows, last, K, r, K)
            if little:
                small = add_rough(x, d1, d2, small, PRECISION)
            else:
                large, small = add_dot(x, d1, d2, d3, large, small, PRECISION)
        place = rows[:, None] * r + own[None, :]
        there = (rows[:, None] < last) & (own[None, :] < r)
        a = tl.load(a_ptr + place, mask=there, other=0.0)
        x = a + scale * tl.load(t_ptr + place, mask=there, other=0.0)
        tl.store(out_ptr + place, tl.where(alive, x + (small + large), a), mask=there)


@triton.jit
def _step_kernel(
    a_ptr, t_ptr, scale_ptr, alive_ptr, out_ptr, ahead_ptr, weight, size, members,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """weight A + scale T of one member, or weight A; and if asked the same of what that makes."""
    member = tl.program_id(0).to(tl.int64)
    weight = single(weight)
    where = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = where < size
    where += member * size
    a = weight * tl.load(a_ptr + where, mask=there)
    alive = True
    if MASKED:
        alive = tl.load(alive_ptr + member % members)
    if alive:
        step = tl.load(scale_ptr + member % members) * tl.load(t_ptr + where, mask=there)
        a += step
        if AHEAD:
            tl.store(ahead_ptr + where, weight * a + step, mask=there)
    tl.store(out_ptr + where, a, mask=there)


@triton.jit
def _restore_kernel(new_ptr, old_ptr, alive_ptr, size, members, BLOCK: tl.constexpr):
    """Writes the old values over the new ones of a member that is not alive."""
    member = tl.program_id(0).to(tl.int64)
    if tl.load(alive_ptr + member % members) == 0:
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            where = start + tl.arange(0, BLOCK)
            there = where < size
            where += member * size
            tl.store(new_ptr + where, tl.load(old_ptr + where, mask=there), mask=there)


def restore(new: Tensor, old: Tensor, alive: Tensor) -> Tensor:
    """``new`` (batch, ...), with ``old`` written over members (batch,) that are not ``alive``.

    Both contiguous. Where all are alive, no row is touched. The mask may be shared as in `step`.
    """
    size = new[0].numel()
    # Few programs a member, since nearly always they have nothing to do.
    grid = (len(new), min(8, parts(size, 4096)))
    _restore_kernel[grid](new, old, alive, size, len(alive), BLOCK=4096)
    return new


def step(
    a: Tensor, t: Tensor, scale: Tensor, alive: Tensor | None = None, weight: float = 1.0
) -> Tensor:
    """``weight a + scale t`` for tensors (batch, ...), ``weight a`` for members not ``alive``.

    Numbers are (batch,), or (batch / 2,) and the same for both halves.
    """
    return _step(a, t, scale, alive, weight, ahead=False)[0]


def steps(a: Tensor, t: Tensor, scale: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """That step, and the same step made of what it makes, of tensors (batch, ...)."""
    return _step(a, t, scale, None, weight, ahead=True)


def _step(
    a: Tensor, t: Tensor, scale: Tensor, alive: Tensor | None, weight: float, *, ahead: bool
) -> tuple[Tensor, Tensor]:
    a, t, scale = a.contiguous(), t.contiguous(), scale.contiguous()
    out = torch.empty_like(a)
    further = torch.empty_like(a) if ahead else out
    size = a[0].numel()
    grid = (len(a), parts(size, 4096))
    mask = scale if alive is None else alive
    _step_kernel[grid](
        a, t, scale, mask, out, further, weight, size, len(scale),
        BLOCK=4096, MASKED=alive is not None, AHEAD=ahead,
    )  # fmt: skip
    return out, further


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
    (..., r, r), fewer than factors if they come in runs that share one; ``alive`` is (batch,), or
    shared as in `step`.
    """
    return _combine(a, c_a, t, c_t, sign, plus, add_a, alive, given)[0]


def lift(g: Tensor, c_g: Tensor, a: Tensor, c_a: Tensor) -> tuple[Tensor, Tensor]:
    """``g c_g − a c_a`` (..., m, r), and its inner product (...) with ``g``."""
    return _combine(a, c_a, g, c_g, -1.0, inner="with t")


def subtract(
    t: Tensor, weight: float, a: Tensor, c_a: Tensor, plus: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    """``weight t − a c_a`` (..., m, r), plus a further term, and the square of its norm (...)."""
    return _combine(a, c_a, t, weight, -1.0, plus, inner="with itself")


def _combine(
    a: Tensor | None,
    c_a: Tensor | None,
    t: Tensor,
    c_t: Tensor | float,
    sign: float,
    plus: tuple[Tensor, float] | None = None,
    add_a: bool = False,
    alive: Tensor | None = None,
    given: bool = False,
    inner: str = "",
) -> tuple[Tensor, Tensor]:
    t = t.contiguous()
    lead, (m, r) = t.shape[:-2], t.shape[-2:]
    factors, size = lead.numel(), padded(r)
    two = a is not None and isinstance(c_t, Tensor)
    products = _TWO_LARGE if size > 64 else _TWO
    shape = (products if two else _ONE).of(size)
    run, shares = schedule(factors, m, shape.rows)
    columns = size // shape.columns
    sums = t.new_empty(factors, shares * columns) if inner else t
    out = t if given and not isinstance(c_t, Tensor) else torch.empty_like(t)
    left, right = (c.contiguous() if isinstance(c, Tensor) else t for c in (c_a, c_t))
    shared = (c.shape[:-2].numel() if isinstance(c, Tensor) else factors for c in (c_a, c_t))
    repeat_a, repeat_t = (factors // count for count in shared)
    _combine_kernel[(columns, factors, shares)](
        t if a is None else a.contiguous(), left, t, right,
        t if plus is None else plus[0].contiguous(), t if alive is None else alive, sums, out,
        m, r, run, repeat_a, repeat_t, factors // len(t), len(t) if alive is None else len(alive),
        sign, 1.0 if isinstance(c_t, Tensor) else c_t, 1.0 if plus is None else plus[1],
        R=size, ROWS=shape.rows, COLS=shape.columns, HAS_A=a is not None, ADD_A=add_a,
        TURN_T=isinstance(c_t, Tensor), PLUS=plus is not None, MASKED=alive is not None,
        INNER=inner == "with t", SQUARE=inner == "with itself", PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out, sums.sum(1).view(lead) if inner else sums


def settle(a: Tensor, t: Tensor, change: Tensor, scale: Tensor, alive: Tensor) -> Tensor:
    """``x + x change`` of ``x = a + scale t``, and ``a`` itself for members not ``alive``.

    ``a`` and ``t`` are (batch, blocks, m, r), ``change`` (batch, blocks, r, r), all else (batch,),
    or shared as in `step`.
    """
    a, t, change = a.contiguous(), t.contiguous(), change.contiguous()
    out, (batch, blocks, m, r) = torch.empty_like(a), a.shape
    size = padded(r)
    shape = _SETTLE.of(size)
    run, shares = schedule(batch * blocks, m, shape.rows)
    _settle_kernel[(size // shape.columns, batch * blocks, shares)](
        a, t, change, scale, alive, out, m, r, run, blocks, len(scale),
        R=size, ROWS=shape.rows, COLS=shape.columns, PRECISION=PRECISION,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
