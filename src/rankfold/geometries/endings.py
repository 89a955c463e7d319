"""New factors that are still to be made: in tensors of their own, or on the way to parameters.

A step ends with its new factors in parameters of any layout. Where a kernel that puts them there
makes them as well, no copy of them is ever made in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import tall
from ..together import both
from .terms import Pair


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
        shared = self.scale, self.alive
        return Pair(*both(tall.step, self.point, self.vector, shared=shared))


def formed(point: Pair | Stepped) -> Pair:
    """The new factors as tensors."""
    return point.formed() if isinstance(point, Stepped) else point
