"""Trust regions: no step is longer than what its retraction is certain to bear.

The bounds are recomputed here from dense matrices and their singular values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD
from rankfold.geometries import Geometry, Pair, geometry_for

from .points import Case, blocks_of, dense, options, product, stacked
from .reference import FIXED, GEOMETRIES
from .toys import Toy, same_bits, train

BOUNDED = [("isometry-embedded", (1, 1))] + [
    (n, g) for n in FIXED for g in ((1, 1), (4, 1), (2, 3))
]
BOUNDED_METHODS = [(n, g, r) for n, g in BOUNDED for r in geometry_for(n, *g).retractions]


def smallest(x: Tensor, rank: int) -> Tensor:
    return torch.linalg.svdvals(x)[..., rank - 1]


def embedded_share(case: Case, point: Pair, tangent: Pair, scale: Tensor) -> Tensor:
    """‖Ξ‖₂ over sS/(s + S): s the smallest σ_r of a block, S that of the stacked matrix."""
    w = product(point)
    blocks = [point.left[:, i] @ point.right[:, j].mT for i, j in blocks_of(point)]
    s = torch.stack([smallest(x, case.r) for x in blocks]).amin(0)
    whole = smallest(w, case.r)
    length = scale.abs() * torch.linalg.matrix_norm(dense(case.geometry, point, tangent), ord=2)
    return length / (s * whole / (s + whole))


def quotient_share(case: Case, point: Pair, tangent: Pair, scale: Tensor) -> Tensor:
    """The largest ‖A_i⁺Ξ_Ai‖₂ or ‖B_j⁺Ξ_Bj‖₂."""
    sizes = [
        torch.linalg.matrix_norm(torch.linalg.pinv(x) @ xi, ord=2).amax(1)
        for x, xi in zip(point, tangent, strict=True)
    ]
    return scale.abs() * torch.maximum(*sizes)


def isometry_share(case: Case, point: Pair, tangent: Pair, scale: Tensor) -> Tensor:
    """‖Ξ‖₂, which may be anything below 1."""
    return scale.abs() * torch.linalg.matrix_norm(dense(case.geometry, point, tangent), ord=2)


SHARES: dict[str, Callable[[Case, Pair, Pair, Tensor], Tensor]] = {
    "fixed-embedded": embedded_share,
    "fixed-quotient": quotient_share,
    "isometry-embedded": isometry_share,
}


def uneven(case: Case) -> Pair:
    """A point whose blocks differ in size, so that the smallest of them decides."""
    point = case.point()
    if case.geometry.isometry:
        return point
    left, right = (x.clone() for x in point)
    left[:, -1] *= 0.3
    right[:, 0] *= 0.5
    return Pair(left, right)


@pytest.mark.parametrize("normalize", ["metric", "spectral", None])
@pytest.mark.parametrize("trust_region", [0.5, 1.0])
@pytest.mark.parametrize(("name", "grid", "retraction"), BOUNDED_METHODS)
def test_a_long_step_is_cut_to_its_share_of_the_bound(
    name: str,
    grid: tuple[int, int],
    retraction: str,
    trust_region: float,
    normalize: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(name, *grid, 7, 6, 3, seed=1)
    geometry, point = case.geometry, uneven(case)
    _, grad = case.ambient(point, 10)
    taken: list[Tensor] = []
    retract = type(geometry).retract

    def spying(self: Geometry, frame: Any, coords: Any, scale: Tensor, told: Any) -> Any:
        taken.append(scale)
        return retract(self, frame, coords, scale, told)

    monkeypatch.setattr(type(geometry), "retract", spying)
    told = options(retraction, 100.0, normalize=normalize, trust_region=trust_region)
    outcome = geometry.step(point, grad, None, told)
    after, events = outcome.point, outcome.events
    tangent = geometry.gradient(geometry.frame(point), grad)
    share = SHARES[name](case, point, tangent, taken[0]) / trust_region
    assert events["clipped"].tolist() == [True, True]
    assert not events["skipped"].any()
    assert (taken[0] < 0).all()  # still downhill
    assert (share <= 1 + 1e-9).all()
    assert (share > 0.97).all()  # the bound itself, not something far below it
    if trust_region < 1:
        for i, j in blocks_of(after):
            values = torch.linalg.svdvals(after.left[:, i] @ after.right[:, j].mT)[:, : case.r]
            assert (values[:, -1] > 1e-3 * values[:, 0]).all()
    if name != "isometry-embedded":
        # Without it, the same step is many times too long.
        geometry.step(point, grad, None, options(retraction, 100.0, normalize=normalize))
        assert (SHARES[name](case, point, tangent, taken[1]) > 10).all()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_short_steps_are_not_cut(geometry: str) -> None:
    """To the bit, and uphill alike."""
    for maximize in (False, True):
        runs = []
        for trust_region in (None, 0.5):
            model = Toy()
            optimizer = RiemannianSGD(
                model.grids(),
                1e-3,
                geometry=geometry,
                momentum=0.9,
                trust_region=trust_region,
                maximize=maximize,
            )
            train(model, optimizer, range(4))
            assert optimizer.counts() == {}
            runs.append(list(model.parameters()))
        assert same_bits(*runs)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_cut_steps_are_counted(geometry: str, maximize: bool) -> None:
    model = Toy()
    optimizer = RiemannianSGD(
        model.grids(), 50.0, geometry=geometry, trust_region=0.5, maximize=maximize
    )
    train(model, optimizer, range(3))
    clipped = {member for member, c in optimizer.counts().items() if c.get("clipped") == 3}
    grids = {"pair[0]", "heads[0]", "heads[1]"}
    # Polar and QR retractions are defined for every step, and have nothing to cut.
    bounded = {"isometry-embedded": {"pair[0]"}} | dict.fromkeys(FIXED, grids)
    assert clipped == bounded.get(geometry, set())


@pytest.mark.parametrize("geometry", FIXED)
def test_one_member_is_cut_and_the_others_are_not(geometry: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, n, 2, generator=generator, dtype=torch.float64) for n in (7, 6))
    z = 1e-3 * torch.randn(4, 7, 6, generator=generator, dtype=torch.float64)
    z[2] *= 1e6
    ends = []
    for trust_region in (None, 0.5):
        left, right = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        left.grad, right.grad = z @ b, z.mT @ a
        optimizer = RiemannianSGD(
            [Grid(left, right, groups=4, name="w")],
            1.0,
            geometry=geometry,
            normalize=None,
            trust_region=trust_region,
        )
        optimizer.step()
        ends.append((left.detach(), right.detach()))
    assert {m for m, c in optimizer.counts().items() if "clipped" in c} == {"w[2]"}
    others = [0, 1, 3]
    assert same_bits(*([x[others] for x in end] for end in ends))
    assert stacked(ends[0][0][None]).norm() > 3 * stacked(ends[1][0][None]).norm()


@pytest.mark.parametrize("geometry", ["fixed-quotient", "fixed-embedded"])
def test_damped_factors_leave_zero(geometry: str) -> None:
    """Of B = 0 no step keeps the rank, but one that is damped has a length all the same."""
    generator = torch.Generator().manual_seed(0)
    a = nn.Parameter(torch.randn(8, 2, generator=generator))
    b = nn.Parameter(torch.zeros(6, 2))
    target = torch.randn(8, 6, generator=generator)
    grid = Grid(a, b)
    optimizer = RiemannianSGD(grid, 0.1, geometry=geometry, damping=1e-3, trust_region=0.5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (a @ b.mT - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not any("skipped" in events for events in optimizer.counts().values())
    assert losses[-1] < 0.9 * losses[0]
