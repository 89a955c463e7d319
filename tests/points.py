"""Random points, gradients and dense forms for tests at the level of a geometry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from rankfold.geometries import GEOMETRIES, Geometry, Pair, StepOptions, geometry_for
from rankfold.geometries.embedded import EmbeddedGeometry

GRIDS = [(1, 1), (4, 1), (1, 3), (2, 3)]


def options(retraction: str, lr: float = 0.1, **changes: object) -> StepOptions:
    """Step options with the tests' defaults; lr is also the step's length unless normalize=None."""
    values: dict[str, object] = {
        "lr": lr,
        "momentum": 0.5,
        "normalize": "metric",
        "norm_floor": 2**-23,
        "retraction": retraction,
        "maximize": False,
    }
    return StepOptions(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One geometry at one shape, with a seed for everything random about it."""

    name: str
    lefts: int
    rights: int
    m: int
    n: int
    r: int
    seed: int

    @property
    def geometry(self) -> Geometry:
        return geometry_for(self.name, self.lefts, self.rights)

    def random(self, offset: int, batch: int = 2) -> Pair:
        """A random pair (batch, I, m, r), (batch, J, n, r)."""
        generator = torch.Generator().manual_seed(1000 * self.seed + offset)
        shapes = ((batch, self.lefts, self.m, self.r), (batch, self.rights, self.n, self.r))
        return Pair(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))

    def point(self) -> Pair:
        """A random point of the manifold; unbalanced and not orthogonal where that is allowed."""
        pair = Pair(*(torch.linalg.qr(x).Q for x in self.random(1)))
        if self.geometry.isometry:
            return pair
        mix = self.gauge(2)
        return Pair(pair.left @ mix, 2 * pair.right @ mix.mT)

    def gauge(self, offset: int) -> Tensor:
        """A random invertible S (batch, 1, r, r), of condition number 2.5."""
        q = [torch.linalg.qr(self.random(offset + k).left[:, :1, : self.r]).Q for k in (0, 1)]
        return (q[0] * torch.linspace(0.8, 2.0, self.r, dtype=torch.float64)) @ q[1].mT

    def ambient(self, point: Pair, offset: int) -> tuple[Tensor, Pair]:
        """A dense matrix Z (batch, Im, Jn) and the factor gradients (Z B, Zᵀ A) of ⟨Z, W⟩."""
        pair = self.random(offset)
        z = stacked(pair.left) @ stacked(self.random(offset + 1).right).mT
        z = z + stacked(self.random(offset + 2).left) @ stacked(pair.right).mT
        left = (z @ stacked(point.right)).view_as(point.left)
        return z, Pair(left, (z.mT @ stacked(point.left)).view_as(point.right))


def cases(names: tuple[str, ...] = GEOMETRIES) -> st.SearchStrategy[Case]:
    """Any of the geometries on any grid and shape class, r = 1 and r = min(m, n) included."""

    def build(name: str, grid: tuple[int, int], r: int, extra: tuple[int, int], seed: int) -> Case:
        # Isometries of 1×1 matrices are two points: there is nowhere to go from there.
        more = int(r == 1 and extra == (0, 0))
        return Case(name, *grid, r + extra[0] + more, r + extra[1], r, seed)

    return st.builds(
        build,
        st.sampled_from(names),
        st.sampled_from(GRIDS),
        st.integers(1, 4),
        st.tuples(st.integers(0, 6), st.integers(0, 6)),
        st.integers(0, 10_000),
    )


def stacked(x: Tensor) -> Tensor:
    """(batch, blocks, m, r) -> (batch, blocks·m, r)."""
    return x.flatten(1, 2)


def product(point: Pair) -> Tensor:
    """The stacked W (batch, Im, Jn)."""
    return stacked(point.left) @ stacked(point.right).mT


def dense(geometry: Geometry, point: Pair, tangent: Pair) -> Tensor:
    """The tangent matrix downstairs (batch, Im, Jn) of a tangent in the geometry's coordinates."""
    if isinstance(geometry, EmbeddedGeometry):
        return geometry.matrix(geometry.coordinates(geometry.frame(point), tangent))
    a, b = stacked(point.left), stacked(point.right)
    return stacked(tangent.left) @ b.mT + a @ stacked(tangent.right).mT


def blocks_of(point: Pair) -> Iterator[tuple[int, int]]:
    """All (i, j) of a grid."""
    for i in range(point.left.shape[1]):
        for j in range(point.right.shape[1]):
            yield i, j
