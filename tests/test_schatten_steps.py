"""Steps under Schatten norms in all geometries: gauge, whitened, and what must not harm them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold.geometries import GEOMETRIES, Pair
from rankfold.lab.muon import Whitened

from .points import GRIDS, Case, options, product, stacked
from .schatten_cases import (
    NORMALIZATIONS,
    Pairs,
    best_value,
    norm_of,
    orthonormal,
    step_direction,
)


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


# Whitened ----------------------------------------------------------------------------------------


def parts(case: Case, point: Pair, grad: Pair, normalize: str) -> tuple[Tensor, Tensor]:
    """C of C Vᵀ and D of U Dᵀ that a direction of fixed-quotient is the sum of."""
    moved, _ = step_direction(case, point, grad, normalize)
    a, b = stacked(point.left), stacked(point.right)
    return stacked(moved.left) @ b.mT, a @ stacked(moved.right).mT


@pytest.mark.parametrize("grid", GRIDS)
def test_whitened_parts_have_all_singular_values_one(grid: tuple[int, int]) -> None:
    quotient, embedded = (Case(f"fixed-{x}", *grid, 6, 5, 3, 5) for x in ("quotient", "embedded"))
    point = quotient.point()
    _, grad = quotient.ambient(point, 10)
    both = parts(quotient, point, grad, "whitened")
    for part in both:
        values = torch.linalg.svdvals(part)[:, :3]
        torch.testing.assert_close(values, torch.ones(2, 3).double(), atol=1e-2, rtol=0)
    # Without momentum both geometries see the same vector, and take the same direction.
    _, moved = step_direction(embedded, point, grad, "whitened")
    torch.testing.assert_close(moved, sum(both), atol=1e-9, rtol=0)
    assert (torch.linalg.matrix_norm(moved, 2) < 2 + 1e-9).all()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["fixed-quotient", "isometry-quotient", "isometry-canonical"])
def test_upstairs_whitened_is_schatten_inf(name: str, grid: tuple[int, int]) -> None:
    case = Case(name, *grid, 6, 5, 3, 6)
    point = case.point()
    _, grad = case.ambient(point, 10)
    one, other = (step_direction(case, point, grad, n)[1] for n in ("whitened", "schatten-inf"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("grid", GRIDS)
def test_whitened_parts_of_isometries(grid: tuple[int, int]) -> None:
    """Each side's part is the steepest among the moves of that side, measured downstairs."""
    case = Case("isometry-embedded", *grid, 6, 5, 3, 7)
    point = case.point()
    z, grad = case.ambient(point, 10)
    _, moved = step_direction(case, point, grad, "whitened")
    for k in range(2):
        best = 0.0
        for side in (0, 1):
            basis = one_side(case, point, side, k)

            def normal(x: Tensor, basis: Tensor = basis) -> Tensor:
                return x - (basis @ (basis.mT @ x.flatten())).view_as(x)

            best += best_value(z[k] - normal(z[k]), normal, math.inf)
        assert 0.95 * best < float((z[k] * moved[k]).sum()) < best * (1 + 1e-5)
        assert norm_of(moved[k], math.inf) < 2


def one_side(case: Case, point: Pair, side: int, k: int) -> Tensor:
    """A basis of the moves of one side's factors alone."""
    columns = []
    a, b = (stacked(x)[k] for x in point)
    for block in range(point[side].shape[1]):
        u = point[side][k, block]
        off = torch.linalg.qr(u, mode="complete").Q[:, case.r :]
        moves = [u @ (e - e.mT) for e in torch.eye(9).double().view(9, 3, 3)]
        units = torch.eye(off.shape[1] * 3).double().view(-1, off.shape[1], 3)
        moves += [off @ e for e in units]
        for move in moves:
            change = torch.zeros_like(point[side][k])
            change[block] = move
            flat = change.flatten(0, 1)
            columns.append((flat @ b.mT if side == 0 else a @ flat.mT).flatten())
    return orthonormal(torch.stack(columns, 1))


def test_whitened_is_the_laboratorys() -> None:
    """Whose signs are rough: its singular values lie in [0.68, 1.14]."""
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(20, 4, generator=generator) for _ in range(2))
    g = torch.randn(20, 20, generator=generator)
    moved = []
    for mine in (True, False):
        left, right = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        left.grad, right.grad = g @ b, g.mT @ a
        grid = rankfold.Grid(left, right, name="pair")
        if mine:
            rankfold.RiemannianSGD(
                grid, 0.1, geometry="fixed-quotient", normalize="whitened"
            ).step()
        else:
            Whitened(
                [grid],
                0.1,
                momentum=0.0,
                weight_decay=0.0,
                masters=False,
                sign_dtype=torch.float32,
            ).step()
        moved.append(((left.detach() - a) @ b.mT, a @ (right.detach() - b).mT))
    for one, other in zip(*moved, strict=True):
        u, s, vh = torch.linalg.svd(other / 0.1)
        assert ((s[:4] > 0.6) & (s[:4] < 1.25)).all()
        exact = 0.1 * u[:, :4] @ vh[:4]
        torch.testing.assert_close(
            one, -exact if (one * exact).sum() < 0 else exact, atol=2e-4, rtol=0
        )


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
