"""Triton kernels that eliminate in stacks of r×r float32 matrices, r up to 128.

A library call on a stack this small is all launches and waiting. Here each function is one launch
of a program a member, which keeps its matrix in registers from load to store. Sizes are padded with
the identity to a power of two R.

What takes long in an elimination is fetching single rows out of a tile that is spread over the
threads. So some rows at a time are taken out, held whole by every warp or by few threads, reduced
among themselves, and applied to the rest at once. Tiles hold the rows of the matrix in an order
that makes this taking out cheap; it has no influence on the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .members import Found, flattened, is_near, known, padded_rank, room_for

_EPS = tl.constexpr(2.0**-23)
# The constants of linalg: which pivots can be rounding, and what is added to the diagonal then.
_PIVOT_NOISE = tl.constexpr(8)
_FIRST_LIFT = tl.constexpr(8.0)
_SECOND_LIFT = tl.constexpr(8e3)


@triton.jit
def _load(source, rows, cols, row_stride, col_stride, r):
    """A member padded with the identity."""
    return tl.load(
        source + rows * row_stride + cols * col_stride,
        mask=(rows < r) & (cols < r),
        other=(rows == cols).to(tl.float32),
    )


@triton.jit
def _panel_order(R: tl.constexpr, LOW: tl.constexpr):
    """Numbers (R, 1) of the rows of a tile whose panels of 16 rows `_panel` takes out."""
    place = tl.arange(0, R)[:, None]
    return place // LOW % (R // 16) * 16 + place // (R * LOW // 16) * LOW + place % LOW


@triton.jit
def _panel(tile, g, R: tl.constexpr, LOW: tl.constexpr):
    """Rows 16 g to 16 g + 15 of a tile (R, R), as (16, R)."""
    split = tl.reshape(tile, (16 // LOW, R // 16, LOW, R))
    here = tl.arange(0, R // 16)[None, :, None, None] == g
    return tl.reshape(tl.sum(tl.where(here, split, 0.0), 1), (16, R))


@triton.jit
def _spread(panel, R: tl.constexpr, LOW: tl.constexpr):
    """A panel (16, R) in the place of every panel of a tile (R, R)."""
    panel = tl.reshape(panel, (16 // LOW, 1, LOW, R))
    return tl.reshape(tl.broadcast_to(panel, (16 // LOW, R // 16, LOW, R)), (R, R))


@triton.jit
def _factor(tile, rows, cols, r, R: tl.constexpr, LOW: tl.constexpr):
    """Elimination of a symmetric tile: L⁻¹ on and below the diagonal, Lᵀ above it.

    Left of the diagonal, where elimination leaves zeros, the same row operations on the identity
    take the room. Only the upper triangle of the matrix has an influence.
    """
    place = tl.arange(0, 16)[:, None]
    for g in range(tl.cdiv(r, 16)):
        start = 16 * g
        stop = start + 16
        panel = _panel(tile, g, R, LOW)
        # Unrolled, so that the compiler knows which registers hold row and column i.
        for i in tl.static_range(16):
            here = cols == start + i
            # -0.0 and not 0.0, because adding it changes nothing and the compiler knows.
            row = tl.sum(tl.where(place == i, panel, -0.0), 0, keep_dims=True)
            col = tl.sum(tl.where(here, panel, -0.0), 1, keep_dims=True)
            pivot = tl.sum(tl.where(here, row, -0.0), 1, keep_dims=True)
            scale = tl.rsqrt(pivot)
            # rsqrt is an approximation; one Newton step rounds it.
            scale += 0.5 * scale * (1.0 - (pivot * scale) * scale)
            row = tl.where(here, scale, row * scale)
            panel = tl.where(here & (place > i), 0.0, panel)
            panel = tl.fma(tl.where(place > i, -col * scale, 0.0), row, panel)
            panel = tl.where(place == i, row, panel)
        # By symmetry the panel holds the multipliers of the rows below it as well.
        below = tl.trans(tl.where(cols >= stop, panel, 0.0))
        below = tl.reshape(below, (R // 16, 16 // LOW, LOW, 16))
        below = tl.reshape(tl.permute(below, (1, 0, 2, 3)), (R, 16))
        update = tl.where((cols > start + place) & (cols < stop), 0.0, panel)
        update = tl.dot(below, update, input_precision="ieee")
        tile = tl.where((rows >= start) & (cols >= start) & (cols < stop), 0.0, tile) - update
        tile = tl.where((rows >= start) & (rows < stop), _spread(panel, R, LOW), tile)
    return tile


@triton.jit
def _cholesky_kernel(
    gram, lower, inverse, lifted, error, limit, stride, row_stride, col_stride, r,
    R: tl.constexpr, LOW: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    rows = _panel_order(R, LOW)
    cols = tl.arange(0, R)[None, :]
    inside = (rows < r) & (cols < r)
    gram += member * stride
    lower += member * r * r
    inverse += member * r * r
    size = tl.load(gram + cols * (row_stride + col_stride), mask=cols < r, other=0.0)
    # A column of zeros has no size of its own to be lifted by.
    room = tl.maximum(size, _EPS * tl.max(size))
    failed = True
    if FOUND:
        failed = is_near(error, member, r, limit, R) == 0
    for attempt in range(3):
        # Each try stores its result, and a failed one is written over by the next.
        if failed:
            lift = tl.where(attempt == 1, _FIRST_LIFT, _SECOND_LIFT) * r * _EPS
            tile = _load(gram, rows, cols, row_stride, col_stride, r)
            tile += tl.where((rows == cols) & (attempt > 0), lift * room, 0.0)
            tile = _factor(tile, rows, cols, r, R, LOW)
            root = 1.0 / tl.sum(tl.where(rows == cols, tile, 0.0), 0, keep_dims=True)
            # A pivot that was not positive has made its whole row NaN.
            weak = (root > 0.0) == 0
            weak |= (attempt == 0) & (root * root <= (_PIVOT_NOISE + r) * _EPS * size)
            failed = tl.max((weak & (cols < r)).to(tl.int32)) > 0
            tl.store(lifted + member, ((attempt > 0) | failed).to(tl.int1))
            tl.store(inverse + rows * r + cols, tl.where(rows >= cols, tile, 0.0), mask=inside)
            tile = tl.where(rows == cols, root, tl.where(rows < cols, tile, 0.0))
            tl.store(lower + cols * r + rows, tile, mask=inside)


@triton.jit
def _four_order(R: tl.constexpr):
    """The number of each row of a tile (8, R / 32, 4, R), as (8, R / 32, 4, 1)."""
    middle = tl.arange(0, 8)[:, None, None, None]
    high = tl.arange(0, R // 32)[None, :, None, None]
    low = tl.arange(0, 4)[None, None, :, None]
    return 32 * high + 4 * middle + low


@triton.jit
def _row_of_four(four, k):
    here = tl.arange(0, 4)[None, None, :, None] == k
    return tl.sum(tl.where(here, four, -0.0), 2, keep_dims=True)


@triton.jit
def _four_rows(tile, rows, g):
    """Rows 4 g to 4 g + 3 of a tile, each (1, 1, 1, R)."""
    four = tl.sum(tl.where(rows // 4 == g, tile, -0.0), 1, keep_dims=True)
    four = tl.sum(four, 0, keep_dims=True)
    a, b = _row_of_four(four, 0), _row_of_four(four, 1)
    return a, b, _row_of_four(four, 2), _row_of_four(four, 3)


@triton.jit
def _set_four_rows(tile, rows, start, a, b, c, d):
    tile = tl.where(rows == start, a, tile)
    tile = tl.where(rows == start + 1, b, tile)
    tile = tl.where(rows == start + 2, c, tile)
    return tl.where(rows == start + 3, d, tile)


@triton.jit
def _column(tile, here):
    """The entries of a tile or of a row in the one column where ``here`` is true."""
    return tl.sum(tl.where(here, tile, -0.0), 3, keep_dims=True)


@triton.jit
def _exchange(row, others_0, others_1, others_2, to_col, cols, k, r):
    """Gauss–Jordan step of row k within four rows: the pivot in its largest unused column."""
    # Padding takes its own columns, whatever the numbers, so that each column is used once.
    free = (to_col < 0) & ((cols < r) == (k < r))
    # Column number in the low bits of the magnitude: one integer maximum finds the pivot,
    # at most 2⁻¹⁶ smaller than the largest.
    magnitude = row.to(tl.int32, bitcast=True) & 0x7FFFFF80
    pivot = tl.max(tl.where(free, magnitude | cols, -1), 3, keep_dims=True) & 127
    here = cols == pivot
    scale = 1.0 / _column(row, here)
    row = tl.where(here, scale, -row * scale)
    others_0 = tl.fma(_column(others_0, here), row, tl.where(here, 0.0, others_0))
    others_1 = tl.fma(_column(others_1, here), row, tl.where(here, 0.0, others_1))
    others_2 = tl.fma(_column(others_2, here), row, tl.where(here, 0.0, others_2))
    return row, others_0, others_1, others_2, tl.where(here, k, to_col), pivot


@triton.jit
def _eliminate(tile, rows, cols, r, R: tl.constexpr):
    """Gauss–Jordan in place with the pivot of row k in the unused column of largest entry.

    Columns are chosen rather than rows because every warp holds the row in question whole.
    Returns the tile and, for its entry (i, j), the row and the column of the inverse that it
    belongs to, in the shapes of ``rows`` and ``cols``.
    """
    to_row = rows
    to_col = tl.full((1, 1, 1, R), -1, tl.int32)
    for g in range(tl.cdiv(r, 4)):
        start = 4 * g
        a, b, c, d = _four_rows(tile, rows, g)
        a, b, c, d, to_col, p = _exchange(a, b, c, d, to_col, cols, start, r)
        b, a, c, d, to_col, q = _exchange(b, a, c, d, to_col, cols, start + 1, r)
        c, a, b, d, to_col, u = _exchange(c, a, b, d, to_col, cols, start + 2, r)
        d, a, b, c, to_col, v = _exchange(d, a, b, c, to_col, cols, start + 3, r)
        at_p, at_q = _column(tile, cols == p), _column(tile, cols == q)
        at_u, at_v = _column(tile, cols == u), _column(tile, cols == v)
        tile = tl.where(to_col >= start, 0.0, tile)
        tile = tl.fma(at_p, a, tile)
        tile = tl.fma(at_q, b, tile)
        tile = tl.fma(at_u, c, tile)
        tile = tl.fma(at_v, d, tile)
        tile = _set_four_rows(tile, rows, start, a, b, c, d)
        to_row = _set_four_rows(to_row, rows, start, p, q, u, v)
    return tile, to_row, to_col


@triton.jit
def _inverse_kernel(
    x, out, error, limit, stride, row_stride, col_stride, r, R: tl.constexpr, FOUND: tl.constexpr
):
    member = tl.program_id(0).to(tl.int64)
    far = True
    if FOUND:
        far = is_near(error, member, r, limit, R) == 0
    if far:
        rows = _four_order(R)
        cols = tl.arange(0, R)[None, None, None, :]
        tile = _load(x + member * stride, rows, cols, row_stride, col_stride, r)
        tile, to_row, to_col = _eliminate(tile, rows, cols, r, R)
        place = out + member * r * r + to_row * r + to_col
        tl.store(place, tile, mask=(rows < r) & (cols < r))


# Measured on an H200, at r = 64 and 128.
_CHOLESKY_WARPS = {32: 2, 64: 2, 128: 4}
_INVERSE_WARPS = {32: 2, 64: 4, 128: 8}


def cholesky_inverse(gram: Tensor, found: Found | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Lower Cholesky factors and their inverses, (..., r, r) both, and who was lifted (...).

    As `linalg.cholesky` without damping, tries and lifts included. A member that cannot be
    factored even so comes out NaN. Roots and inverses that are ``found`` stay, and what is said
    of their lift means nothing.
    """
    made = (room_for(gram), room_for(gram)) if found is None else found.results
    lower, inverse_lower = (x.contiguous() for x in made)
    flat, lifted = (
        flattened(gram),
        torch.empty(gram.shape[:-2], dtype=torch.bool, device=gram.device),
    )
    size = padded_rank(gram.shape[-1])
    if len(flat):
        # A panel is then what one of R / 16 warps would hold of a product's result.
        low = min(16, 512 // size)
        _cholesky_kernel[(len(flat),)](
            flat, lower, inverse_lower, lifted, *known(found, flat), *flat.stride(),
            gram.shape[-1], R=size, LOW=low, FOUND=found is not None,
            num_warps=_CHOLESKY_WARPS[size],
        )  # fmt: skip
    return lower, inverse_lower, lifted


def inverse(x: Tensor, found: Found | None = None) -> Tensor:
    """Inverse of (..., r, r); a singular member comes out non-finite, no other is touched.

    Inverses that are ``found`` stay.
    """
    if found is None and x.stride(-1) != 1 and x.stride(-2) == 1:
        # Reading along the rows is faster, and the transpose of the inverse as good.
        return inverse(x.mT).mT
    flat, out = flattened(x), room_for(x) if found is None else found.results[0].contiguous()
    size = padded_rank(x.shape[-1])
    if len(flat):
        _inverse_kernel[(len(flat),)](
            flat, out, *known(found, flat), *flat.stride(), x.shape[-1],
            R=size, FOUND=found is not None, num_warps=_INVERSE_WARPS[size],
        )  # fmt: skip
    return out
