"""Gather and scatter: parameters in any layout <-> batched stacks of grids.

Knows layouts, dtypes, masters and devices, and nothing of geometry. The number of tensor
operations depends on how many different layouts there are, never on how many heads or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import direct, scalars, workspace
from .factors import Factor, Grid
from .geometries import EVENTS, Pair
from .precision import working_dtype
from .tall import by_columns

Buffers = dict[int, Tensor]  # by bundle
TensorOf = Callable[[Tensor], Tensor]

_CACHED_BYTES = 8 * 2**20
"""Parameters that one plan gathers on a CPU, so that what a step makes of them stays in cache."""


class Place(NamedTuple):
    """Where the parameters of one role lie: a bundle, and the positions in it, in grid order."""

    bundle: int
    positions: slice | Tensor

    def read(self, buffers: Buffers) -> Tensor:
        """The parameters ``(L, *shape)``: a view where the positions are evenly spaced."""
        return buffers[self.bundle][self.positions]

    def write(self, buffers: Buffers, view: Callable[[Tensor], Tensor], values: Tensor) -> None:
        """Copy ``values`` into a view of the parameters, in place."""
        stacked = self.read(buffers)
        target = view(stacked)
        target.copy_(values.reshape(target.shape))
        if isinstance(self.positions, Tensor):
            buffers[self.bundle].index_copy_(0, self.positions, stacked)


@dataclass(frozen=True)
class Slot:
    """One factor position of a source: how to read it, and where its parameters lie."""

    factor: Factor
    weight: Place
    bias: Place | None
    params: list[Tensor]  # the weights, in grid order

    def read(self, buffers: Buffers, height: int, dtype: torch.dtype) -> Tensor:
        """``(L, count, height, rank)``, padded with zero rows up to ``height``."""
        blocks = self.factor.view_blocks(self.weight.read(buffers)).flatten(1, -3).to(dtype)
        if self.bias is not None:
            rows = self.factor.view_bias(self.bias.read(buffers)).to(dtype)
            blocks = _joined([blocks, rows], -2, by_columns(blocks))
        missing = height - blocks.shape[-2]
        return pad(blocks, (0, 0, 0, missing)) if missing else blocks

    def write(self, buffers: Buffers, blocks: Tensor) -> None:
        """The inverse of `read`: put ``(L, count, height, rank)`` back, in place."""
        height = self.factor.height
        rows = height if self.bias is None else height - 1
        self.weight.write(buffers, self.factor.view_blocks, blocks[..., :rows, :])
        if self.bias is not None:
            self.bias.write(buffers, self.factor.view_bias, blocks[..., rows:height, :])


@dataclass(frozen=True)
class Source:
    """Grids of one layout: the same operations read all of them."""

    left: list[Slot]
    right: list[Slot]
    grids: int
    groups: int

    @property
    def members(self) -> int:
        """Products in this source."""
        return self.grids * self.groups


@dataclass
class Stack:
    """All members of one shape, from one or more sources: one batch for a geometry."""

    sources: list[Source]
    lefts: int
    rights: int
    left_height: int
    right_height: int
    dtype: torch.dtype
    rounded: bool  # whether any parameter is stored in less than working precision
    largest: float  # what all of its parameters can store
    members: list[str]
    counted: Tensor | None = None  # (events, batch): how often each of `EVENTS` has happened

    def count(self, alive: Tensor, marks: Sequence[Tensor | None], members: slice) -> None:
        """Add what happened to ``members``, on the device: see `Outcome`."""
        if self.counted is None:
            shape = len(EVENTS), len(self.members)
            self.counted = torch.zeros(shape, dtype=torch.long, device=alive.device)
        scalars.count(self.counted[:, members], alive, marks)

    def counts(self) -> dict[str, dict[str, int]]:
        """The counts as plain numbers, by member, zeros left out; synchronises."""
        found: dict[str, dict[str, int]] = {}
        events = [] if self.counted is None else zip(EVENTS, self.counted.tolist(), strict=True)
        for name, numbers in events:
            for member, number in zip(self.members, numbers, strict=True):
                if number:
                    found.setdefault(member, {})[name] = number
        return found

    @cached_property
    def regular(self) -> bool:
        """Whether its layout allows the direct path."""
        return direct.is_regular(self)

    @cached_property
    def sides(self) -> direct.Sides:
        """Its blocks, for the direct path."""
        return direct.sides_of(self)

    @property
    def bundles(self) -> set[int]:
        """The bundles it reads."""
        slots = [slot for source in self.sources for slot in (*source.left, *source.right)]
        places = [place for slot in slots for place in (slot.weight, slot.bias) if place]
        return {place.bundle for place in places}

    def chunks(self, momentum: bool) -> list[slice]:
        """All members, in runs whose steps, with ``momentum`` or without, stay in little memory."""
        rows = self.lefts * self.left_height + self.rights * self.right_height
        first = self.sources[0].left[0]
        member = rows * first.factor.rank * self.dtype.itemsize
        return workspace.chunks(len(self.members), member, first.params[0].device, momentum)

    def read(self, buffers: Buffers) -> Pair:
        """``(batch, I, m, r)`` and ``(batch, J, n, r)`` in the stack's dtype."""
        return Pair(
            self._side(buffers, [s.left for s in self.sources], self.lefts, self.left_height),
            self._side(buffers, [s.right for s in self.sources], self.rights, self.right_height),
        )

    def _side(self, buffers: Buffers, sides: list[list[Slot]], blocks: int, height: int) -> Tensor:
        read = [[slot.read(buffers, height, self.dtype) for slot in slots] for slots in sides]
        # Several blocks may be taken for one tall factor, which has its rows one after the other.
        columns = blocks == 1 and all(by_columns(x) for parts in read for x in parts)
        parts = [_joined(x, 1, columns).reshape(-1, blocks, height, x[0].shape[-1]) for x in read]
        return _joined(parts, 0, columns)

    def write(self, buffers: Buffers, pair: Pair) -> None:
        """Put a pair of the shapes of `read` back into the buffers, in place."""
        for side, values in zip(("left", "right"), pair, strict=True):
            self.write_side(buffers, side, values)

    def write_side(self, buffers: Buffers, side: str, values: Tensor) -> None:
        """Put one side of such a pair back."""
        parts = torch.split(values, [source.members for source in self.sources])
        for source, part in zip(self.sources, parts, strict=True):
            slots: list[Slot] = getattr(source, side)
            part = part.reshape(source.grids, -1, *part.shape[-2:])
            counts = [slot.factor.count for slot in slots]
            for slot, blocks in zip(slots, torch.split(part, counts, 1), strict=True):
                slot.write(buffers, blocks)


