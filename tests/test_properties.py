"""Properties that define the geometries, on random points of every shape class."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankfold.geometries import GEOMETRIES, Geometry, Pair, geometry_for
from rankfold.geometries.embedded import EmbeddedGeometry
from rankfold.geometries.isometry_embedded import IsometryEmbedded, IsometryEmbeddedGrid
from rankfold.geometries.stiefel import StiefelGeometry
from rankfold.linalg import skew, sym

from .points import Case, blocks_of, cases, dense, options, product, stacked

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("repeatable")

FIXED = ("fixed-embedded", "fixed-quotient")
ISOMETRIES = ("isometry-embedded", "isometry-quotient", "isometry-canonical")
UPSTAIRS = ("fixed-quotient", "isometry-quotient", "isometry-canonical")


def norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()


def tangent_at(case: Case, point: Pair, offset: int) -> Pair:
    """A random tangent vector, as the gradient of a random linear function of W."""
    geometry = case.geometry
    return geometry.gradient(geometry.frame(point), case.ambient(point, offset)[1])


def tangent_projection(geometry: Geometry, point: Pair, matrix: Tensor) -> Tensor:
    """Orthogonal projection of a matrix onto the tangent space downstairs, in the library's way."""
    a, b = stacked(point.left), stacked(point.right)
    pair = Pair((matrix @ b).view_as(point.left), (matrix.mT @ a).view_as(point.right))
    return dense(geometry, point, pair)


# The whole step ------------------------------------------------------------------------------


@given(cases(), st.sampled_from(["metric", "spectral", None]), st.booleans())
def test_steps_do_not_depend_on_the_gauge(
    case: Case, normalize: str | None, last_retraction: bool
) -> None:
    geometry = case.geometry
    names = [r for r in geometry.retractions if r != "qr"]
    opts = options(names[-1 if last_retraction else 0], 0.05, normalize=normalize)
    point = case.point()
    mix = case.gauge(50)
    if geometry.isometry:
        mix = torch.linalg.qr(mix).Q
    other = Pair(point.left @ mix, point.right @ torch.linalg.inv(mix).mT)
    start = product(point)
    states = [(point, Pair(*map(torch.zeros_like, point))) for point in (point, other)]
    for k in range(3):
        after = []
        for at, momentum in states:
            _, grad = case.ambient(at, 60 + 10 * k)
            outcome = geometry.step(at, grad, momentum, opts)
            assert outcome.momentum is not None
            after.append((outcome.point, outcome.momentum))
        states = after
    moved = norm(product(states[0][0]) - start)
    assert moved > 0
    assert norm(product(states[0][0]) - product(states[1][0])) < 1e-8 * max(moved, 1e-3)


@given(cases(), st.integers(1, 5), st.integers(0, 1))
def test_padding_changes_nothing(case: Case, rows: int, which: int) -> None:
    geometry = case.geometry
    opts = options(geometry.retractions[-which])
    point, momentum = case.point(), case.random(3)
    _, grad = case.ambient(point, 10)
    padded = [
        Pair(*(torch.nn.functional.pad(x, (0, 0, 0, rows)) for x in pair))
        for pair in (point, grad, momentum)
    ]
    plain = geometry.step(point, grad, momentum, opts)
    wide = geometry.step(padded[0], padded[1], padded[2], opts)
    assert plain.momentum is not None
    assert wide.momentum is not None
    for small, large in ((plain.point, wide.point), (plain.momentum, wide.momentum)):
        for x, y in zip(small, large, strict=True):
            assert (y[..., x.shape[-2] :, :] == 0).all()
            assert norm(y[..., : x.shape[-2], :] - x) < 1e-12 * max(1, norm(x))


@given(cases(), st.integers(0, 1))
def test_small_steps_leave_factors_where_they_were(case: Case, which: int) -> None:
    geometry = case.geometry
    point = case.point()
    _, grad = case.ambient(point, 10)
    for lr in (1e-3, 1e-6):
        new = geometry.step(point, grad, None, options(geometry.retractions[-which], lr)).point
        assert norm(new.left - point.left) + norm(new.right - point.right) < 30 * lr


