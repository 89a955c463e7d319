"""check_geometry: the properties that define a geometry, measured on a random point.

Everything is computed with the geometry's own frame, gradient, coordinates, norm, retraction and
transport, in float64, and compared downstairs with `W + tΞ`: no exponential map or distance is
needed. A report holds numbers, and what each should be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .geometries import Geometry, Pair, StepOptions, geometry_for
from .geometries.base import flatten_blocks
from .geometries.embedded import EmbeddedGeometry
from .geometries.isometry_embedded import IsometryEmbeddedGrid
from .linalg import sym
from .precision import exact_arithmetic

_STEPS = (2e-3, 1e-3)  # lengths between which slopes are taken
_SLOPE_MARGIN = 0.1
_ROUNDING = 1e-9  # what is zero in exact arithmetic
_SPARE = 8  # tangent vectors drawn beyond the dimension expected
_RANK_CUTOFF = 1e-12  # eigenvalues of a Gram matrix below this share of the largest are zero
# Retractions that are second order: the error has no tangent part up to t³.
_SECOND_ORDER = ("svd", "orthographic", "polar")


@dataclass(frozen=True)
class GeometryReport:
    """What `check_geometry` measured; None where a number does not apply.

    ``retraction_slope``: exponent of t in ‖R(tΞ) − W − tΞ‖, 2 or more. ``tangential_slope``: that
    of the error's tangent part, 3 or more for second-order retractions; inf where the error is
    rounding. ``projection_idempotence``, ``projection_self_adjointness``: relative defects of
    the tangent projection, or the horizontal one. ``gauge_invariance``: how far three steps from
    two factorizations of one matrix end up apart, relative to their length; None for the qr
    retraction, which depends on the gauge. ``transport_identity``: relative change of a vector
    carried over a step of length zero. ``dimension``: numerical rank of the Gram matrix of random
    tangent vectors.
    """

    geometry: str
    retraction: str
    retraction_slope: float
    tangential_slope: float | None
    projection_idempotence: float
    projection_self_adjointness: float
    gauge_invariance: float | None
    transport_identity: float
    dimension: int
    expected_dimension: int

    def verdicts(self) -> dict[str, bool]:
        """Whether each number that applies is what it should be, by name."""
        found = {
            "retraction_slope": self.retraction_slope > 2 - _SLOPE_MARGIN,
            "projection_idempotence": self.projection_idempotence < _ROUNDING,
            "projection_self_adjointness": self.projection_self_adjointness < _ROUNDING,
            "transport_identity": self.transport_identity < _ROUNDING,
            "dimension": self.dimension == self.expected_dimension,
        }
        if self.tangential_slope is not None:
            found["tangential_slope"] = self.tangential_slope > 3 - _SLOPE_MARGIN
        if self.gauge_invariance is not None:
            found["gauge_invariance"] = self.gauge_invariance < _ROUNDING
        return found

    @property
    def ok(self) -> bool:
        """Whether all of them are."""
        return all(self.verdicts().values())

    def __str__(self) -> str:
        wanted = {
            "retraction_slope": "2 or more",
            "tangential_slope": "3 or more",
            "dimension": str(self.expected_dimension),
        }
        verdicts = self.verdicts()
        lines = [f"{self.geometry}, {self.retraction} retraction: {'ok' if self.ok else 'WRONG'}"]
        for name in self.__dataclass_fields__:
            if name in ("geometry", "retraction", "expected_dimension"):
                continue
            value = getattr(self, name)
            shown = "-" if value is None else f"{value:.3g}"
            verdict = {True: "ok", False: "WRONG", None: "does not apply"}[verdicts.get(name)]
            goal = wanted.get(name, f"below {_ROUNDING:g}")
            lines.append(f"  {name:28} {shown:>10}   {goal:12} {verdict}")
        return "\n".join(lines)


def check_geometry(
    geometry: str | Geometry,
    *,
    m: int = 12,
    n: int = 9,
    r: int = 3,
    lefts: int = 1,
    rights: int = 1,
    retraction: str | None = None,
    seed: int = 0,
) -> GeometryReport:
    """Measure what defines a geometry, at a random point of ``lefts`` × ``rights`` products.

    Args:
        geometry: a name, or a `Geometry` of your own.
        m: rows of each left factor.
        n: rows of each right factor.
        r: columns of all of them, at most the smaller of ``m`` and ``n``.
        lefts: left factors.
        rights: right factors.
        retraction: by name, or None for the geometry's default.
        seed: of everything random.
    """
    if not 1 <= r <= min(m, n):
        raise ValueError(f"r must be from 1 to min(m, n) = {min(m, n)}, got {r}")
    if min(lefts, rights) < 1:
        raise ValueError(f"a grid has at least one factor a side, got {lefts} and {rights}")
    if isinstance(geometry, str):
        geometry = geometry_for(geometry, lefts, rights)
    retraction = retraction or geometry.retractions[0]
    if retraction not in geometry.retractions:
        known = ", ".join(geometry.retractions)
        raise ValueError(f"{geometry.name} has no retraction {retraction!r} here; it has {known}")
    with torch.no_grad(), exact_arithmetic(["cpu"]):
        bench = _Bench(geometry, retraction, (lefts, m), (rights, n), r, seed)
        if bench.expected_dimension() == 0:
            raise ValueError("isometries of these shapes are isolated points: nothing to measure")
        slope, tangential = bench.slopes()
        idempotence, adjointness = bench.projection()
        return GeometryReport(
            geometry=geometry.name,
            retraction=retraction,
            retraction_slope=slope,
            tangential_slope=tangential if retraction in _SECOND_ORDER else None,
            projection_idempotence=idempotence,
            projection_self_adjointness=adjointness,
            gauge_invariance=None if retraction == "qr" else bench.gauge_invariance(),
            transport_identity=bench.transport_identity(),
            dimension=bench.dimension(),
            expected_dimension=bench.expected_dimension(),
        )


class _Bench:
    """A geometry at a random point (1, I, m, r), (1, J, n, r), and the experiments on it."""

    def __init__(
        self,
        geometry: Geometry,
        retraction: str,
        left: tuple[int, int],
        right: tuple[int, int],
        r: int,
        seed: int,
    ) -> None:
        self.geometry, self.retraction = geometry, retraction
        self.left, self.right, self.r = left, right, r
        self.generator = torch.Generator().manual_seed(seed)
        orthonormal = Pair(*(torch.linalg.qr(self.random(1, *side, r)).Q for side in (left, right)))
        # Unbalanced, not orthogonal, and well conditioned, where the geometry allows that.
        mix = self.invertible()
        self.point = (
            orthonormal
            if geometry.isometry
            else Pair(orthonormal.left @ mix, 2 * orthonormal.right @ mix.mT)
        )
        self.frame = geometry.frame(self.point)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def invertible(self) -> Tensor:
        """r×r; a rotation for isometries, of condition 2.5 otherwise."""
        one: Tensor
        two: Tensor
        one, two = (torch.linalg.qr(self.random(self.r, self.r)).Q for _ in range(2))
        if self.geometry.isometry:
            return one
        return (one * torch.linspace(0.8, 2.0, self.r, dtype=torch.float64)) @ two

    def ambient(self, batch: int = 1) -> Tensor:
        """Random matrices (batch, I·m, J·n)."""
        return self.random(batch, math.prod(self.left), math.prod(self.right))

    def options(self, lr: float, normalize: str | None = None) -> StepOptions:
        return StepOptions(lr, 0.5, normalize, 2**-23, self.retraction, maximize=False)

    def tangent(self, z: Tensor) -> Pair:
        """The Riemannian gradient of ⟨z, W⟩ at the point, for (batch, I·m, J·n)."""
        point = Pair(*(x.expand(z.shape[0], -1, -1, -1) for x in self.point))
        return self.geometry.gradient(self.geometry.frame(point), _gradients(point, z))

    def slopes(self) -> tuple[float, float]:
        """Orders of the retraction's error, and of its tangent part."""
        geometry, frame, point = self.geometry, self.frame, self.point
        tangent = self.tangent(self.ambient())
        coords = geometry.coordinates(frame, tangent)
        unit = 1 / geometry.metric_norm(frame, coords)
        xi = _dense(geometry, point, tangent) * unit
        start = _product(point)
        whole, inside = [], []
        for t in _STEPS:
            new = geometry.retract(frame, coords, t * unit, self.options(t)).point
            error = _product(new) - start - t * xi
            whole.append(_size(error))
            if isinstance(geometry, EmbeddedGeometry):
                inside.append(_size(_dense(geometry, point, _gradients(point, error))))
            else:
                rest = (x - p - t * unit * y for x, p, y in zip(new, point, tangent, strict=True))
                along = [e - p @ sym(p.mT @ e) for e, p in zip(rest, point, strict=True)]
                inside.append(math.hypot(*map(_size, along)))
        floor = 1e-14 * _size(start)
        return _slope(whole, floor), _slope(inside, floor)

    def projection(self) -> tuple[float, float]:
        """Defects of idempotence and self-adjointness of the geometry's own projection."""
        geometry, frame = self.geometry, self.frame
        project: Callable[[Any], Any]
        if isinstance(geometry, EmbeddedGeometry | IsometryEmbeddedGrid):
            x, y = self.ambient(), self.ambient()

            def project(z: Tensor) -> Tensor:
                return _dense(geometry, self.point, self.tangent(z))

            once = project(x)
            again = _size(project(once) - once) / _size(x)
            apart = ((once * y).sum() - (x * project(y)).sum()).abs().item()
            return again, apart / (_size(x) * _size(y))

        def square(pair: Pair) -> float:
            return geometry.metric_norm(frame, geometry.coordinates(frame, pair)).item() ** 2

        def inner(one: Pair, other: Pair) -> float:
            """The metric, from the norm by polarization."""
            plus = Pair(one.left + other.left, one.right + other.right)
            return (square(plus) - square(_difference(one, other))) / 4

        a, b = (Pair(*map(self.random_like, self.point)) for _ in range(2))
        pa, pb = geometry.arrive(frame, a), geometry.arrive(frame, b)
        again = math.sqrt(square(_difference(geometry.arrive(frame, pa), pa)) / square(a))
        apart = abs(inner(pa, b) - inner(a, pb))
        return again, apart / math.sqrt(square(a) * square(b))

    def random_like(self, x: Tensor) -> Tensor:
        return self.random(*x.shape)

    def gauge_invariance(self) -> float:
        """Three steps with momentum from (A, B) and (A S, B S⁻ᵀ), their distance downstairs."""
        mix = self.invertible()
        other = Pair(self.point.left @ mix, self.point.right @ torch.linalg.inv(mix).mT)
        objectives = [self.ambient() for _ in range(3)]
        ends = []
        for point in (self.point, other):
            momentum: Pair | None = Pair(*map(torch.zeros_like, point))
            for z in objectives:
                options = self.options(0.05, "metric")
                outcome = self.geometry.step(point, _gradients(point, z), momentum, options)
                point, momentum = outcome.point, outcome.momentum
            ends.append(_product(point))
        return _size(ends[0] - ends[1]) / _size(ends[0] - _product(self.point))

    def transport_identity(self) -> float:
        """Relative change of a tangent vector, downstairs, over a step of length zero."""
        geometry, frame = self.geometry, self.frame
        tangent = self.tangent(self.ambient())
        coords = geometry.coordinates(frame, tangent)
        landing = geometry.retract(frame, coords, self.point.left.new_zeros(1), self.options(0.0))
        carried = geometry.arrive(
            geometry.frame(landing.point), geometry.depart(frame, coords, tangent, landing)
        )
        before = _dense(geometry, self.point, tangent)
        return _size(_dense(geometry, landing.point, carried) - before) / _size(before)

    def expected_dimension(self) -> int:
        r = self.r
        if not self.geometry.isometry:
            return r * (math.prod(self.left) + math.prod(self.right) - r)
        (lefts, m), (rights, n) = self.left, self.right
        factors = lefts * m * r + rights * n * r - (lefts + rights) * r * (r + 1) // 2
        return factors - r * (r - 1) // 2

    def dimension(self) -> int:
        """Rank of the Gram matrix of more random tangent vectors than there should be room for."""
        count = self.expected_dimension() + _SPARE
        point = Pair(*(x.expand(count, -1, -1, -1) for x in self.point))
        vectors = _dense(self.geometry, point, self.tangent(self.ambient(count))).flatten(1)
        values = torch.linalg.eigvalsh(vectors @ vectors.mT)
        return int((values > _RANK_CUTOFF * values[-1]).sum())


