"""Gradients as a step without momentum takes them: their rows are never made, and yet the same."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold import tall
from rankfold.geometries import Pair, StepOptions
from rankfold.geometries.fixed_quotient import WeighedTangent

from .points import GRIDS, Case, options, stacked
from .test_repairs import stretched

WIDE = torch.float64
every_grid = pytest.mark.parametrize("grid", GRIDS)
every_gradient = pytest.mark.parametrize("consistent", [True, False])


def quotient(grid: tuple[int, int], seed: int = 0) -> Case:
    return Case("fixed-quotient", *grid, 7, 6, 3, seed)


def gradients(case: Case, point: Pair, consistent: bool) -> Pair:
    return case.ambient(point, 30)[1] if consistent else case.random(30)


def told(**changed: Any) -> StepOptions:
    return options("additive", **changed)


def made(case: Case, point: Pair, grad: Pair, **changed: Any) -> tuple[WeighedTangent, Pair]:
    """The slope of a step, and its vector."""
    frame = case.geometry.frame(point, changed.get("damping", 0.0))
    slope = case.geometry.slope(frame, grad, told(**changed))
    return slope, case.geometry.vector(frame, slope)


def weighed(vector: Pair, point: Pair) -> tuple[Tensor, Tensor]:
    """‖Ξ_A Bᵀ‖² and ‖A Ξ_Bᵀ‖² from the definition, (batch,)."""
    (a, b), (x, y) = map(stacked, point), map(stacked, vector)
    return (x @ b.mT).square().sum((1, 2)), (a @ y.mT).square().sum((1, 2))


@every_gradient
@every_grid
def test_it_is_the_gradient(grid: tuple[int, int], consistent: bool) -> None:
    case = quotient(grid)
    point = case.point()
    grad = gradients(case, point, consistent)
    slope, vector = made(case, point, grad)
    assert slope.lift is not None
    torch.testing.assert_close(vector, case.geometry.gradient(case.geometry.frame(point), grad))
    torch.testing.assert_close((slope.left, slope.right), weighed(vector, point))


@pytest.mark.parametrize("changed", [{"damping": 0.5}, {"gradient_repair": "none"}])
def test_other_gradients_are_made_first(changed: dict[str, Any]) -> None:
    """Damped factors have no orthonormal frame, and what is not projected loses nothing."""
    case = quotient((2, 3))
    point, grad = case.point(), case.random(30)
    slope, _ = made(case, point, grad, **changed)
    assert slope.lift is None


@every_gradient
@every_grid
@pytest.mark.parametrize(
    "changed", [{}, {"weight_decay": 0.3}, {"weight_decay": 0.3, "decay_to": 2.0}]
)
def test_a_step_ends_where_that_along_the_vector_does(
    grid: tuple[int, int], consistent: bool, changed: dict[str, Any]
) -> None:
    case = quotient(grid)
    point = case.point()
    grad = gradients(case, point, consistent)
    frame = case.geometry.frame(point)
    slope, vector = made(case, point, grad, **changed)
    scale = torch.tensor([-0.1, 0.05], dtype=WIDE)
    with_rows = case.geometry.coordinates(frame, vector)
    ends = [
        case.geometry.retract(frame, coords, scale, told(**changed)).point
        for coords in (slope, with_rows)
    ]
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3])
@every_gradient
def test_norms_in_float32_are_as_good_as_those_of_the_vector(
    consistent: bool, condition: float
) -> None:
    of_vector: list[float] = []
    of_slope: list[float] = []
    for seed in range(12):
        case = Case("fixed-quotient", 1, 1, 40, 30, 8, seed)
        geometry, point = case.geometry, stretched(case, condition)
        grad = gradients(case, point, consistent)
        point, grad = (Pair(*(x.float() for x in pair)) for pair in (point, grad))
        frame = geometry.frame(point)
        vector = geometry.coordinates(frame, geometry.gradient(frame, grad))
        slope, _ = made(case, point, grad)
        point, grad = (Pair(*(x.double() for x in pair)) for pair in (point, grad))
        exact = geometry.frame(point)
        norm = geometry.metric_norm(exact, made(case, point, grad)[0])
        for errors, coords in ((of_vector, vector), (of_slope, slope)):
            off = geometry.metric_norm(frame, coords).double() / norm - 1
            errors.append(float(off.abs().max()))
    eps = torch.finfo(torch.float32).eps
    assert median(of_slope) <= 2 * median(of_vector) + 4 * eps


def test_rows_are_read_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices, overlaps and norms, and the step itself, of either side."""
    seen: list[str] = []
    for name in ("gram", "overlap", "turned_square", "turn", "subtract", "combine", "move", "step"):
        plain = getattr(tall, name)

        def watched(
            *args: object, plain: object = plain, name: str = name, **further: object
        ) -> Tensor:
            seen.append(name)
            return plain(*args, **further)  # type: ignore[operator]

        monkeypatch.setattr(tall, name, watched)
    case = quotient((1, 1))
    point = case.point()
    grad = gradients(case, point, consistent=True)
    case.geometry.step(point, grad, None, told(momentum=0.0))
    wanted = ["gram", "turned_square", "turn", "overlap", "move"]  # the norm turns what it measures
    assert sorted(seen) == sorted(2 * wanted)