# Retractions ---------------------------------------------------------------------------------


def slope(errors: list[float], ts: list[float]) -> float:
    """Exponent of the error between the two smallest steps."""
    return math.log(errors[0] / errors[1]) / math.log(ts[0] / ts[1])


RETRACTIONS = [
    (name, grid, retraction)
    for name in GEOMETRIES
    for grid in ((1, 1), (2, 3))
    for retraction in geometry_for(name, *grid).retractions
]


@pytest.mark.parametrize(("name", "grid", "retraction"), RETRACTIONS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_retraction_errors_have_the_right_order(
    name: str, grid: tuple[int, int], retraction: str, seed: int
) -> None:
    case = Case(name, *grid, 9, 7, 3, seed)
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)
    tangent = tangent_at(case, point, 10)
    coords = geometry.coordinates(frame, tangent)
    unit = geometry.metric_norm(frame, coords)
    xi = dense(geometry, point, tangent) / unit[:, None, None]
    ts = [2e-3, 1e-3]
    whole, tangential, upstairs = [], [], []
    for t in ts:
        opts = options(retraction, t, normalize=None)
        new = geometry.retract(frame, coords, t / unit, opts).point
        error = product(new) - product(point) - t * xi
        whole.append(norm(error))
        if isinstance(geometry, EmbeddedGeometry):
            tangential.append(norm(tangent_projection(geometry, point, error)))
        elif isinstance(geometry, StiefelGeometry):
            step = [x / unit[:, None, None, None] for x in tangent]
            rest = [n - p - t * s for n, p, s in zip(new, point, step, strict=True)]
            parts = [r - p @ sym(p.mT @ r) for r, p in zip(rest, point, strict=True)]
            upstairs.append(math.hypot(*map(norm, parts)))
    assert slope(whole, ts) == pytest.approx(2, abs=0.1)
    if retraction == "svd":
        assert slope(tangential, ts) == pytest.approx(3, abs=0.1)
    elif retraction == "orthographic":
        assert max(tangential) < 1e-13
    elif retraction == "polar":
        assert slope(upstairs, ts) == pytest.approx(3, abs=0.1)


@given(cases(ISOMETRIES), st.integers(0, 1), st.sampled_from([0.01, 0.3, 1.0, 30.0]))
def test_isometries_stay_isometries(case: Case, which: int, lr: float) -> None:
    geometry, point = case.geometry, case.point()
    _, grad = case.ambient(point, 10)
    new = geometry.step(point, grad, None, options(geometry.retractions[-which], lr)).point
    for side in new:
        assert norm(side.mT @ side - torch.eye(case.r)) < 1e-12


# Projections, transport, metric --------------------------------------------------------------