def _gradients(point: Pair, z: Tensor) -> Pair:
    """Factor gradients (Z B, Zᵀ A) of ⟨Z, W⟩, for Z (batch, I·m, J·n)."""
    left = z @ flatten_blocks(point.right)
    right = z.mT @ flatten_blocks(point.left)
    return Pair(left.view(point.left.shape), right.view(point.right.shape))


def _product(point: Pair) -> Tensor:
    """The stacked W (batch, I·m, J·n)."""
    return flatten_blocks(point.left) @ flatten_blocks(point.right).mT


def _dense(geometry: Geometry, point: Pair, tangent: Pair) -> Tensor:
    """The tangent matrix downstairs, (batch, I·m, J·n), from the geometry's coordinates."""
    if isinstance(geometry, EmbeddedGeometry):
        return geometry.matrix(geometry.coordinates(geometry.frame(point), tangent))
    left, right = (flatten_blocks(x) for x in tangent)
    return left @ flatten_blocks(point.right).mT + flatten_blocks(point.left) @ right.mT


def _difference(one: Pair, other: Pair) -> Pair:
    return Pair(one.left - other.left, one.right - other.right)


def _size(x: Tensor) -> float:
    return x.square().sum().sqrt().item()


def _slope(errors: list[float], floor: float) -> float:
    """Exponent of t between the two steps; inf where the errors are rounding."""
    if max(errors) <= floor:
        return math.inf
    large, small = (max(error, floor) for error in errors)
    return math.log(large / small) / math.log(_STEPS[0] / _STEPS[1])
