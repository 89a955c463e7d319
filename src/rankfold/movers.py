"""How the tensors of a step come into stacks and back: by bundles, or the direct path.

The optimizer sees movers alone, and not which of the two a stack takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .direct import Direct, eligible
from .geometries import Pair
from .geometries.endings import Stepped, formed
from .stacks import Buffers, Plan, Stack, TensorOf


class Mover(Protocol):
    """Reads and writes the members of some stacks, chunk by chunk."""

    stacks: list[Stack]
    kinds: Collection[str]  # of the tensors it moves

    def read(self, kind: str, stack: Stack, members: slice) -> Pair:
        """These members of the tensors of one kind, not to be written into."""

    def write(
        self, stack: Stack, members: slice, point: Pair | Stepped, momentum: Pair | None
    ) -> None:
        """Take their new point and momentum."""

    def finish(self) -> None:
        """Called when all is written, which is then in parameters and state."""


def movers(
    plan: Plan, tensors: Mapping[str, TensorOf], stacks: Sequence[Stack] | None = None
) -> list[Mover]:
    """What moves ``stacks``, by default all of the plan, to be used up one after the other.

    ``tensors`` says what of a parameter is moved, by kind: ``"weight"``, ``"grad"``,
    ``"momentum"``, and ``"master"``, which is merged with the weights. Whatever cannot be moved
    raises here, before anything is written.
    """
    listed = plan.stacks if stacks is None else stacks
    moved = [stack for stack in listed if eligible(stack)]
    rest = [stack for stack in listed if not any(stack is other for other in moved)]
    found: list[Mover] = []
    # Bundles come first, and are done before the direct path reads: they write back whole
    # parameters, of which it may own other parts.
    if rest:
        found.append(Bundled(plan, rest, tensors))
    if moved:
        found.append(Direct(moved, tensors))
    return found


def chunks(mover: Mover) -> list[tuple[Stack, slice]]:
    """All that a mover moves, in the order in which it wants to be asked."""
    momentum = "momentum" in mover.kinds
    return [(stack, members) for stack in mover.stacks for members in stack.chunks(momentum)]


class Bundled:
    """Moves stacks by way of bundles: any device, dtype and layout."""

    def __init__(self, plan: Plan, stacks: list[Stack], tensors: Mapping[str, TensorOf]) -> None:
        self.stacks = stacks
        self.kinds: Collection[str] = set(tensors)
        self._plan = plan
        self._tensors = tensors
        wanted: set[int] = set().union(*(stack.bundles for stack in stacks))
        self._buffers: dict[str, Buffers] = {}
        for kind, of in tensors.items():
            if kind == "weight" and "master" in tensors:
                self._buffers[kind] = plan.gather_weights(tensors["master"], wanted)
            elif kind != "master":
                self._buffers[kind] = plan.gather(of, wanted, shared=True)
        self._current: Stack | None = None
        self._pairs: dict[str, Pair] = {}  # all members of the current stack, by kind

    def read(self, kind: str, stack: Stack, members: slice) -> Pair:
        """Views of the buffers where layouts allow it."""
        if self._current is not stack:
            self._current, self._pairs = stack, {}
        if kind not in self._pairs:
            self._pairs[kind] = stack.read(self._buffers[kind])
        return Pair(*(x[members] for x in self._pairs[kind]))

    def write(
        self, stack: Stack, members: slice, point: Pair | Stepped, momentum: Pair | None
    ) -> None:
        """Into the buffers."""
        for kind, new in (("weight", formed(point)), ("momentum", momentum)):
            if new is None:
                continue
            buffers = self._buffers[kind]
            if len(new.left) == len(stack.members):
                stack.write(buffers, new)
                continue
            for side, whole, values in zip(("left", "right"), self._pairs[kind], new, strict=True):
                whole[members].copy_(values)
                if members.stop == len(stack.members) and not _is_view(whole, buffers):
                    stack.write_side(buffers, side, whole)

    def finish(self) -> None:
        """From the buffers into parameters and state."""
        self._plan.scatter_weights(self._buffers["weight"], self._tensors["master"])
        if "momentum" in self._buffers:
            self._plan.scatter(self._buffers["momentum"], self._tensors["momentum"], shared=True)


def _is_view(x: Tensor, buffers: Buffers) -> bool:
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
    return x.untyped_storage().data_ptr() in storages