@given(cases(("fixed-embedded", "isometry-embedded")))
def test_embedded_projection_is_an_orthogonal_projection(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    if isinstance(geometry, IsometryEmbeddedGrid):
        # The hybrid's own path: gradient downstairs, lifted; its matrix is the projection.
        def project(z: Tensor) -> Tensor:
            a, b = stacked(point.left), stacked(point.right)
            grad = Pair((z @ b).view_as(point.left), (z.mT @ a).view_as(point.right))
            return dense(geometry, point, geometry.gradient(geometry.frame(point), grad))
    else:

        def project(z: Tensor) -> Tensor:
            return tangent_projection(geometry, point, z)

    y, z = case.ambient(point, 10)[0], case.ambient(point, 20)[0]
    assert norm(project(project(z)) - project(z)) < 1e-11 * norm(z)
    left, right = (project(y) * z).sum(), (y * project(z)).sum()
    assert abs(left - right) < 1e-11 * norm(y) * norm(z)


@given(cases(UPSTAIRS))
def test_upstairs_projection_is_orthogonal_in_the_metric(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)

    def inner(x: Pair, y: Pair) -> Tensor:
        """The metric by polarization of the library's own norm."""
        plus = Pair(*(a + b for a, b in zip(x, y, strict=True)))
        minus = Pair(*(a - b for a, b in zip(x, y, strict=True)))
        squares = [
            geometry.metric_norm(frame, geometry.coordinates(frame, v)) ** 2 for v in (plus, minus)
        ]
        return (squares[0] - squares[1]) / 4

    x, y = case.random(10), case.random(20)
    px, py = geometry.arrive(frame, x), geometry.arrive(frame, y)
    twice = geometry.arrive(frame, px)
    assert norm(twice.left - px.left) + norm(twice.right - px.right) < 1e-11 * norm(x.left)
    assert norm(inner(px, y) - inner(x, py)) < 1e-10 * (1 + norm(inner(x, x)) + norm(inner(y, y)))


@given(cases(), st.integers(0, 1))
def test_transport_over_a_zero_step_is_the_identity(case: Case, which: int) -> None:
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)
    tangent = tangent_at(case, point, 10)
    coords = geometry.coordinates(frame, tangent)
    zero = torch.zeros(2, dtype=torch.float64)
    landing = geometry.retract(frame, coords, zero, options(geometry.retractions[-which], 0.0))
    carried = geometry.arrive(
        geometry.frame(landing.point), geometry.depart(frame, coords, tangent, landing)
    )
    before, after = dense(geometry, point, tangent), dense(geometry, landing.point, carried)
    assert norm(before - after) < 1e-11 * norm(before)
    assert norm(product(landing.point) - product(point)) < 1e-12 * norm(product(point))


@given(cases(), st.integers(0, 1))
def test_transported_vectors_are_tangent_and_horizontal(case: Case, which: int) -> None:
    geometry, point = case.geometry, case.point()
    _, grad = case.ambient(point, 10)
    opts = options(geometry.retractions[-which], 0.2)
    outcome = geometry.step(point, grad, case.random(30), opts)
    assert outcome.momentum is not None
    m = geometry.arrive(geometry.frame(outcome.point), outcome.momentum)
    a, b = outcome.point
    size = norm(m.left) + norm(m.right)
    if isinstance(geometry, EmbeddedGeometry):
        overlap = stacked(a).mT @ stacked(m.left)
        assert norm(overlap - stacked(m.right).mT @ stacked(b)) < 1e-10 * size
        if geometry.isometry:
            assert norm(sym(overlap)) < 1e-10 * size
    elif isinstance(geometry, StiefelGeometry):
        left, right = a.mT @ m.left, b.mT @ m.right
        assert norm(sym(left)) + norm(sym(right)) < 1e-11 * size
        assert norm(case.rights * left.sum(1) + case.lefts * right.sum(1)) < 1e-10 * size
    else:
        towards_a = torch.linalg.pinv(stacked(a)) @ stacked(m.left)
        towards_b = torch.linalg.pinv(stacked(b)) @ stacked(m.right)
        assert norm(towards_a - towards_b.mT) < 1e-10 * size


@given(cases())
def test_metric_norm_is_its_definition(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)
    tangent = tangent_at(case, point, 10)
    found = geometry.metric_norm(frame, geometry.coordinates(frame, tangent))
    if case.name.endswith("embedded"):
        expected = dense(geometry, point, tangent).square().sum((-2, -1))
    else:
        expected = torch.zeros(2, dtype=torch.float64)
        for i, j in blocks_of(point):
            a, b = point.left[:, i], point.right[:, j]
            xa, xb = tangent.left[:, i], tangent.right[:, j]
            expected += (xa @ b.mT).square().sum((-2, -1)) + (xb @ a.mT).square().sum((-2, -1))
            if case.name == "isometry-canonical":
                expected -= (a.mT @ xa).square().sum((-2, -1)) / 2
                expected -= (b.mT @ xb).square().sum((-2, -1)) / 2
    assert norm(found - expected.sqrt()) < 1e-11 * norm(found)


