"""check_geometry: every geometry passes, and a broken one fails on the right number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold.diagnostics import check_geometry
from rankfold.geometries import GEOMETRIES, Geometry, Pair, geometry_for
from rankfold.geometries.fixed_embedded import FixedEmbedded
from rankfold.geometries.fixed_quotient import FixedQuotient
from rankfold.geometries.isometry_embedded import IsometryEmbedded, IsometryEmbeddedGrid
from rankfold.geometries.isometry_quotient import IsometryQuotient
from rankfold.linalg import sym

from .points import stacked
from .toys import saying

SHAPES = [(1, 1), (2, 3)]
every_geometry = pytest.mark.parametrize("name", GEOMETRIES)


@pytest.mark.parametrize(
    ("name", "grid", "retraction"),
    [
        (name, grid, retraction)
        for name in GEOMETRIES
        for grid in SHAPES
        for retraction in geometry_for(name, *grid).retractions
    ],
)
def test_every_geometry_passes(name: str, grid: tuple[int, int], retraction: str) -> None:
    lefts, rights = grid
    for m, n, r in ((7, 5, 3), (4, 4, 4), (3, 2, 1)):
        report = check_geometry(
            name, m=m, n=n, r=r, lefts=lefts, rights=rights, retraction=retraction, seed=r
        )
        assert report.ok, str(report)
        rows = [m] * lefts + [n] * rights
        if name.startswith("fixed"):
            expected = r * (sum(rows) - r)
        else:
            expected = sum(k * r - r * (r + 1) // 2 for k in rows) - r * (r - 1) // 2
        assert report.dimension == report.expected_dimension == expected
        assert (report.gauge_invariance is None) == (retraction == "qr")
        assert (report.tangential_slope is None) == (retraction in ("qr", "additive"))
    assert "WRONG" not in str(report)


def test_reports_differ_with_the_seed_and_not_without() -> None:
    assert check_geometry("fixed-quotient") == check_geometry("fixed-quotient")
    assert check_geometry("fixed-quotient", seed=1) != check_geometry("fixed-quotient")


class TooShort(FixedEmbedded):
    """A retraction that moves 1% less than asked."""

    def retract(self, frame: Any, coords: Any, scale: Tensor, options: Any) -> Any:
        return super().retract(frame, coords, 0.99 * scale, options)


class FirstOrder(IsometryQuotient):
    """A qr retraction that calls itself polar, so that it is neither second order nor free."""

    def retract(self, frame: Any, coords: Any, scale: Tensor, options: Any) -> Any:
        return super().retract(frame, coords, scale, replace(options, retraction="qr"))


class HalfProjected(FixedQuotient):
    """A horizontal projection that removes only half of the vertical part."""

    def arrive(self, frame: Any, momentum: Pair, *, given: bool = False) -> Pair:
        whole = super().arrive(frame, momentum)
        return Pair(*((x + y) / 2 for x, y in zip(whole, momentum, strict=True)))


class Oblique(FixedQuotient):
    """A projection onto the horizontal space along the wrong complement."""

    def arrive(self, frame: Any, momentum: Pair, *, given: bool = False) -> Pair:
        whole = super().arrive(frame, momentum)
        gone = momentum.left - whole.left
        # What the projection removes is turned into more of a fixed horizontal vector.
        fixed = super().arrive(frame, Pair(*map(torch.ones_like, momentum)))
        amount = gone.sum()
        return Pair(whole.left + amount * fixed.left, whole.right + amount * fixed.right)


class Euclidean(FixedQuotient):
    """The gradient in the factors: horizontal nowhere, and dependent on the gauge."""

    mix = Geometry.mix

    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        return self.arrive(frame, grad)


class Forgetful(IsometryEmbedded):
    """A transport that loses 1% of the momentum."""

    def depart(self, frame: Any, coords: Any, tangent: Pair, landing: Any) -> Pair:
        kept = super().depart(frame, coords, tangent, landing)
        return Pair(0.99 * kept.left, 0.99 * kept.right)


class Frozen(IsometryEmbeddedGrid):
    """A gradient that never moves the first left factor's orthogonal part."""

    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        left = grad.left.clone()
        u = frame.point.left[:, 0]
        left[:, 0] = u @ (u.mT @ left[:, 0])
        return super().gradient(frame, Pair(left, grad.right))


class NotSkew(IsometryEmbedded):
    """Coordinates that keep the symmetric part: the tangent space of another manifold."""

    def coordinates(self, frame: Any, tangent: Pair) -> Any:
        found = super().coordinates(frame, tangent)
        overlap = sym(frame.left.mT @ stacked(tangent.left))
        return found._replace(k=found.k + overlap)


@pytest.mark.parametrize(
    ("broken", "grid", "numbers"),
    [
        (TooShort(), (1, 1), {"retraction_slope", "tangential_slope"}),
        (FirstOrder(), (1, 2), {"tangential_slope", "gauge_invariance"}),
        (HalfProjected(), (2, 1), {"projection_idempotence"}),
        (Oblique(), (1, 1), {"projection_self_adjointness", "gauge_invariance"}),
        (Euclidean(), (1, 1), {"gauge_invariance"}),
        (Forgetful(), (1, 1), {"transport_identity"}),
        (Frozen(), (2, 2), {"dimension"}),
        (NotSkew(), (1, 1), {"dimension", "retraction_slope"}),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Geometry) else None,
)
def test_a_broken_geometry_fails_on_the_right_number(
    broken: Geometry, grid: tuple[int, int], numbers: set[str]
) -> None:
    report = check_geometry(broken, lefts=grid[0], rights=grid[1])
    wrong = {name for name, fine in report.verdicts().items() if not fine}
    assert not report.ok
    assert numbers <= wrong, str(report)
    if len(numbers) == 1:
        assert wrong == numbers, str(report)
    lines = [line for line in str(report).splitlines() if line.endswith("WRONG")]
    assert len(lines) == len(wrong) + 1
    assert check_geometry(broken.name, lefts=grid[0], rights=grid[1]).ok


def test_check_geometry_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="unknown geometry 'flat'"):
        check_geometry("flat")
    with pytest.raises(ValueError, match=saying("no retraction 'qr'", "svd, orthographic")):
        check_geometry("fixed-embedded", retraction="qr")
    with pytest.raises(ValueError, match=saying("min(m, n) = 2", "got 3")):
        check_geometry("fixed-embedded", m=2)
    with pytest.raises(ValueError, match="isolated points"):
        check_geometry("isometry-quotient", m=1, n=1, r=1)
