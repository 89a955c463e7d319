"""Steps under Schatten norms in all geometries: gauge, padding, and what must not harm them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankfold
from rankfold.geometries import GEOMETRIES, Pair
from rankfold.linalg import frobenius

from .points import GRIDS, Case, options, product, stacked
from .reference import ISOMETRIES
from .schatten_cases import NORMALIZATIONS, Pairs, gradients, step_direction


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_p_2_is_the_metric_step(name: str, grid: tuple[int, int]) -> None:
    case = Case(name, *grid, 6, 5, 3, 3)
    point = case.point()
    _, grad = case.ambient(point, 10)
    geometry = case.geometry
    told = options(geometry.retractions[0])
    momentum = geometry.gradient(geometry.frame(point), case.ambient(point, 20)[1])
    one = geometry.step(point, grad, momentum, told)
    other = geometry.step(point, grad, momentum, replace(told, normalize="schatten-2"))
    for x, y in ((one.point, other.point), (one.momentum, other.momentum)):
        assert x is not None
        assert y is not None
        assert torch.equal(x.left, y.left)
        assert torch.equal(x.right, y.right)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_steps_do_not_depend_on_the_gauge(name: str, grid: tuple[int, int], normalize: str) -> None:
    case = Case(name, *grid, 6, 5, 3, 4)
    point = case.point()
    turn = case.gauge(30)
    if case.geometry.isometry:
        turn = torch.linalg.qr(turn).Q
    turned = Pair(point.left @ turn, point.right @ torch.linalg.inv(turn).mT)
    told, found = options(case.geometry.retractions[0], normalize=normalize), []
    for start in (point, turned):
        z, _ = case.ambient(point, 10)
        a, b = stacked(start.left), stacked(start.right)
        grad = Pair((z @ b).view_as(start.left), (z.mT @ a).view_as(start.right))
        found.append(product(case.geometry.step(start, grad, None, told).point))
    torch.testing.assert_close(*found, atol=1e-8, rtol=1e-8)
    assert (found[0] - product(point)).norm() > 1e-3


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_rows_of_padding_change_nothing(name: str, normalize: str) -> None:
    """As the shorter factors of a ragged grid have them."""
    case = Case(name, 2, 3, 6, 5, 3, 9)
    point = case.point()
    _, grad = case.ambient(point, 10)
    told = options(case.geometry.retractions[0], normalize=normalize)

    def padded(pair: Pair) -> Pair:
        left, right = (nn.functional.pad(pair[k], (0, 0, 0, 2 - k)) for k in (0, 1))
        return Pair(left, right)

    plain = case.geometry.step(point, grad, None, told).point
    longer = case.geometry.step(padded(point), padded(grad), None, told).point
    for x, y in zip(padded(plain), longer, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=0)


# Robustness --------------------------------------------------------------------------------------


STEPS = [(g, n) for g in GEOMETRIES for n in NORMALIZATIONS]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_losses_fall_in_float32(geometry: str) -> None:
    problem = Pairs(dtype=torch.float32, orthonormal=geometry.startswith("isometry"))
    before = problem.loss().item()
    problem.run(100, "schatten-inf", lr=0.03, momentum=0.8, geometry=geometry)
    assert problem.loss().item() < 0.9 * before


@pytest.mark.parametrize(("geometry", "normalize"), STEPS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_member_whose_gradient_is_not_finite_stays(
    geometry: str, normalize: str, value: float
) -> None:
    problem = Pairs(orthonormal=geometry.startswith("isometry"))
    optimizer = rankfold.RiemannianSGD(
        problem.grid, 0.1, geometry=geometry, normalize=normalize, momentum=0.5
    )
    problem.loss().backward()
    assert problem.left.grad is not None
    problem.left.grad[1, 0, 0] = value
    before = problem.product().detach().clone()
    optimizer.step()
    after = problem.product().detach()
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])
    assert [events["skipped"] for events in optimizer.counts().values()] == [1]


@pytest.mark.parametrize(("geometry", "normalize"), STEPS)
def test_a_gradient_of_zero_is_no_step(geometry: str, normalize: str) -> None:
    problem = Pairs(orthonormal=geometry.startswith("isometry"), dtype=torch.float32)
    optimizer = rankfold.RiemannianSGD(problem.grid, 0.1, geometry=geometry, normalize=normalize)
    problem.left.grad, problem.right.grad = map(torch.zeros_like, (problem.left, problem.right))
    before = problem.product().detach().clone()
    optimizer.step()
    torch.testing.assert_close(problem.product().detach(), before, atol=1e-6, rtol=1e-6)
    assert not optimizer.counts()


@pytest.mark.parametrize(("geometry", "normalize"), STEPS)
def test_diagnostics_are_of_the_step_that_was_made(geometry: str, normalize: str) -> None:
    """The spectral norm of a small step along D, measured on the products themselves."""
    problem, lr = Pairs(orthonormal=geometry.startswith("isometry")), 1e-6
    optimizer = rankfold.RiemannianSGD(
        problem.grid,
        lr,
        geometry=geometry,
        normalize=normalize,
        momentum=0.5,
        nesterov=True,
    )
    optimizer.record_diagnostics()
    for _ in range(2):
        optimizer.zero_grad()
        problem.loss().backward()
        before = problem.product().detach().clone()
        optimizer.step()
    moved = torch.linalg.matrix_norm(problem.product().detach() - before, 2)
    said = [numbers["step_spectral_norm"] for numbers in optimizer.diagnostics().values()]
    torch.testing.assert_close(torch.tensor(said).double(), moved, atol=0, rtol=1e-4)


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g.startswith("isometry")])
def test_nothing_is_skipped_at_an_optimum(geometry: str) -> None:
    """Where steps too long go back and forth, and what is left of a gradient may be rounding."""
    generator = torch.Generator().manual_seed(6)
    left, right, target = (torch.randn(m, 8, generator=generator) for m in (20, 16, 20))
    params = [nn.Parameter(torch.linalg.qr(x).Q) for x in (left, right)]
    optimizer = rankfold.RiemannianSGD(
        rankfold.Grid(*params),
        0.2,
        geometry=geometry,
        normalize="schatten-inf",
        momentum=0.9,
        nesterov=True,
    )
    for _ in range(80):
        optimizer.zero_grad()
        (params[0] @ params[1].mT * (target @ right.mT)).sum().backward()
        optimizer.step()
    assert not optimizer.counts()
    for x in params:
        assert (x.mT @ x - torch.eye(8)).abs().max() < 1e-6


# Rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["schatten-inf", "schatten-3", "whitened"])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 1, 40, 30), (2, 3, 40, 30)])
@pytest.mark.parametrize("name", ISOMETRIES)
def test_factors_that_are_orthonormal_to_16_bits_alone(
    name: str, shape: tuple[int, int, int, int], normalize: str
) -> None:
    """As after a reload, where a gradient of low rank leaves little beside what is rounding."""
    case = Case(name, *shape, 8, 3)
    exact = case.point()
    noise = case.random(10)
    z = stacked(noise.left)[..., :1] @ stacked(noise.right)[..., :1].mT
    rounded = Pair(*(x.bfloat16().float() for x in exact))
    one = step_direction(case, exact, gradients(exact, z), normalize)[1]
    other = step_direction(case, rounded, gradients(rounded, z), normalize)[1]
    assert (frobenius(other.double() - one) < 0.03 * frobenius(one)).all()


@pytest.mark.parametrize("normalize", ["schatten-inf", "schatten-3", "whitened"])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
@pytest.mark.parametrize("name", ISOMETRIES)
def test_near_an_optimum_most_of_a_gradient_is_normal(
    name: str, grid: tuple[int, int], normalize: str
) -> None:
    case = Case(name, *grid, 8, 8, 8, 4)
    point = case.point()
    noise = case.random(10)
    z = product(point) + 1e-4 * stacked(noise.left) @ stacked(noise.right).mT
    low = Pair(*(x.float() for x in point))
    one = step_direction(case, point, gradients(point, z), normalize)[1]
    other = step_direction(case, low, gradients(low, z), normalize)[1]
    assert (frobenius(other.double() - one) < 0.01 * frobenius(one)).all()


@pytest.mark.parametrize("normalize", ["metric", "spectral", *NORMALIZATIONS])
@pytest.mark.parametrize("shape", [(1, 1, 5, 4, 1), (2, 1, 8, 6, 4)])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_whose_squares_vanish_are_finite(
    name: str, shape: tuple[int, int, int, int, int], normalize: str
) -> None:
    case = Case(name, *shape, 3)
    point = Pair(*(x.float() for x in case.point()))
    grad = case.ambient(case.point(), 10)[1]
    told = options(case.geometry.retractions[0], normalize=normalize)
    for scale in 10.0 ** -torch.arange(18.0, 42.0, 2.0):
        landed = case.geometry.step(point, Pair(*((scale * x).float() for x in grad)), None, told)
        assert not landed.events["skipped"].any()
        torch.testing.assert_close(product(landed.point), product(point), atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize", ["metric", *NORMALIZATIONS])
@pytest.mark.parametrize("shape", [(1, 1, 9, 8, 4), (2, 1, 9, 8, 4)])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_small_gradients_above_the_floor_are_whole_steps(
    name: str, shape: tuple[int, int, int, int, int], normalize: str
) -> None:
    case = Case(name, *shape, 3)
    point = Pair(*(x.float() for x in case.point()))
    grad = case.ambient(case.point(), 10)[1]
    told = options(case.geometry.retractions[0], normalize=normalize, norm_floor=1e-17)
    moved = (
        case.geometry.step(point, Pair(*((scale * x).float() for x in grad)), None, told).point
        for scale in (1.0, 1e-14)
    )
    one, other = (product(end) - product(point) for end in moved)
    assert (frobenius(other - one) < 1e-3 * frobenius(one)).all()
