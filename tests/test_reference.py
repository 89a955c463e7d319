"""The dense reference itself: its spaces, gradients and steps against what defines them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from .problems import Case, Loss, methods, starting_factors
from .reference import GEOMETRIES, ISOMETRIES, Reference

REFERENCE_GRIDS = [((7,), (5,), 3), ((3,), (6,), 3), ((4, 6), (5, 3, 4), 2)]


def reference_at(
    geometry: str, shape: tuple[tuple[int, ...], tuple[int, ...], int], retraction: str | None
) -> tuple[Reference, torch.Generator]:
    """A reference at a generic point, and the generator to go on drawing from."""
    heights, widths, rank = shape
    case = Case(geometry, retraction, heights=heights, widths=widths, rank=rank)
    generator = case.generator()
    left, right = starting_factors(case, generator)
    reference = Reference(geometry, left, right, lr=0.1, momentum=0.5, retraction=retraction)
    return reference, generator


def random_tangent(reference: Reference, generator: torch.Generator) -> Tensor:
    """A random tangent vector, in the reference's own coordinates."""
    s = reference.spaces
    basis = s.downstairs if reference.lives_downstairs else s.horizontal
    return basis @ torch.randn(basis.shape[1], generator=generator, dtype=torch.float64)


reference_methods = pytest.mark.parametrize(
    ("geometry", "retraction", "shape"),
    [
        (geometry, retraction, shape)
        for shape in REFERENCE_GRIDS
        for geometry, retraction in methods(*shape[:2])
    ],
)
reference_geometries = pytest.mark.parametrize(
    ("geometry", "shape"), list(itertools.product(GEOMETRIES, REFERENCE_GRIDS))
)
Shape = tuple[tuple[int, ...], tuple[int, ...], int]


