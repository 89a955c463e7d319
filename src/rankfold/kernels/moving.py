"""Triton kernels that copy blocks between scattered tensors and one contiguous float32 stack.

One program moves one tile of one block. Where a block lies is read from a table on the device, so
one launch serves any number of tensors. A tile is read and written along whichever of its two
dimensions is contiguous in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    entries_ptr, masters_ptr, out_ptr, other_entries_ptr, other_masters_ptr, other_out_ptr,
    blocks, m, r, parts,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MASTERED: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Blocks into a contiguous stack; a master wins over what it still rounds to."""
    block = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * ROWS
    if TWO:  # noqa: SIM102  (the one is known when a kernel is compiled, the other is not)
        if block >= blocks:
            block -= blocks
            entries_ptr = other_entries_ptr
            masters_ptr = other_masters_ptr
            out_ptr = other_out_ptr
    tile = _load(entries_ptr, block, start, m, r, ROWS, R, DTYPE, ALIGNED)
    if MASTERED:
        master = _load(masters_ptr, block, start, m, r, ROWS, R, tl.float32, ALIGNED)
        tile = tl.where(master.to(DTYPE).to(tl.float32) == tile, master, tile)
    rows = start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, R)[None, :]
    tl.store(out_ptr + (block * m + rows) * r + cols, tile, mask=(rows < m) & (cols < r))


@triton.jit
def _scatter_kernel(
    entries_ptr, masters_ptr, values_ptr, other_entries_ptr, other_masters_ptr, other_values_ptr,
    blocks, m, r, parts, along_ptr, other_along_ptr, scale_ptr, alive_ptr, members,
    ROWS: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    MASTERED: tl.constexpr, TWO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A contiguous stack into blocks, and unrounded into their masters; after a step if asked."""
    block = (tl.program_id(0) // parts).to(tl.int64)
    start = (tl.program_id(0) % parts) * ROWS
    stacked = tl.num_programs(0) // parts
    if TWO:
        stacked = tl.where(block < blocks, blocks, stacked - blocks)
        if block >= blocks:
            block -= blocks
            entries_ptr = other_entries_ptr
            masters_ptr = other_masters_ptr
            values_ptr = other_values_ptr
            along_ptr = other_along_ptr
    rows = start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, R)[None, :]
    place = (block * m + rows) * r + cols
    there = (rows < m) & (cols < r)
    tile = tl.load(values_ptr + place, mask=there, other=0.0)
    if STEP:
        member = block // (stacked // members)
        if tl.load(alive_ptr + member):
            scale = tl.load(scale_ptr + member)
            tile += scale * tl.load(along_ptr + place, mask=there, other=0.0)
    _store(entries_ptr, tile, block, start, m, r, ROWS, R, DTYPE, ALIGNED)
    if MASTERED:
        _store(masters_ptr, tile, block, start, m, r, ROWS, R, tl.float32, ALIGNED)


class Move(NamedTuple):
    """The blocks of a table, and the float32 stack (blocks, height, rank) they move to or from.

    ``masters`` are the same blocks in float32. ``along`` is what a step from the stack goes along.
    """

    table: Table
    stack: Tensor
    masters: Table | None = None
    along: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What two of them have in common that go in one launch."""
        return self.table.dtype, self.table.height, self.table.rank, self.masters is None

    @property
    def aligned(self) -> bool:
        """Whether all of its blocks are."""
        return self.table.aligned and (self.masters is None or self.masters.aligned)

    def check(self) -> Move:
        """Itself, with a contiguous stack: an address knows no bounds."""
        assert self.stack.dtype == torch.float32
        assert self.stack.shape == (len(self.table.entries), self.table.height, self.table.rank)
        assert self.masters is None or (
            self.masters.dtype == torch.float32
            and self.masters.entries.shape == self.table.entries.shape
        )
        assert self.along is None or self.along.shape == self.stack.shape
        return self


class Step(NamedTuple):
    """A step on the way: ``scale`` (batch,) times the moves' ``along``, for members ``alive``."""

    scale: Tensor
    alive: Tensor


def _launches(moves: Sequence[Move]) -> list[tuple[Move, Move]]:
    """Moves in pairs that go in one launch, or with themselves."""
    here = [move.check() for move in moves if len(move.table.entries)]
    if len(here) == 2 and here[0].kind == here[1].kind:
        return [(here[0], here[1])]
    return [(move, move) for move in here]


def _launch(
    kernel: object, pair: tuple[Move, Move], further: tuple[object, ...] = (), **constants: bool
) -> None:
    first, second = pair
    blocks, m, r = first.stack.shape
    two = second is not first
    cols = padded(r, least=1)
    rows = min(max(64, _TILE // cols), padded(m, least=1))
    tiles = parts(m, rows)
    places = [
        x
        for table, stack, masters, _ in pair
        for x in (table.entries, (table if masters is None else masters).entries, stack)
    ]
    with torch.cuda.device_of(first.stack):
        kernel[((blocks + two * len(second.stack)) * tiles,)](  # type: ignore[index]
            *places, blocks, m, r, tiles, *further,
            ROWS=rows, R=cols, DTYPE=_DTYPES[first.table.dtype],
            ALIGNED=first.aligned and second.aligned,
            MASTERED=first.masters is not None, TWO=two, **constants, num_warps=4,
        )  # fmt: skip


def room_for(*tables: Table) -> list[Tensor]:
    """Where to `gather` the blocks of tables to: behind each other in memory."""
    shapes = [(len(table.entries), table.height, table.rank) for table in tables]
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.empty(sum(sizes), dtype=torch.float32, device=tables[0].entries.device)
    return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


def gather(*moves: Move) -> None:
    """The blocks of each table into its stack, which is contiguous: of two in one launch.

    With masters an element is the master's where that rounds to what the table holds.
    """
    for pair in _launches(moves):
        _launch(_gather_kernel, pair)


def scatter(*moves: Move, step: Step | None = None) -> None:
    """Each stack over the blocks of its table, rounding: of two in one launch.

    Over those of its masters as well, where there are any; after a ``step`` from there along
    something, if one is given. Nothing tells autograd of it.
    """
    for pair in _launches([move._replace(stack=move.stack.contiguous()) for move in moves]):
        along = [x.stack if x.along is None else x.along.contiguous() for x in pair]
        scale, alive = along if step is None else step
        further = *along, scale, alive, len(scale)
        _launch(_scatter_kernel, pair, further, STEP=step is not None)
