"""Grids with a rate of their own: their learning rate is that many times their group's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Factor, Grid, RiemannianSGD, recommended
from rankfold.geometries.course import _spread

from .parts import CASES, Parts
from .reference import GEOMETRIES
from .toys import WIDE, orthonormal

SHARES = (1.0, 4.0, 0.5)
LR = 0.02


def rated(parts: Parts, lr: float | Tensor, **options: Any) -> RiemannianSGD:
    """All parts in one group, each at its share."""
    grids = []
    for part, share in zip(parts, SHARES, strict=True):
        for grid in part.grids():
            grid.rate = share
            grids.append(grid)
    return RiemannianSGD(grids, lr, **options)


def assert_same(ours: Parts, theirs: Parts) -> None:
    for x, y in zip(ours.params(), theirs.params(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("geometry", "options"), [(g, o) for g, _, o in CASES], ids=[f"{g}-{n}" for g, n, _ in CASES]
)
def test_as_groups_with_learning_rates_of_their_own(geometry: str, options: dict[str, Any]) -> None:
    ours, theirs = Parts(3), Parts(3)
    one = rated(ours, LR, geometry=geometry, **options)
    other = theirs.together([share * LR for share in SHARES], geometry=geometry, **options)
    for step in range(4):
        for optimizer, parts in ((one, ours), (other, theirs)):
            parts.backward(step)
            optimizer.step()
            for group in optimizer.param_groups:  # as a scheduler does
                group["lr"] *= 0.8
        assert_same(ours, theirs)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_tensors_are_read_where_they_are(geometry: str) -> None:
    ours, theirs = Parts(3), Parts(3)
    lr = torch.tensor(LR, dtype=WIDE)
    one = rated(ours, lr, geometry=geometry, momentum=0.9, capturable=True)
    rates = [share * lr for share in SHARES]
    other = theirs.together(rates, geometry=geometry, momentum=0.9, capturable=True)
    for step in range(3):
        for parts, optimizer in ((ours, one), (theirs, other)):
            parts.backward(step)
            optimizer.step()
        assert_same(ours, theirs)
        for rate in (lr, *rates):
            rate.mul_(0.7)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_two_kinds_of_products_in_one_weight(geometry: str) -> None:
    """As fused projections have them, which must be in one group."""
    moved = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        q, k, v, o = (orthonormal(6, 4, generator) for _ in range(4))
        out = nn.Parameter(o)
        if fused:
            weight = nn.Parameter(torch.cat([q, k, v], 1))
            thirds = [Factor(weight, rank=4, start=4 * i) for i in range(3)]
            grids = [Grid(thirds[0], thirds[1], name="qk"), Grid(out, thirds[2], name="vo", rate=3)]
            optimizers = [RiemannianSGD(grids, LR, geometry=geometry, momentum=0.5)]
        else:
            weights = [nn.Parameter(x) for x in (q, k, v)]
            pairs = ((Grid(weights[0], weights[1]), LR), (Grid(out, weights[2]), 3 * LR))
            optimizers = [RiemannianSGD(g, lr, geometry=geometry, momentum=0.5) for g, lr in pairs]
        for _ in range(3):
            parts = weight.split(4, 1) if fused else weights
            loss = sum(
                (a @ b.mT * torch.arange(36.0).view(6, 6).cos()).sum()
                for a, b in ((parts[0], parts[1]), (out, parts[2]))
            )
            assert isinstance(loss, Tensor)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        parts = weight.split(4, 1) if fused else weights
        moved.append([x.detach().clone() for x in (*parts, out)])
    for x, y in zip(*moved, strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)


def test_a_rate_that_changes_is_followed_and_zero_stays() -> None:
    parts = Parts(3)
    optimizer = rated(parts, LR, geometry="fixed-quotient")
    before = [p.detach().clone() for p in parts.params()]
    for grid in optimizer.param_groups[0]["grids"]:
        grid.rate = 0.0
    parts.backward(0)
    optimizer.step()
    for x, y in zip(before, parts.params(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-15, rtol=0)
    for grid in optimizer.param_groups[0]["grids"]:
        grid.rate = 1.0
    optimizer.step()
    assert all((x - y).norm() > 1e-4 for x, y in zip(before, parts.params(), strict=True))


def test_what_cannot_be() -> None:
    a, b = (nn.Parameter(torch.eye(4)[:, :2] + 0.1) for _ in range(2))
    for rate in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="'pair': rate must be finite and not negative"):
            Grid(a, b, name="pair", rate=rate)
        pair = Grid(a, b, name="pair")
        with pytest.raises(ValueError, match="'pair': rate must be finite and not negative"):
            pair.rate = rate
        with pytest.raises(ValueError, match=r"'pair\.vo': rate must be finite and not negative"):
            recommended(Grid(a, b, name="pair.vo"), vo_rate=rate)
    grid = Grid(a, b, rate=50.0)
    assert "rate=50" in repr(grid)
    options: dict[str, Any] = {"geometry": "fixed-quotient", "weight_decay": 0.3}
    too_fast = r"lr times weight_decay must be below 1.*5\.0 · 0\.3"
    with pytest.raises(ValueError, match=too_fast):
        RiemannianSGD(grid, 0.1, **options)
    optimizer = RiemannianSGD(grid, 0.05, **options)
    optimizer.param_groups[0]["lr"] = 0.1
    a.grad = b.grad = torch.ones_like(a)
    with pytest.raises(ValueError, match=too_fast):
        optimizer.step()


def test_weight_decay_goes_by_what_a_grid_takes() -> None:
    a, b = (nn.Parameter(torch.eye(4)[:, :2] + 0.1) for _ in range(2))
    grid = Grid(a, b, rate=0.1)
    optimizer = RiemannianSGD(grid, 5.0, geometry="fixed-quotient", weight_decay=0.3)
    before = (a @ b.mT).detach()
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    optimizer.step()
    torch.testing.assert_close((a @ b.mT).detach(), (1 - 0.1 * 5.0 * 0.3) * before)


def test_a_rate_on_the_host_serves_members_elsewhere() -> None:
    """As a 0-dim tensor that no graph is to record; on the meta device no mix goes unnoticed."""
    elsewhere = torch.empty(3, 1, 2, 2, device="meta")
    for lr in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        found = _spread(lr, 3, elsewhere)
        assert (found.shape, found.device.type, found.dtype) == ((3,), "meta", torch.float32)
        here = _spread(lr, 3, torch.empty(3, 1, 2, 2))
        assert torch.equal(here, torch.full((3,), 0.5))
