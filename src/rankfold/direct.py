"""The direct path: blocks are read out of and written into tensors by their addresses.

On a GPU one kernel moves all blocks of one side of a stack between the tensors they lie in and a
contiguous (batch, blocks, m, r) float32 tensor, whatever their layouts. It finds them by a table
of addresses and strides, made anew only when a tensor has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .factors import Factor, describe
from .geometries import Pair
from .geometries.endings import Stepped, formed

if TYPE_CHECKING:
    from .kernels.moving import Step, Table
    from .stacks import Slot, Stack

TensorOf = Callable[[Tensor], Tensor]

_DEVICE_TYPES = ("cuda",)
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_LARGEST_RANK = 128
_ALIGNMENT = 16  # bytes, the widest access of a thread

# What CUDA graphs read at every replay: a graph may outlive the plan, and the optimizer, it was
# recorded with.
_recorded: dict[int, tuple[Tensor, Tensor]] = {}


def eligible(stack: Stack) -> bool:
    """Whether a stack can go the direct path now."""
    # Compiled code has no addresses, and fuses the plain operations itself.
    device = stack.sources[0].left[0].params[0].device
    return not torch.compiler.is_compiling() and kernels.available(device) and stack.regular


def is_regular(stack: Stack) -> bool:
    """Whether the layout of a stack allows the direct path: what never changes about it."""
    sides = (("left", stack.left_height), ("right", stack.right_height))
    for side, height in sides:
        slots: list[Slot] = [slot for s in stack.sources for slot in getattr(s, side)]
        params = [p for slot in slots for p in slot.params]
        if any(slot.bias is not None or slot.factor.height != height for slot in slots):
            return False
        if slots[0].factor.rank > _LARGEST_RANK or len({p.dtype for p in params}) > 1:
            return False
        if not all(_plain(p) for p in params):
            return False
    return True


def _plain(param: Tensor) -> bool:
    """Whether the values of a parameter lie at its address."""
    # Subclasses, like DTensor, may keep them anywhere.
    return (
        type(param) in (Tensor, torch.nn.Parameter)
        and param.device.type in _DEVICE_TYPES
        and param.dtype in _DTYPES
        and param.numel() > 0
    )


class _Made(NamedTuple):
    """A table, what it was made for, and what must live as long."""

    key: tuple[object, ...]
    table: Table
    host: Tensor
    in_graph: bool


class Side:
    """The blocks of one side of a stack, in the order of `Stack.read`."""

    def __init__(self, sides: Sequence[tuple[int, list[Slot]]], blocks: int, height: int) -> None:
        runs = [
            (slot.params[grid], slot.factor)
            for grids, slots in sides
            for grid in range(grids)
            for slot in slots
        ]
        self.params = [param for param, _ in runs]
        self.blocks = blocks
        self._shapes = [param.shape for param in self.params]
        self._height = height
        self._factors = [factor for _, factor in runs]
        counts = torch.tensor([factor.count for factor in self._factors], device="cpu")
        self._owners = torch.arange(len(runs), device="cpu").repeat_interleave(counts)
        self._layouts: dict[tuple[object, ...], Tensor] = {}
        self._made: dict[str, _Made] = {}
        self._spare: dict[str, Tensor] = {}
        self._superseded: list[_Made] = []

    @property
    def rounded(self) -> bool:
        """Whether its parameters are stored in less than float32, and so have masters."""
        return self.params[0].dtype != torch.float32

    def tensors(self, of: TensorOf) -> list[Tensor]:
        """``of(param)`` for each, in one dtype: copies where these differ, as gradients may."""
        found = [of(param) for param in self.params]
        if len(kinds := {t.dtype for t in found}) == 1 and kinds <= _DTYPES:
            return found
        return [t.float() for t in found]

    def in_place(self, tensors: list[Tensor]) -> Tensor | None:
        """All blocks (count, m, r) where they lie, if that is how a stack has them."""
        if len(tensors) > 1 or tensors[0].dtype != torch.float32:
            return None
        blocks = self._factors[0].view_blocks(tensors[0].detach()[None])
        return blocks.flatten(0, -3) if blocks.is_contiguous() else None

    def table(self, kind: str, tensors: list[Tensor]) -> Table:
        """Where the blocks of these tensors lie; kept, by kind, until one of them moves."""
        key = tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
        capturing = self.params[0].is_cuda and torch.cuda.is_current_stream_capturing()
        made = self._made.get(kind)
        # A table made for a graph is filled by the graph, and holds nothing until that runs.
        if made is None or made.key != key or made.in_graph:
            # Page-locked memory let go of while a graph is captured would be marked with an event
            # of the capture, and torch would stumble over that when it next looks at its events.
            if not capturing:
                self._superseded.clear()
            elif made is not None:
                self._superseded.append(made)
            made = self._made[kind] = self._make(kind, key, tensors, capturing)
        if capturing:
            _recorded[id(made.host)] = (made.host, made.table.entries)
        return made.table

    def _make(
        self, kind: str, key: tuple[object, ...], tensors: list[Tensor], capturing: bool
    ) -> _Made:
        # Page-locked memory is best not asked for while a graph is captured, which may be the
        # first time that gradients lie where the graph has put them: hence one in reserve.
        spare = self._spare.pop(kind, None)
        host = spare if capturing and spare is not None else self._host_memory()
        if not capturing:
            self._spare[kind] = self._host_memory() if spare is None else spare
        layouts = [
            self._layout(*pair) for pair in zip(tensors, self._factors, self._shapes, strict=True)
        ]
        torch.cat(layouts, out=host)
        itemsize, dtype = tensors[0].element_size(), tensors[0].dtype
        starts = torch.tensor([t.data_ptr() for t in tensors], device="cpu")
        addresses, down, across = host.unbind(1)
        addresses.mul_(itemsize).add_(starts[self._owners])
        longer = torch.where(across == 1, down, across)
        ragged = (addresses % _ALIGNMENT).any() | (longer * itemsize % _ALIGNMENT).any()
        entries = host.to(tensors[0].device, non_blocking=True)
        height, rank = self._height, self._factors[0].rank
        table = kernels.moving.Table(entries, dtype, height, rank, aligned=not bool(ragged))
        return _Made(key, table, host, capturing)

    def _host_memory(self) -> Tensor:
        shape, pinned = (len(self._owners), 3), self.params[0].is_cuda
        return torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def _layout(self, tensor: Tensor, factor: Factor, shape: torch.Size) -> Tensor:
        """(count, 3): each block's distance from the start, and its strides, in elements."""
        if tensor.shape != shape:  # an address knows no bounds
            raise RuntimeError(
                f"{describe(factor.param)} had shape {tuple(shape)} when its steps were planned; "
                f"now it, its gradient or its state is of shape {tuple(tensor.shape)}"
            )
        key = (id(factor), tensor.shape, tensor.stride())
        if key not in self._layouts:
            view = factor.view_blocks(tensor[None])
            starts = torch.tensor([view.storage_offset() - tensor.storage_offset()], device="cpu")
            for size, stride in zip(view.shape[:-2], view.stride()[:-2], strict=True):
                starts = (starts[:, None] + stride * torch.arange(size, device="cpu")).flatten()
            strides = torch.tensor(view.stride()[-2:], device="cpu").expand(len(starts), 2)
            self._layouts[key] = torch.cat([starts[:, None], strides], 1)
        return self._layouts[key]


