"""Triton kernels that copy blocks between scattered tensors and one contiguous float32 stack.

One program moves one tile of one block. Where a block lies is read from a table on the device, so
one launch serves any number of tensors. A tile is read and written along whichever of its two
dimensions is contiguous in memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import padded, parts

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_TILE = 4096  # elements a program moves


class Table(NamedTuple):
    """Where blocks of ``height × rank`` lie, all of one dtype.

    ``entries`` (blocks, 3) int64, on their device: the address of the first element, and the
    elements from one row, and from one column, to the next. ``aligned`` promises that addresses,
    and strides other than 1, are multiples of 16 bytes.
    """

    entries: Tensor
    dtype: torch.dtype
    height: int
    rank: int
    aligned: bool

    def cut(self, start: int, stop: int) -> Table:
        """Only the blocks from ``start`` up to ``stop``."""
        return self._replace(entries=self.entries[start:stop])


@triton.jit
def _load(
    entries_ptr, block, start, m, r,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows from ``start`` on of one block, as float32."""
    lanes: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    base = tl.load(entries_ptr + 3 * block).to(tl.pointer_type(DTYPE))
    down = tl.load(entries_ptr + 3 * block + 1)
    across = tl.load(entries_ptr + 3 * block + 2)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, R)
    upright = (rows[:, None] < m) & (cols[None, :] < r)
    turned = (cols[:, None] < r) & (rows[None, :] < m)
    # A stride of 1 is left out rather than multiplied by, for the compiler to see it.
    if across == 1:
        if ALIGNED:
            down = tl.multiple_of(down, lanes)
        tile = tl.load(base + rows[:, None] * down + cols[None, :], mask=upright, other=0.0)
    elif down == 1:
        if ALIGNED:
            across = tl.multiple_of(across, lanes)
        lying = tl.load(base + cols[:, None] * across + rows[None, :], mask=turned, other=0.0)
        tile = tl.trans(lying)
    else:
        place = rows[:, None] * down + cols[None, :] * across
        tile = tl.load(base + place, mask=upright, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _store(
    entries_ptr, tile, block, start, m, r,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The inverse of `_load`, rounding to ``DTYPE``."""
    lanes: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    base = tl.load(entries_ptr + 3 * block).to(tl.pointer_type(DTYPE))
    down = tl.load(entries_ptr + 3 * block + 1)
    across = tl.load(entries_ptr + 3 * block + 2)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, R)
    upright = (rows[:, None] < m) & (cols[None, :] < r)
    turned = (cols[:, None] < r) & (rows[None, :] < m)
    rounded = tile.to(DTYPE)
    if across == 1:
        if ALIGNED:
            down = tl.multiple_of(down, lanes)
        tl.store(base + rows[:, None] * down + cols[None, :], rounded, mask=upright)
    elif down == 1:
        if ALIGNED:
            across = tl.multiple_of(across, lanes)
        place = cols[:, None] * across + rows[None, :]
        tl.store(base + place, tl.trans(rounded), mask=turned)
    else:
        tl.store(base + rows[:, None] * down + cols[None, :] * across, rounded, mask=upright)


@triton.jit
def _gather_kernel(
    entries_ptr, masters_ptr, out_ptr, m, r, parts,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MASTERED: tl.constexpr,
):  # fmt: skip
    """Blocks into a contiguous stack; a master wins over what it still rounds to."""
    block = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * ROWS
    tile = _load(entries_ptr, block, start, m, r, ROWS, R, DTYPE, ALIGNED)
    if MASTERED:
        master = _load(masters_ptr, block, start, m, r, ROWS, R, tl.float32, ALIGNED)
        tile = tl.where(master.to(DTYPE).to(tl.float32) == tile, master, tile)
    rows = start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, R)[None, :]
    tl.store(out_ptr + (block * m + rows) * r + cols, tile, mask=(rows < m) & (cols < r))


@triton.jit
def _scatter_kernel(
    entries_ptr, masters_ptr, values_ptr, m, r, parts,
    along_ptr, scale_ptr, alive_ptr, repeat,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MASTERED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A contiguous stack into blocks, and unrounded into their masters; after a step if asked."""
    block = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * ROWS
    rows = start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, R)[None, :]
    place = (block * m + rows) * r + cols
    there = (rows < m) & (cols < r)
    tile = tl.load(values_ptr + place, mask=there, other=0.0)
    if STEP:  # noqa: SIM102  (the one is known when a kernel is compiled, the other is not)
        if tl.load(alive_ptr + block // repeat):
            scale = tl.load(scale_ptr + block // repeat)
            tile += scale * tl.load(along_ptr + place, mask=there, other=0.0)
    _store(entries_ptr, tile, block, start, m, r, ROWS, R, DTYPE, ALIGNED)
    if MASTERED:
        _store(masters_ptr, tile, block, start, m, r, ROWS, R, tl.float32, ALIGNED)


class Step(NamedTuple):
    """A step on the way: ``scale`` (batch,) times ``along``, for members (batch,) ``alive``."""

    along: Tensor
    scale: Tensor
    alive: Tensor


def _launch(
    kernel: object,
    table: Table,
    masters: Table | None,
    stack: Tensor,
    further: tuple[object, ...] = (),
    **constants: bool,
) -> None:
    blocks, m, r = stack.shape
    assert blocks == len(table.entries)
    assert (m, r) == (table.height, table.rank)
    assert masters is None or (
        masters.dtype == torch.float32 and masters.entries.shape == table.entries.shape
    )
    if not blocks:
        return
    cols = padded(r, least=1)
    rows = min(max(64, _TILE // cols), padded(m, least=1))
    tiles = parts(m, rows)
    with torch.cuda.device_of(stack):
        kernel[(blocks * tiles,)](  # type: ignore[index]
            table.entries, table.entries if masters is None else masters.entries, stack,
            m, r, tiles, *further,
            ROWS=rows, R=cols, DTYPE=_DTYPES[table.dtype],
            ALIGNED=table.aligned and (masters is None or masters.aligned),
            MASTERED=masters is not None, **constants, num_warps=4,
        )  # fmt: skip


def room_for(*tables: Table) -> list[Tensor]:
    """Where to `gather` the blocks of tables to: behind each other in memory."""
    shapes = [(len(table.entries), table.height, table.rank) for table in tables]
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.empty(sum(sizes), dtype=torch.float32, device=tables[0].entries.device)
    return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


def gather(out: Tensor, table: Table, masters: Table | None = None) -> Tensor:
    """The blocks of ``table`` into ``out``, contiguous float32 (blocks, height, rank).

    With ``masters``, of the same blocks in float32: an element is the master's where that rounds
    to what ``table`` holds.
    """
    _launch(_gather_kernel, table, masters, out)
    return out


def scatter(
    table: Table, values: Tensor, masters: Table | None = None, step: Step | None = None
) -> None:
    """Write float32 ``values`` (blocks, height, rank) over the blocks of ``table``, rounding.

    Over those of ``masters`` as well, where given; after a ``step`` from there, if there is one.
    Nothing tells autograd of it.
    """
    assert values.dtype == torch.float32
    values = values.contiguous()
    along, scale, alive = (values,) * 3 if step is None else step
    further = along.contiguous(), scale, alive, len(values) // len(scale)
    _launch(_scatter_kernel, table, masters, values, further, STEP=step is not None)