@given(cases())
def test_spectral_norm_is_that_of_the_stacked_tangent_matrix(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)
    tangent = tangent_at(case, point, 10)
    found = geometry.spectral_norm(frame, geometry.coordinates(frame, tangent))
    expected = torch.linalg.matrix_norm(dense(geometry, point, tangent), ord=2)
    assert norm(found - expected) < 1e-9 * norm(expected)


@given(cases(("isometry-embedded",)))
def test_the_isometry_grid_at_one_by_one_has_the_singleton_gradient(case: Case) -> None:
    single, grid = IsometryEmbedded(), IsometryEmbeddedGrid()
    case = Case(case.name, 1, 1, case.m, case.n, case.r, case.seed)
    point = case.point()
    _, grad = case.ambient(point, 10)
    below = dense(single, point, single.gradient(single.frame(point), grad))
    frame = grid.frame(point)
    lifted = grid.gradient(frame, grad)
    assert norm(below - dense(grid, point, lifted)) < 1e-12 * norm(below)
    found = grid.metric_norm(frame, grid.coordinates(frame, lifted))
    assert norm(found - below.square().sum((-2, -1)).sqrt()) < 1e-12 * norm(below)


# Gradients that do not come from a function of the product -----------------------------------


@given(cases(ISOMETRIES))
def test_isometry_gradients_need_only_the_skew_condition(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    frame = geometry.frame(point)
    _, grad = case.ambient(point, 10)
    extra = case.random(40)
    # U_i S_i with S_i symmetric is normal to every factor, and must not be seen.
    shifted = Pair(*(g + p @ sym(p.mT @ e) for g, p, e in zip(grad, point, extra, strict=True)))
    right = dense(geometry, point, geometry.gradient(frame, grad))
    found = dense(geometry, point, geometry.gradient(frame, shifted))
    assert norm(found - right) < 1e-11 * (norm(right) + norm(extra.left))


@given(cases(("isometry-quotient", "isometry-canonical", "isometry-embedded")))
def test_isometry_gradients_are_tangent_and_horizontal_whatever_comes_in(case: Case) -> None:
    geometry, point = case.geometry, case.point()
    if isinstance(geometry, EmbeddedGeometry):
        return
    grad = case.random(10)
    found = geometry.gradient(geometry.frame(point), grad)
    left, right = point.left.mT @ found.left, point.right.mT @ found.right
    size = norm(grad.left) + norm(grad.right)
    assert norm(sym(left)) + norm(sym(right)) < 1e-12 * size
    assert norm(case.rights * left.sum(1) + case.lefts * right.sum(1)) < 1e-11 * size


@given(cases(("isometry-embedded",)))
def test_inconsistent_grid_gradients_are_projected_in_least_squares(case: Case) -> None:
    """K_ij = Ω_i − Ψ_j is the least-squares fit to the factors' own skew overlaps."""
    if case.lefts == case.rights == 1:
        case = Case(case.name, 2, 3, case.m, case.n, case.r, case.seed)
    geometry, point = case.geometry, case.point()
    grad = case.random(10)
    found = geometry.gradient(geometry.frame(point), grad)
    omega, psi = point.left.mT @ found.left, point.right.mT @ found.right
    k = omega[:, :, None] - psi[:, None]
    # The fit minimizes Σ_i ‖Σ_j K_ij − α_i‖² + Σ_j ‖Σ_i K_ij − β_j‖² over K_ij = Ω_i − Ψ_j: its
    # residuals, summed with the signs Ω_i and Ψ_j enter with, vanish.
    alpha, beta = skew(point.left.mT @ grad.left), -skew(point.right.mT @ grad.right)
    rows, columns = k.sum(2) - alpha, k.sum(1) - beta
    for_omega = case.rights * rows + columns.sum(1, keepdim=True)
    for_psi = case.lefts * columns + rows.sum(1, keepdim=True)
    size = norm(grad.left) + norm(grad.right)
    assert norm(for_omega) + norm(for_psi) < 1e-10 * size
