"""Grids whose left and right factors go by rates of their own in a whitened step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import Grid, RiemannianSGD
from rankfold.geometries import Sides

from .parts import Parts
from .points import GRIDS, Case
from .reference import FIXED, GEOMETRIES
from .schatten_cases import step_direction
from .test_whitened import exact_parts, one_factor

LR = 0.02
BOTH = (0.5, 1.0)
WHITENED: dict[str, Any] = {"normalize": "whitened", "momentum": 0.8, "nesterov": True}


def sides(left: tuple[float, float], right: tuple[float, float]) -> Sides:
    """Of the two members of a case."""
    return Sides(torch.tensor(left).double(), torch.tensor(right).double())


@pytest.mark.parametrize("shape", [(6, 5), (3, 5), (3, 3)])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", FIXED)
def test_parts_of_fixed_rank_from_the_definition(
    name: str, grid: tuple[int, int], shape: tuple[int, int]
) -> None:
    case = Case(name, *grid, *shape, 3, 5)
    point = case.point()
    z, grad = case.ambient(point, 10)
    told = sides((1.0, 0.25), (0.5, 1.0))
    _, matrix = step_direction(case, point, grad, "whitened", sides=told)
    parts = exact_parts(case, point, z)
    wanted = sum(side[:, None, None] * part for side, part in zip(told, parts, strict=True))
    torch.testing.assert_close(matrix, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_step_is_the_sum_of_its_sides(name: str, grid: tuple[int, int]) -> None:
    case = Case(name, *grid, 6, 5, 3, 5)
    point = case.point()
    _, grad = case.ambient(point, 10)

    def along(told: Sides | None) -> Tensor:
        return step_direction(case, point, grad, "whitened", sides=told)[1]

    left, right = along(sides((1, 1), (0, 0))), along(sides((0, 0), (1, 1)))
    assert min(x.norm() for x in (*left, *right)) > 0.5
    torch.testing.assert_close(left + right, along(None), atol=1e-12, rtol=0)
    mixed = along(sides((1.0, 0.25), (0.5, 1.0)))
    torch.testing.assert_close(mixed[0], left[0] + 0.5 * right[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(mixed[1], 0.25 * left[1] + right[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", [g for g in GEOMETRIES if g not in FIXED])
def test_one_side_of_an_isometry_moves_alone(name: str, side: int) -> None:
    case = Case(name, 1, 1, 6, 5, 3, 7)
    point = case.point()
    _, grad = case.ambient(point, 10)
    told = sides((1, 1), (0, 0)) if side == 0 else sides((0, 0), (1, 1))
    _, matrix = step_direction(case, point, grad, "whitened", sides=told)
    for k in range(2):
        basis = one_factor(case, point, side, 0, k)
        moved = matrix[k].flatten()
        torch.testing.assert_close(basis @ (basis.mT @ moved), moved, atol=1e-9, rtol=0)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_grids_of_several_sides_as_if_each_were_alone(geometry: str, capturable: bool) -> None:
    """In one stack, with rates of their own, and sides of any size."""
    given = ((1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (0.5, 0.2, 1.0))  # rate, left, right
    ours, theirs = Parts(3), Parts(3)
    options = {**WHITENED, "geometry": geometry, "capturable": capturable}

    def lr() -> Any:
        return torch.tensor(LR, dtype=torch.float64) if capturable else LR

    def grids(part: Any, rate: float, left: float, right: float) -> list[Grid]:
        found: list[Grid] = part.grids()
        for grid in found:
            grid.rate, grid.sides = rate, (left, right)
        return found

    told = list(zip(ours, given, strict=True))
    one = RiemannianSGD([g for part, x in told for g in grids(part, *x)], lr(), **options)
    several = [
        RiemannianSGD(grids(part, *x), lr(), **options)
        for part, x in zip(theirs, given, strict=True)
    ]
    for step in range(4):
        for parts, optimizers in ((ours, [one]), (theirs, several)):
            parts.backward(step)
            for optimizer in optimizers:
                optimizer.step()
    for x, y in zip(ours.params(), theirs.params(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)


def pair(**options: Any) -> tuple[Grid, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = (
        nn.Parameter(torch.randn(m, 3, generator=generator, dtype=torch.float64)) for m in (7, 5)
    )
    z = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    a.grad, b.grad = z @ b.detach(), z.mT @ a.detach()
    return Grid(a, b, name="pair", **options), a, b


@pytest.mark.parametrize("geometry", FIXED)
def test_equal_sides_are_a_rate(geometry: str) -> None:
    moved = []
    for options in ({"rate": 3.0}, {"rate": 1.5, "sides": (2.0, 2.0)}):
        grid, a, b = pair(**options)
        RiemannianSGD(grid, LR, geometry=geometry, normalize="whitened").step()
        moved.append((a @ b.mT).detach())
    torch.testing.assert_close(*moved, atol=1e-14, rtol=0)


def test_a_side_of_zero_stays_and_sides_may_change() -> None:
    grid, a, b = pair(sides=(0.0, 1.0))
    optimizer = RiemannianSGD(grid, LR, geometry="fixed-quotient", normalize="whitened")
    before = a.detach().clone(), b.detach().clone()
    optimizer.step()
    assert torch.equal(a, before[0])
    assert (b - before[1]).norm() > 1e-3
    grid.sides = (1.0, 0.0)
    before = a.detach().clone(), b.detach().clone()
    optimizer.step()
    assert torch.equal(b, before[1])
    assert (a - before[0]).norm() > 1e-3


def test_weight_decay_goes_by_the_faster_side() -> None:
    grid, a, b = pair(rate=0.5, sides=(0.5, 4.0))
    optimizer = RiemannianSGD(
        grid, 0.1, geometry="fixed-quotient", normalize="whitened", weight_decay=0.3
    )
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    before = (a @ b.mT).detach()
    optimizer.step()
    torch.testing.assert_close((a @ b.mT).detach(), (1 - 0.1 * 2.0 * 0.3) * before)


def test_compiled_steps_follow_sides() -> None:
    grids = [pair(sides=s) for s in ((0.25, 1.0), (0.25, 1.0))]
    one, other = (
        RiemannianSGD(grid, LR, geometry="fixed-quotient", normalize="whitened")
        for grid, _, _ in grids
    )
    compiled = torch.compile(other.step, backend="eager")
    for _ in range(2):
        one.step()
        compiled()
    for x, y in zip(grids[0][1:], grids[1][1:], strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)


def test_what_cannot_be() -> None:
    grid, _, _ = pair()
    for wrong in ((-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="'pair': sides must be two finite numbers, none neg"):
            grid.sides = wrong
    grid.sides = (1.0, 0.4)
    assert "sides=(1.0, 0.4)" in repr(grid)
    needed = r"Grid\.sides other than \(1, 1\) need normalize='whitened'.*normalize='metric'"
    with pytest.raises(ValueError, match=needed):
        RiemannianSGD(grid, LR, geometry="fixed-quotient")
    optimizer = RiemannianSGD(grid, LR, geometry="fixed-quotient", normalize="whitened")
    optimizer.param_groups[0]["normalize"] = "metric"
    with pytest.raises(ValueError, match=needed):
        optimizer.step()


def test_sides_are_shown() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2, bias=False)])
    grids = rankfold.attention_grids(model)
    grids[1].sides = (1.0, 0.5)
    assert "2 grids of 4 members (2 at 8·lr and 2·lr)" in repr(
        rankfold.build_optimizer(model, grids=grids)
    )
