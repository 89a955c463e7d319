"""Whitened steps that go past singular values, or rows, of one size: against their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD, recommended
from rankfold.geometries import Pair
from rankfold.whitening import TILTS, Manner, _power, whiten

from .points import GRIDS, Case, stacked
from .schatten_cases import raised, step_direction
from .test_whitened import SHAPES, parts, projector

MANNERS = [(0.0, 0.5), (0.25, 0.0), (1.0, 0.0), (0.125, 1.0), (0.5, 0.25)]
RIDGE = 2.0**-16  # added to shares of squares, of singular values and of rows


def tilted(x: Tensor, r: int, tilt: float, balance: float) -> Tensor:
    """The direction of each ``x`` (..., m, n) of rank r."""
    squares = x.square().sum(-1, keepdim=True)
    weights = (squares / squares.amax(-2, keepdim=True) + RIDGE) ** (-balance / 2)
    u, s, vh = torch.linalg.svd(weights * x, full_matrices=False)
    u, s, vh = u[..., :r], s[..., :r], vh[..., :r, :]
    share = s.square() / s.square().sum(-1, keepdim=True)
    whole = raised(share)
    values = whole.sqrt() * (share + RIDGE) ** (-tilt / 2)
    made = weights * ((u * values[..., None, :]) @ vh)
    length = whole.sum(-1)[..., None, None].sqrt()
    return made * length / torch.linalg.matrix_norm(made, keepdim=True)


@pytest.mark.parametrize(("tilt", "balance"), MANNERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grid", GRIDS)
def test_from_the_definition(
    grid: tuple[int, int], shape: tuple[int, int], tilt: float, balance: float
) -> None:
    quotient, embedded = (Case(f"fixed-{x}", *grid, *shape, 3, 5) for x in ("quotient", "embedded"))
    point = quotient.point()
    z, grad = quotient.ambient(point, 10)
    a, b = stacked(point.left), stacked(point.right)
    rows = (z @ projector(b)).unflatten(1, (quotient.lefts, quotient.m))
    columns = (projector(a) @ z).unflatten(2, (quotient.rights, quotient.n)).permute(0, 2, 3, 1)
    left = math.sqrt(quotient.rights) * tilted(rows, 3, tilt, balance).flatten(1, 2)
    right = math.sqrt(quotient.lefts) * tilted(columns, 3, tilt, balance).flatten(1, 2).mT
    told = {"tilt": tilt, "row_balance": balance}
    moved, _ = step_direction(quotient, point, grad, "whitened", **told)
    for found, wanted in zip(parts(point, moved), (left, right), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    _, matrix = step_direction(embedded, point, grad, "whitened", **told)
    torch.testing.assert_close(matrix, left + right, atol=4e-5, rtol=0)


def spread(rows: int, dtype: torch.dtype) -> Tensor:
    """Singular values and rows of very different sizes, (2, 3, rows, 8)."""
    generator = torch.Generator().manual_seed(4)
    u, v = (
        torch.linalg.qr(torch.randn(2, 3, m, 8, generator=generator, dtype=torch.float64)).Q
        for m in (rows, 8)
    )
    sizes = 10 ** torch.linspace(0, -2, rows, dtype=torch.float64)[:, None]
    return (sizes * ((u * 2.0 ** -torch.linspace(0, 6, 8, dtype=torch.float64)) @ v.mT)).to(dtype)


@pytest.mark.parametrize("tilt", TILTS)
@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_in_float32(tilt: float, balance: float) -> None:
    x = spread(300, torch.float32)
    made, squares = [], []
    for each in (x, x.double()):
        rows, turn, found = whiten(each, None, 2, Manner(2.0**-23, tilt, balance))
        made.append((rows @ turn).double())
        squares.append(found.double())
        torch.testing.assert_close(
            found.double(), made[-1].square().sum((-2, -1)), rtol=1e-4, atol=0
        )
    worst = (made[0] - made[1]).flatten(2).norm(dim=-1) / made[1].flatten(2).norm(dim=-1)
    assert worst.max() < 2e-3
    torch.testing.assert_close(squares[0], squares[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("tilt", TILTS)
@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "rank", "columns"), [(64, 3, 8), (64, 1, 4), (300, 10, 64)])
def test_gradients_of_lower_rank(
    rows: int, rank: int, columns: int, tilt: float, balance: float
) -> None:
    """As of few samples: all that a Gram matrix in float32 has of the rest is rounding."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(20, 1, rows, rank, generator=generator)
    x = left @ torch.randn(20, 1, rank, columns, generator=generator)
    made = []
    # What of a product is rounding is raised 2¹²-fold, and by a tilt up to 2⁸ times more.
    rounding = 2.0**-22 * 2 ** (12 + 8 * tilt)
    for each in (x, x.double()):
        found = whiten(each, None, 2, Manner(2.0**-23, tilt, balance))
        made.append((found.rows @ found.turn).double())
        length = made[-1].square().sum((-2, -1))
        torch.testing.assert_close(length, found.squares.double(), rtol=rounding, atol=0)
    off = (made[0] - made[1]).flatten(1).norm(dim=1) / made[1].flatten(1).norm(dim=1)
    assert off.max() < 2 * rounding


