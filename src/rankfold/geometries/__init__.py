"""The five geometries, by name."""

from __future__ import annotations

from .base import EVENTS, Geometry, Outcome, Pair, Sides, StepOptions
from .fixed_embedded import FixedEmbedded
from .fixed_quotient import FixedQuotient
from .isometry_canonical import IsometryCanonical
from .isometry_embedded import IsometryEmbedded, IsometryEmbeddedGrid
from .isometry_quotient import IsometryQuotient

__all__ = [
    "EVENTS",
    "GEOMETRIES",
    "Geometry",
    "Outcome",
    "Pair",
    "Sides",
    "StepOptions",
    "geometry_for",
    "is_isometry",
]

# For each name, the algorithm of a single pair and that of a larger grid.
_ALGORITHMS: dict[str, tuple[Geometry, Geometry]] = {
    "fixed-embedded": (FixedEmbedded(),) * 2,
    "fixed-quotient": (FixedQuotient(),) * 2,
    "isometry-embedded": (IsometryEmbedded(), IsometryEmbeddedGrid()),
    "isometry-quotient": (IsometryQuotient(),) * 2,
    "isometry-canonical": (IsometryCanonical(),) * 2,
}

GEOMETRIES = tuple(_ALGORITHMS)


def geometry_for(name: str, lefts: int, rights: int) -> Geometry:
    """The algorithm that ``name`` means for members of ``lefts`` × ``rights`` factors."""
    if name not in _ALGORITHMS:
        raise ValueError(f"unknown geometry {name!r}; there are {', '.join(GEOMETRIES)}")
    single, grid = _ALGORITHMS[name]
    return single if lefts == rights == 1 else grid


def is_isometry(name: str) -> bool:
    """Whether the geometry keeps the columns of its factors orthonormal."""
    return geometry_for(name, 1, 1).isometry
