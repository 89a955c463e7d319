"""Whitened steps: each factor's part of a vector alone, measured in each of its products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold.geometries import GEOMETRIES, Pair
from rankfold.lab.muon import Whitened

from .points import GRIDS, Case, options, product, stacked
from .schatten_cases import best_value, gradients, orthonormal, raised, step_direction
from .watching import Watch

SHAPES = [(6, 5), (3, 5), (3, 3)]


def whitened(x: Tensor, r: int) -> Tensor:
    """``x`` (..., m, n) of rank r with its singular values brought to 1, the smallest softly."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    u, s, vh = u[..., :r], s[..., :r], vh[..., :r, :]
    values = raised(s.square() / s.square().sum(-1, keepdim=True)).sqrt()
    return (u * values[..., None, :]) @ vh


def projector(x: Tensor) -> Tensor:
    """Onto the columns of a stacked factor (batch, rows, r)."""
    return x @ torch.linalg.pinv(x)


def exact_parts(case: Case, point: Pair, z: Tensor) -> tuple[Tensor, Tensor]:
    """What the left and the right factors do to the stacked product, (batch, I·m, J·n) each.

    The part of A_i is what the gradient has along its moves A_i -> A_i + Ξ_Ai of its row of
    products, Z_i with its rows projected on those of B; likewise B_j in its column.
    """
    a, b = stacked(point.left), stacked(point.right)
    rows = (z @ projector(b)).unflatten(1, (case.lefts, case.m))
    columns = (projector(a) @ z).unflatten(2, (case.rights, case.n)).transpose(1, 2)
    left = math.sqrt(case.rights) * whitened(rows, case.r)
    right = math.sqrt(case.lefts) * whitened(columns, case.r)
    return left.flatten(1, 2), right.transpose(1, 2).flatten(2, 3)


def parts(point: Pair, moved: Pair) -> tuple[Tensor, Tensor]:
    """The same of rates of the factors."""
    a, b = stacked(point.left), stacked(point.right)
    return stacked(moved.left) @ b.mT, a @ stacked(moved.right).mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grid", GRIDS)
