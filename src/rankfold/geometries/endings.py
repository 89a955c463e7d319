"""New factors that a kernel has yet to write: into tensors of their own, or where they belong.

A step ends with its new factors in parameters of any layout. Where one kernel makes them and puts
them there, no copy of them is ever made in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .. import kernels, tall
from ..together import both
from .terms import Pair

if TYPE_CHECKING:
    from ..kernels.moving import Table


class Target(NamedTuple):
    """Where the blocks of one side lie, and those of their masters if they have any."""

    table: Table
    masters: Table | None


@dataclass(frozen=True)
class Stepped:
    """``point`` + ``scale`` ``vector`` of members ``alive``, and the point of the others.

    The last two are (batch,).
    """

    point: Pair
    vector: Pair
    scale: Tensor
    alive: Tensor

    def formed(self) -> Pair:
        """In tensors of their own."""
        twice = (self.scale, self.scale), (self.alive, self.alive)
        return Pair(*both(tall.step, self.point, self.vector, *twice))

    def write(self, left: Target, right: Target) -> None:
        """Over the blocks of either side."""
        for x, t, target in zip(self.point, self.vector, (left, right), strict=True):
            step = kernels.moving.Step(t.flatten(0, 1), self.scale, self.alive)
            kernels.moving.scatter(target.table, x.flatten(0, 1), target.masters, step)


def formed(point: Pair | Stepped) -> Pair:
    """The new factors as tensors."""
    return point.formed() if isinstance(point, Stepped) else point