class Plan:
    """Which parameters are gathered together, and which stacks are read from them.

    A *bundle* is all parameters of one shape, dtype and device, stacked once whatever their role,
    so that a fused weight which several grids read is gathered and written back a single time.
    """

    def __init__(self, grids: Sequence[tuple[str, Grid]]) -> None:
        self.bundles: list[list[Tensor]] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        self._bundle_of: dict[tuple[object, ...], int] = {}
        by_layout: dict[tuple[object, ...], list[tuple[str, Grid]]] = {}
        for name, grid in grids:
            layout = tuple((side, factor.layout) for side, _, factor in grid.factors())
            by_layout.setdefault((grid.groups, layout), []).append((name, grid))
        by_shape: dict[tuple[object, ...], list[list[tuple[str, Grid]]]] = {}
        for alike in by_layout.values():
            by_shape.setdefault(_shape_key(alike[0][1]), []).append(alike)
        self.stacks = [self._stack(sources) for sources in by_shape.values()]

    def _stack(self, sources: list[list[tuple[str, Grid]]]) -> Stack:
        first = sources[0][0][1]
        return Stack(
            sources=[self._source([grid for _, grid in alike]) for alike in sources],
            lefts=first.lefts,
            rights=first.rights,
            left_height=max(f.height for f in first.left),
            right_height=max(f.height for f in first.right),
            dtype=_grid_dtype(first),
            rounded=any(needs_master(p) for alike in sources for p in alike[0][1].params()),
            largest=min(
                torch.finfo(p.dtype).max for alike in sources for p in alike[0][1].params()
            ),
            members=[f"{n}[{g}]" for alike in sources for n, x in alike for g in range(x.groups)],
        )

    def _source(self, grids: list[Grid]) -> Source:
        left = [self._slot([g.left[k] for g in grids]) for k in range(len(grids[0].left))]
        right = [self._slot([g.right[k] for g in grids]) for k in range(len(grids[0].right))]
        return Source(left, right, len(grids), grids[0].groups)

    def _slot(self, factors: list[Factor]) -> Slot:
        biases = [f.bias for f in factors if f.bias is not None]
        params = [f.param for f in factors]
        weight = self._place(params)
        return Slot(factors[0], weight, self._place(biases) if biases else None, params)

    def _place(self, params: list[Tensor]) -> Place:
        key = (params[0].shape, params[0].dtype, params[0].device)
        index = self._bundle_of.setdefault(key, len(self.bundles))
        if index == len(self.bundles):
            self.bundles.append([])
        bundle = self.bundles[index]
        positions = []
        for param in params:
            if id(param) not in self._place_of:
                self._place_of[id(param)] = (index, len(bundle))
                bundle.append(param)
            positions.append(self._place_of[id(param)][1])
        return Place(index, _as_index(positions, params[0].device))

    def gather(
        self, tensors: TensorOf, wanted: Collection[int] | None = None, *, shared: bool = False
    ) -> Buffers:
        """Stack ``tensors(param)`` bundle by bundle, in the bundle's working dtype.

        ``wanted`` are the bundles, all by default. ``shared`` makes the buffer of a single tensor
        a view of it where that is possible, so that writing into one writes into the other.
        """
        found = {}
        for k in range(len(self.bundles)) if wanted is None else sorted(wanted):
            dtype = working_dtype(self.bundles[k][0].dtype)
            found[k] = _stacked([tensors(p) for p in self.bundles[k]], shared).to(dtype)
        return found

    def scatter(self, buffers: Buffers, tensors: TensorOf, *, shared: bool = False) -> None:
        """Copy buffers back into ``tensors(param)``, rounding to their dtype.

        ``shared`` as it was when these were gathered from these tensors.
        """
        for k, buffer in buffers.items():
            targets = [tensors(p) for p in self.bundles[k]]
            if not (shared and len(targets) == 1 and targets[0].dtype == buffer.dtype):
                torch._foreach_copy_(targets, list(buffer.unbind()))

    def gather_weights(self, masters: TensorOf, wanted: Collection[int]) -> Buffers:
        """Weights in working precision: the parameter, or its master where it is low-precision.

        A weight that something else has written since (an EMA swap, a reload) no longer equals
        its rounded master, and wins over it, element by element. Shared, as in `gather`.
        """
        found = {}
        for k in sorted(wanted):
            weights = _stacked(self.bundles[k], shared=True)
            if needs_master(weights):
                kept = _stacked([masters(p) for p in self.bundles[k]], shared=True)
                current = kept.to(weights.dtype) == weights
                weights = torch.where(current, kept, weights.to(kept.dtype))
            found[k] = weights
        return found

    def scatter_weights(self, buffers: Buffers, masters: TensorOf) -> None:
        """Write weights back into the parameters, and into the masters of low-precision ones."""
        self.scatter(buffers, itself, shared=True)
        low = {k: x for k, x in buffers.items() if needs_master(self.bundles[k][0])}
        self.scatter(low, masters)

    @property
    def device(self) -> torch.device:
        """Where its first parameters are: all of them, in the plans of `plans_for`."""
        return self.bundles[0][0].device

    @property
    def device_types(self) -> Iterable[str]:
        """The device types the plan's parameters are on."""
        return {bundle[0].device.type for bundle in self.bundles}