def assert_equal(here: Tensor, there: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("geometry", [name for name in GEOMETRIES if "embedded" not in name])
@pytest.mark.parametrize("shape", REFERENCE_GRIDS)
def test_reference_metric_is_the_bilinear_form(geometry: str, shape: Shape) -> None:
    """The metrics upstairs, term by term as Knight (2026) writes them."""
    reference, generator = reference_at(geometry, shape, None)
    size = reference.spaces.root.shape[1]
    x, y = torch.randn(2, size, generator=generator, dtype=torch.float64)
    x_left, x_right = reference.unflatten(x)
    y_left, y_right = reference.unflatten(y)
    total = torch.zeros((), dtype=torch.float64)
    lefts = zip(
        reference.A,
        torch.split(x_left, reference.heights),
        torch.split(y_left, reference.heights),
        strict=True,
    )
    for a, xa, ya in lefts:
        rights = zip(
            reference.B,
            torch.split(x_right, reference.widths),
            torch.split(y_right, reference.widths),
            strict=True,
        )
        for b, xb, yb in rights:
            if geometry == "fixed-quotient":
                total += torch.trace(xa.T @ ya @ (b.T @ b)) + torch.trace(xb.T @ yb @ (a.T @ a))
            else:
                total += torch.trace(xa.T @ ya) + torch.trace(xb.T @ yb)
            if geometry == "isometry-canonical":
                total -= torch.trace(xa.T @ a @ a.T @ ya) / 2 + torch.trace(xb.T @ b @ b.T @ yb) / 2
    assert_equal(reference.metric(x, y), total)


@reference_geometries
def test_reference_spaces_split_the_tangent_space(geometry: str, shape: Shape) -> None:
    reference, generator = reference_at(geometry, shape, None)
    s = reference.spaces
    both = s.root @ torch.cat([s.vertical, s.horizontal], dim=1)
    assert both.shape[1] == s.tangent.shape[1]
    assert_equal(both.T @ both, torch.eye(both.shape[1], dtype=torch.float64))
    assert_equal(s.jacobian @ s.vertical, torch.zeros_like(s.jacobian @ s.vertical))
    # The vertical space is the gauge: (A S, −B Sᵀ), with S skew for isometries.
    gauge = torch.randn(reference.r, reference.r, generator=generator, dtype=torch.float64)
    if geometry in ISOMETRIES:
        gauge = gauge - gauge.T
    z = torch.cat([(reference.a @ gauge).flatten(), -(reference.b @ gauge.T).flatten()])
    assert_equal(s.vertical @ ((s.root @ s.vertical).T @ (s.root @ z)), z)


@reference_methods
def test_reference_tangent_vectors_are_velocities(
    geometry: str, retraction: str, shape: Shape
) -> None:
    """A retraction leaves along its tangent vector, with an error of second order."""
    reference, generator = reference_at(geometry, shape, retraction)
    xi = random_tangent(reference, generator)
    w, velocity = reference.a @ reference.b.T, reference.matrix(xi)

    def error(t: float) -> Tensor:
        a, b = reference.retract(t * xi)
        return a @ b.T - w - t * velocity

    sizes = [float(torch.linalg.matrix_norm(error(t))) for t in (2e-3, 1e-3, 5e-4)]
    scale = float(torch.linalg.matrix_norm(velocity))
    assert sizes[-1] < 1e-2 * 5e-4 * scale
    if reference.retraction == "svd" and reference.r == min(w.shape) and reference.fixed:
        assert sizes[0] < 1e-12  # nothing to truncate
    elif sizes[0] > 1e-12:
        assert all(3.8 < big / small < 4.2 for big, small in itertools.pairwise(sizes))
    if reference.retraction == "orthographic":
        below = reference.spaces.downstairs
        assert float((below.T @ error(0.05).flatten()).norm()) < 1e-12


@reference_methods
def test_reference_gradient_is_the_derivative(geometry: str, retraction: str, shape: Shape) -> None:
    """g(grad, h) is the derivative of the loss along the retraction of h."""
    reference, generator = reference_at(geometry, shape, retraction)
    loss = Loss(reference.W, reference.r, generator)
    gradient = reference.gradient(loss.gradient(reference.W))
    for _ in range(3):
        h = random_tangent(reference, generator)

        def along(t: float, h: Tensor = h) -> float:
            a, b = reference.retract(t * h)
            lefts, rights = torch.split(a, reference.heights), torch.split(b, reference.widths)
            return float(loss([[x @ y.T for y in rights] for x in lefts]))

        t = 1e-4
        slope = (8 * (along(t) - along(-t)) - (along(2 * t) - along(-2 * t))) / (12 * t)
        length = float(reference.metric(gradient, gradient) * reference.metric(h, h)) ** 0.5
        assert abs(slope - float(reference.metric(gradient, h))) < 1e-8 * length


@reference_methods
def test_reference_steps_keep_to_the_manifold(geometry: str, retraction: str, shape: Shape) -> None:
    """Points stay on the manifold, and transported momentum is tangent, by classical criteria."""
    reference, generator = reference_at(geometry, shape, retraction)
    loss = Loss(reference.W, reference.r, generator)
    for _ in range(3):
        reference.step(loss.gradient(reference.W))
        eye = torch.eye(reference.r, dtype=torch.float64)
        if geometry in ISOMETRIES:
            for factor in reference.A + reference.B:
                assert_equal(factor.T @ factor, eye)
        u, v = torch.linalg.qr(reference.a)[0], torch.linalg.qr(reference.b)[0]
        velocity = reference.matrix(reference.M)
        outside = velocity - u @ (u.T @ velocity)
        assert_equal(outside - outside @ v @ v.T, torch.zeros_like(outside))
        for i, a in enumerate(reference.A):
            for j, b in enumerate(reference.B):
                if geometry in ISOMETRIES:
                    rows = torch.split(velocity, reference.heights)[i]
                    core = a.T @ torch.split(rows, reference.widths, dim=1)[j] @ b
                    assert_equal(core, -core.T)


@reference_geometries
def test_reference_transport_is_the_projection_printed(geometry: str, shape: Shape) -> None:
    """The projections that Knight (2026) states with the definitions, in sections 3 to 5."""
    reference, generator = reference_at(geometry, shape, None)
    a, b = reference.a, reference.b
    count = (len(reference.A), len(reference.B))
    if reference.lives_downstairs:
        z = torch.randn(reference.m, reference.n, generator=generator, dtype=torch.float64)
        p, q = a @ torch.linalg.pinv(a), b @ torch.linalg.pinv(b)
        printed = p @ z + z @ q - p @ z @ q
        if geometry in ISOMETRIES:
            core = a.T @ z @ b
            printed = printed - a @ (core + core.T) @ b.T / 2
        assert_equal(reference.transport(z.flatten()), printed.flatten())
        return
    z = torch.randn(reference.M.shape, generator=generator, dtype=torch.float64)
    da, db = reference.unflatten(z)
    if geometry == "fixed-quotient":
        shift = (torch.linalg.pinv(a) @ da - (torch.linalg.pinv(b) @ db).T) / 2
        printed = torch.cat([(da - a @ shift).flatten(), (db + b @ shift.T).flatten()])
    else:
        moves = [*torch.split(da, reference.heights), *torch.split(db, reference.widths)]
        factors = reference.A + reference.B
        tangent = [d - f @ (f.T @ d + d.T @ f) / 2 for f, d in zip(factors, moves, strict=True)]
        weights = [count[1]] * count[0] + [count[0]] * count[1]
        turn = sum(
            (k * f.T @ d for k, f, d in zip(weights, factors, tangent, strict=True)),
            start=torch.zeros(reference.r, reference.r, dtype=torch.float64),
        ) / (2 * count[0] * count[1])
        printed = torch.cat(
            [(d - f @ turn).flatten() for f, d in zip(factors, tangent, strict=True)]
        )
    assert_equal(reference.transport(z), printed)