def test_fixed_rank_from_the_definition(grid: tuple[int, int], shape: tuple[int, int]) -> None:
    """Both geometries: without momentum they see one vector, and take one direction."""
    quotient, embedded = (Case(f"fixed-{x}", *grid, *shape, 3, 5) for x in ("quotient", "embedded"))
    point = quotient.point()
    z, grad = quotient.ambient(point, 10)
    exact = exact_parts(quotient, point, z)
    moved, _ = step_direction(quotient, point, grad, "whitened")
    for found, wanted in zip(parts(point, moved), exact, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
    _, matrix = step_direction(embedded, point, grad, "whitened")
    torch.testing.assert_close(matrix, exact[0] + exact[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
def test_each_factor_moves_its_products_by_singular_values_of_mean_square_one(
    grid: tuple[int, int],
) -> None:
    """Where no singular value is small: √J in a row of J products, √I in a column of I."""
    case = Case("fixed-quotient", *grid, 9, 8, 3, 5)
    point = case.point()
    _, grad = case.ambient(point, 10)
    moved, _ = step_direction(case, point, grad, "whitened")
    partners = stacked(point.right), stacked(point.left)
    for rates, partner, count in zip(moved, partners, reversed(grid), strict=True):
        values = torch.linalg.svdvals(rates @ partner[:, None].mT)[..., : case.r]
        expected = torch.full_like(values, math.sqrt(count))
        torch.testing.assert_close(values, expected, atol=0, rtol=2e-3)


@pytest.mark.parametrize("name", ["fixed-quotient", "isometry-quotient", "isometry-canonical"])
def test_upstairs_whitened_pairs_are_schatten_inf(name: str) -> None:
    case = Case(name, 1, 1, 6, 5, 3, 6)
    point = case.point()
    _, grad = case.ambient(point, 10)
    one, other = (step_direction(case, point, grad, n)[1] for n in ("whitened", "schatten-inf"))
    torch.testing.assert_close(one, other, atol=1e-13, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["isometry-quotient", "isometry-canonical"])
def test_upstairs_whitened_isometries_are_schatten_inf_scaled(
    name: str, grid: tuple[int, int]
) -> None:
    case = Case(name, *grid, 6, 5, 3, 6)
    point = case.point()
    _, grad = case.ambient(point, 10)
    one, other = (step_direction(case, point, grad, n)[0] for n in ("whitened", "schatten-inf"))
    for x, y, count in zip(one, other, reversed(grid), strict=True):
        torch.testing.assert_close(x, math.sqrt(count) * y, atol=1e-13, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
def test_parts_of_embedded_isometries(grid: tuple[int, int]) -> None:
    """Each factor's part is the steepest among the moves of that factor, measured downstairs."""
    case = Case("isometry-embedded", *grid, 6, 5, 3, 7)
    point = case.point()
    z, grad = case.ambient(point, 10)
    moved, matrix = step_direction(case, point, grad, "whitened")
    for k in range(2):
        total = 0.0
        for side, count in enumerate(reversed(grid)):
            for block in range(grid[side]):
                basis = one_factor(case, point, side, block, k)

                def normal(x: Tensor, basis: Tensor = basis) -> Tensor:
                    return x - (basis @ (basis.mT @ x.flatten())).view_as(x)

                best = math.sqrt(count) * best_value(z[k] - normal(z[k]), normal, math.inf)
                total += best
                if grid != (1, 1):
                    rates, g = moved[side][k, block], grad[side][k, block]
                    assert torch.linalg.matrix_norm(rates, 2) < 1 + 1e-9
                    assert 0.95 * best < float((g * rates).sum()) < best * (1 + 1e-5)
        assert 0.95 * total < float((z[k] * matrix[k]).sum()) < total * (1 + 1e-5)


def one_factor(case: Case, point: Pair, side: int, block: int, k: int) -> Tensor:
    """A basis of the stacked products' moves by one factor alone."""
    a, b = (stacked(x)[k] for x in point)
    u = point[side][k, block]
    off = torch.linalg.qr(u, mode="complete").Q[:, case.r :]
    moves = [u @ (e - e.mT) for e in torch.eye(9).double().view(9, 3, 3)]
    moves += [off @ e for e in torch.eye(off.shape[1] * 3).double().view(-1, off.shape[1], 3)]
    columns = []
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
        torch.testing.assert_close(one, exact, atol=2e-4, rtol=0)


# Robustness --------------------------------------------------------------------------------------


def single(point: Pair) -> Pair:
    return Pair(point.left.float(), point.right.float())


@pytest.mark.parametrize(
    ("name", "normalize"),
    [
        ("fixed-quotient", "whitened"),
        ("isometry-embedded", "whitened"),
        ("isometry-quotient", "whitened"),
        ("isometry-canonical", "whitened"),
        ("isometry-quotient", "schatten-inf"),
        ("isometry-canonical", "schatten-inf"),
    ],
)
def test_a_factor_without_gradient_stays_in_float32(name: str, normalize: str) -> None:
    """What the others' rounding leaves in its part is no direction."""
    case = Case(name, 4, 2, 40, 30, 8, 5)
    point = case.point()
    z, _ = case.ambient(point, 10)
    z[:, : case.m] = 0
    point = single(point)
    moved, _ = step_direction(case, point, gradients(point, z), normalize)
    sizes = torch.linalg.matrix_norm(moved.left @ stacked(point.right)[:, None].mT, 2)
    assert (sizes[:, 0] < 0.02).all()
    assert (sizes[:, 1:] > 0.9).all()


@pytest.mark.parametrize("name", ["fixed-embedded", "fixed-quotient"])
def test_gradients_of_low_rank_in_float32(name: str) -> None:
    """Every product's is of rank one, and so is every factor's or, of the rights, of rank two."""
    case = Case(name, 2, 1, 40, 30, 8, 6)
    point = case.point()
    noise = case.random(10)
    z = (noise.left[..., :1] @ noise.right[..., :1].mT).flatten(1, 2)
    exact = step_direction(case, point, gradients(point, z), "whitened")[1]
    low = single(point)
    found = step_direction(case, low, gradients(low, z), "whitened")[1]
    error = torch.linalg.matrix_norm(found.double() - exact, 2)
    assert (error < 5e-3).all()
    assert (torch.linalg.matrix_norm(exact, 2) > 1).all()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_zero_stays_zero_and_nan_its_own_members(name: str, grid: tuple[int, int]) -> None:
    case = Case(name, *grid, 6, 5, 3, 8)
    point = Pair(*(x.float() for x in case.random(1, batch=3)))
    point = Pair(*(torch.linalg.qr(x).Q for x in point))
    grad = Pair(*(x.float() for x in case.random(2, batch=3)))
    for x in grad:
        x[0] = 0
    grad.right[1, 0, 0, 0] = math.nan
    told = options(case.geometry.retractions[0], normalize="whitened")
    landed = case.geometry.step(point, grad, None, told)
    torch.testing.assert_close(product(landed.point)[0], product(point)[0], atol=1e-6, rtol=0)
    assert torch.equal(product(landed.point)[1], product(point)[1])
    assert (product(landed.point)[2] - product(point)[2]).norm() > 1e-2
    assert landed.events["skipped"].tolist() == [False, True, False]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_as_many_operations_on_grids_of_any_size(name: str) -> None:
    counts = []
    for grid in ((2, 3), (7, 5)):
        case = Case(name, *grid, 6, 5, 3, 9)
        point = case.point()
        grad = case.ambient(point, 10)[1]
        told = options(case.geometry.retractions[0], normalize="whitened")
        with Watch() as watch:
            case.geometry.step(point, grad, case.random(20), told)
        counts.append(watch.operations)
    assert counts[0] == counts[1]