def plans_for(grids: Sequence[tuple[str, Grid]]) -> list[Plan]:
    """Plans for all of these grids: one a device, on a CPU as many as fit in its cache."""
    by_device: dict[torch.device, list[tuple[str, Grid]]] = {}
    for name, grid in grids:
        by_device.setdefault(grid.params()[0].device, []).append((name, grid))
    if any(device.type == "cpu" for device in by_device):
        workspace.keep_freed_memory()
    return [
        Plan(part)
        for device, there in by_device.items()
        for part in (_cached_parts(there) if device.type == "cpu" else [there])
    ]


def _cached_parts(grids: Sequence[tuple[str, Grid]]) -> list[Sequence[tuple[str, Grid]]]:
    """The grids in runs whose parameters fit in a cache, those that share parameters together."""
    params = {id(p): p for _, grid in grids for p in grid.params()}
    sizes = {key: p.numel() * p.element_size() for key, p in params.items()}
    if sum(sizes.values()) <= _CACHED_BYTES:
        return [grids]
    parts: list[list[int]] = []
    # Factors that lie alike in memory go together: in one stack with others they would be turned.
    by_axes: dict[tuple[int, ...], list[tuple[set[int], list[int]]]] = {}
    for shared, together in _sharing([grid for _, grid in grids]):
        axes = tuple(factor.axis for k in together for _, _, factor in grids[k][1].factors())
        by_axes.setdefault(axes, []).append((shared, together))
    for alike in by_axes.values():
        whole = sum(sizes[key] for shared, _ in alike for key in shared)
        # As many as it takes, and of one size: a large one and a small rest take more memory.
        runs: list[list[int]] = [[] for _ in range(-(-whole // _CACHED_BYTES))]
        before = 0
        for shared, together in alike:
            runs[before * len(runs) // whole].extend(together)
            before += sum(sizes[key] for key in shared)
        parts += [run for run in runs if run]
    return [[grids[k] for k in sorted(part)] for part in parts]


def _sharing(grids: Sequence[Grid]) -> list[tuple[set[int], list[int]]]:
    """Which grids share parameters, by way of others or not: the ids of these, and the grids."""
    found: list[tuple[set[int], list[int]]] = []
    for k, grid in enumerate(grids):
        ids, together = {id(p) for p in grid.params()}, [k]
        for other in [entry for entry in found if entry[0] & ids]:
            found.remove(other)
            ids, together = ids | other[0], other[1] + together
        found.append((ids, together))
    return found


def itself(param: Tensor) -> Tensor:
    """The parameter, as a `TensorOf`."""
    return param


def grad_of(param: Tensor) -> Tensor:
    """The gradient of a parameter, which is there."""
    assert param.grad is not None  # checks.has_gradients
    return param.grad


def _stacked(tensors: list[Tensor], shared: bool) -> Tensor:
    return tensors[0][None] if shared and len(tensors) == 1 else torch.stack(tensors)


def _joined(parts: list[Tensor], dim: int, columns: bool) -> Tensor:
    """`torch.cat` by copies, several times faster for transposed views, into rows or columns."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if columns:
        shape[-2:] = reversed(shape[-2:])
    joined, start = parts[0].new_empty(shape), 0
    joined = joined.mT if columns else joined
    for part in parts:
        joined.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return joined


def needs_master(param: Tensor) -> bool:
    """Whether a parameter is stored in less than the precision it is computed in."""
    return param.dtype != working_dtype(param.dtype)


def _grid_dtype(grid: Grid) -> torch.dtype:
    wide = any(p.dtype == torch.float64 for p in grid.params())
    return torch.float64 if wide else torch.float32


def _shape_key(grid: Grid) -> tuple[object, ...]:
    heights = tuple(max(f.height for f in side) for side in (grid.left, grid.right))
    return (grid.lefts, grid.rights, heights, grid.rank, _grid_dtype(grid), grid.params()[0].device)


def _as_index(positions: list[int], device: torch.device) -> slice | Tensor:
    first = positions[0]
    step = positions[1] - first if len(positions) > 1 else 1
    if step > 0 and positions == list(range(first, positions[-1] + 1, step)):
        return slice(first, positions[-1] + 1, step)
    return torch.tensor(positions, device=device)