@pytest.mark.parametrize("tilt", [0.125, 0.25, 0.5])
def test_powers_lose_little_to_rounding(tilt: float) -> None:
    """Less than begun at the ridge of their roots, from where rounding grows with every step."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(20, 64, 64, generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(noise).Q
    values = 2.0 ** -torch.linspace(0, 8, 64, dtype=torch.float64)
    found = _power(((vectors * values) @ vectors.mT).float(), tilt).double()
    off = torch.linalg.matrix_norm(found - (vectors * values**tilt) @ vectors.mT, 2)
    assert off.max() < 50 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("geometry", ["fixed-quotient", "fixed-embedded"])
def test_steps_of_few_samples(geometry: str) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (nn.Parameter(torch.randn(64, 8, generator=generator)) for _ in range(2))
    optimizer = recommended([Grid(left, right)], geometry=geometry)
    for _ in range(10):
        x = torch.randn(3, 64, generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward((x @ right @ left.mT).square().sum())
        before = left.detach().clone()
        optimizer.step()
        assert not torch.equal(left, before)
    assert optimizer.counts() == {}


@pytest.mark.parametrize("tilt", TILTS)
def test_a_turn_is_made_before(tilt: float) -> None:
    """Of rows as they are after it."""
    x, manner = spread(40, torch.float64), Manner(2.0**-23, tilt, 0.5)
    turn = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    one, other = whiten(x, turn, 1, manner), whiten(x @ turn, None, 1, manner)
    torch.testing.assert_close(one.rows @ one.turn, other.rows @ other.turn)


def test_rows_of_zeros_change_nothing() -> None:
    x, manner = spread(40, torch.float64), Manner(2.0**-23, 0.25, 1.0)
    padded = torch.cat([x, torch.zeros(2, 3, 9, 8).double()], 2)
    one, other = (whiten(each, None, 1, manner) for each in (x, padded))
    torch.testing.assert_close(one.turn, other.turn)
    assert not (other.rows @ other.turn)[:, :, 40:].any()


def test_zero_stays_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        found = whiten(torch.zeros(2, 1, 5, 4, dtype=dtype), None, 1, Manner(1e-6, 0.25, 1.0))
        assert found.turn.isfinite().all()
        assert not found.squares.any()
        assert not (found.rows @ found.turn).any()


def moved(geometry: str, gauge: Tensor, **options: Any) -> Tensor:
    """What three steps add to a product whose factors are written in a gauge."""
    generator = torch.Generator().manual_seed(0)
    left, right, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((9, 3), (7, 3), (9, 7))
    )
    pair = Pair(nn.Parameter(left @ gauge), nn.Parameter(right @ torch.linalg.inv(gauge).mT))
    optimizer = RiemannianSGD(Grid(*pair), 0.05, geometry=geometry, momentum=0.8, **options)
    before = (pair.left @ pair.right.mT).detach()
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward((pair.left @ pair.right.mT - target).square().sum())
        optimizer.step()
    return (pair.left @ pair.right.mT).detach() - before


@pytest.mark.parametrize("geometry", ["fixed-quotient", "fixed-embedded"])
def test_no_gauge_is_seen(geometry: str) -> None:
    eye = torch.eye(3, dtype=torch.float64)
    gauge = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.1, 0.3], [1.0, 0.0, 5.0]], dtype=torch.float64)
    told = {"normalize": "whitened", "tilt": 0.25, "row_balance": 0.5, "nesterov": True}
    one, other = moved(geometry, eye, **told), moved(geometry, gauge, **told)
    assert (one - other).norm() < 1e-9 * one.norm()
    plain = moved(geometry, eye, normalize="whitened", nesterov=True)
    assert (one - plain).norm() > 0.05 * one.norm()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    "told", [{"tilt": 0.25}, {"row_balance": 0.5}, {"tilt": 1, "row_balance": 1}]
)
@pytest.mark.parametrize("geometry", ["fixed-quotient", "fixed-embedded"])
@pytest.mark.parametrize("tilted", [(True, False, True), (False, False, False)])
def test_grids_that_go_without_it(
    tilted: tuple[bool, ...], geometry: str, told: dict[str, float], capturable: bool
) -> None:
    """In one stack with the others, as they would go in an optimizer of their own."""

    def factors() -> list[tuple[nn.Parameter, nn.Parameter]]:
        generator = torch.Generator().manual_seed(11)
        made = torch.randn(len(tilted), 2, 12, 4, generator=generator, dtype=torch.float64)
        return [(nn.Parameter(a.clone()), nn.Parameter(b.clone())) for a, b in made]

    def optimizer(grids: list[Grid], **options: Any) -> RiemannianSGD:
        lr = torch.tensor(0.1, dtype=torch.float64) if capturable else 0.1
        options |= {"geometry": geometry, "momentum": 0.5, "capturable": capturable}
        return RiemannianSGD(grids, lr, normalize="whitened", **options)

    together, apart = factors(), factors()
    grids = [Grid(a, b, tilted=on) for (a, b), on in zip(together, tilted, strict=True)]
    one = optimizer(grids, **told)
    alone = [
        optimizer([Grid(a, b)], **(told if on else {}))
        for (a, b), on in zip(apart, tilted, strict=True)
    ]
    for step in range(3):
        for pairs, optimizers in ((together, [one]), (apart, alone)):
            for k, (a, b) in enumerate(pairs):
                generator = torch.Generator().manual_seed(7 * step + k)
                z = torch.randn(12, 12, generator=generator, dtype=torch.float64)
                a.grad, b.grad = z @ b.detach(), z.mT @ a.detach()
            for each in optimizers:
                each.step()
    ((joint,),) = one._plans.values()
    assert len(joint.plan.stacks) == 1
    for pair, other in zip(together, apart, strict=True):
        torch.testing.assert_close(pair, other, atol=1e-12, rtol=0)