class Sides(NamedTuple):
    """Both sides of a stack."""

    left: Side
    right: Side


def sides_of(stack: Stack) -> Sides:
    """The blocks of a stack that is regular."""
    return Sides(
        Side([(s.grids, s.left) for s in stack.sources], stack.lefts, stack.left_height),
        Side([(s.grids, s.right) for s in stack.sources], stack.rights, stack.right_height),
    )


class Direct:
    """Moves stacks the direct path. What is written is in the parameters at once."""

    def __init__(self, stacks: list[Stack], tensors: Mapping[str, TensorOf]) -> None:
        """Find all tensors, and fail where they do not fit, before anything is written."""
        self.stacks = stacks
        self.kinds: Collection[str] = set(tensors)
        self._tables: dict[int, list[dict[str, Table]]] = {id(stack): [] for stack in stacks}
        self._in_place: dict[int, list[dict[str, Tensor | None]]] = {id(s): [] for s in stacks}
        self._held: list[list[Tensor]] = []  # a copy must last until it is read
        for stack in stacks:
            for side in stack.sides:
                tables, views = {}, {}
                for kind, of in tensors.items():
                    if kind != "master" or side.rounded:
                        self._held.append(side.tensors(of))
                        tables[kind] = side.table(kind, self._held[-1])
                        views[kind] = side.in_place(self._held[-1])
                self._tables[id(stack)].append(tables)
                self._in_place[id(stack)].append(views)

    def _cut(self, kind: str, stack: Stack, members: slice) -> list[tuple[Table, Table | None]]:
        """The tables of each side, and of its masters if these are weights that have them."""
        found = []
        for side, tables in zip(stack.sides, self._tables[id(stack)], strict=True):
            here = (members.start * side.blocks, members.stop * side.blocks)
            masters = tables.get("master") if kind == "weight" else None
            found.append((tables[kind].cut(*here), masters and masters.cut(*here)))
        return found

    def read(self, kind: str, stack: Stack, members: slice) -> Pair:
        """(members, I, m, r) and (members, J, n, r): views of what lies like that, or copies."""
        cut, views = self._cut(kind, stack, members), self._in_place[id(stack)]
        lying = [view[kind] for view in views]
        copied = [tables for tables, blocks in zip(cut, lying, strict=True) if blocks is None]
        room = iter(_gathered(copied) if copied else [])
        found = []
        for side, blocks in zip(stack.sides, lying, strict=True):
            if blocks is None:
                blocks = next(room)
            else:
                blocks = blocks[members.start * side.blocks : members.stop * side.blocks]
            found.append(blocks.view(-1, side.blocks, *blocks.shape[1:]))
        return Pair(*found)

    def write(
        self, stack: Stack, members: slice, point: Pair | Stepped, momentum: Pair | None
    ) -> None:
        """Put the new point, and momentum, of these members into parameters and state."""
        cut = self._cut("weight", stack, members)
        in_place = any(view["weight"] is not None for view in self._in_place[id(stack)])
        if isinstance(point, Stepped) and not in_place:
            step = kernels.moving.Step(point.scale, point.alive)
            _scatter(cut, point.point, point.vector, step)
        else:
            _scatter(cut, formed(point))
        if momentum is not None:
            _scatter(self._cut("momentum", stack, members), momentum)
        for side in stack.sides:
            torch.autograd.graph.increment_version(side.params)

    def finish(self) -> None:
        """Nothing is left to do."""


def _gathered(cut: list[tuple[Table, Table | None]]) -> list[Tensor]:
    room = kernels.moving.room_for(*(table for table, _ in cut))
    moves = (
        kernels.moving.Move(table, out, masters)
        for (table, masters), out in zip(cut, room, strict=True)
    )
    kernels.moving.gather(*moves)
    return room


def _scatter(
    cut: list[tuple[Table, Table | None]],
    pair: Pair,
    vector: Pair | None = None,
    step: Step | None = None,
) -> None:
    along = (None, None) if vector is None else [x.flatten(0, 1) for x in vector]
    moves = (
        kernels.moving.Move(table, values.flatten(0, 1), masters, x)
        for (table, masters), values, x in zip(cut, pair, along, strict=True)
    )
    kernels.moving.scatter(*moves, step=step)
