"""Each diagnostic number against a dense computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold.diagnostics import measure
from rankfold.geometries import GEOMETRIES, Pair
from rankfold.linalg import skew

from .points import Case, options, product, stacked
from .reference import Reference

SHAPES = [(1, 1), (2, 3)]
every_geometry = pytest.mark.parametrize("name", GEOMETRIES)
every_case = pytest.mark.parametrize(
    "case", [Case(name, *grid, 7, 5, 3, seed=4) for name in GEOMETRIES for grid in SHAPES], ids=str
)


def reference(case: Case, point: Pair, member: int, **changes: Any) -> Reference:
    """The dense reference at one member of a batch."""
    left, right = point.left[member], point.right[member]
    return Reference(case.name, list(left), list(right), lr=0.3, momentum=0.5, **changes)


def blocks(case: Case, z: Tensor) -> list[list[Tensor]]:
    """(I·m, J·n) as its blocks."""
    return [list(torch.split(row, case.n, 1)) for row in torch.split(z, case.m, 0)]


def upstairs(pair: Pair, member: int) -> Tensor:
    """One member's pair as the reference's vector (N,)."""
    return torch.cat([x[member].flatten() for x in pair])


def fro(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def measured(case: Case, point: Pair, grad: Pair, momentum: Pair | None, **changes: Any) -> Any:
    """The outcome of a step of lr 0.3, and its numbers."""
    opts = options(case.geometry.retractions[0], 0.3, **changes)
    outcome = case.geometry.step(point, grad, momentum, opts)
    return outcome, measure(case.geometry, point, grad, momentum, outcome, opts)


@every_case
def test_singular_values_are_those_of_the_worst_block_after_the_step(case: Case) -> None:
    point = case.point()
    if not case.geometry.isometry:  # one block far worse than the others
        point.left[0, -1] *= torch.tensor([1.0, 1e-3, 1.0], dtype=torch.float64)
    outcome, found = measured(case, point, case.ambient(point, 10)[1], None)
    for side, new in zip(("left", "right"), outcome.point, strict=True):
        for k in range(2):
            values = [torch.linalg.svdvals(block) for block in new[k]]
            smallest = min(float(v[-1]) for v in values)
            condition = max(float(v[0] / v[-1]) for v in values)
            assert found[f"{side}_smallest_singular_value"][k] == pytest.approx(smallest, rel=1e-6)
            assert found[f"{side}_condition"][k] == pytest.approx(condition, rel=1e-6)
    assert ("left_orthogonality_defect" in found) == case.geometry.isometry


@pytest.mark.parametrize("name", ["isometry-embedded", "isometry-quotient", "isometry-canonical"])
def test_orthogonality_defect_is_the_spectral_norm_of_the_worst_block(name: str) -> None:
    case = Case(name, 2, 3, 7, 5, 3, seed=1)
    point = case.point()
    outcome, _ = measured(case, point, case.ambient(point, 10)[1], None)
    # The library leaves nothing to see: spoil what the step returned.
    for k, side in enumerate(outcome.point):
        side[:, -1] += 0.01 * (k + 1) * case.random(20)[k][:, -1]
    opts = options(case.geometry.retractions[0])
    found = measure(case.geometry, point, case.random(3), None, outcome, opts)
    for side, new in zip(("left", "right"), outcome.point, strict=True):
        defect = torch.linalg.matrix_norm(new.mT @ new - torch.eye(3), ord=2).amax(1)
        assert defect.min() > 1e-3
        torch.testing.assert_close(found[f"{side}_orthogonality_defect"], defect)


@every_case
def test_gradient_inconsistency_is_its_formula(case: Case) -> None:
    point, grad = case.point(), case.random(10)  # unrelated: no function has these gradients
    _, found = measured(case, point, grad, None)
    _, right = measured(case, point, case.ambient(point, 10)[1], None)
    for k in range(2):
        left = stacked(point.left)[k].T @ stacked(grad.left)[k]
        other = (stacked(point.right)[k].T @ stacked(grad.right)[k]).T
        if case.geometry.isometry:
            left, other = skew(left), skew(other)
        expected = fro(left - other) / (fro(left) + fro(other))
        assert expected > 0.1
        assert found["gradient_inconsistency"][k] == pytest.approx(expected, rel=1e-9)
        assert right["gradient_inconsistency"][k] < 1e-13


@every_case
def test_overlaps_that_are_only_rounding_are_not_inconsistent(case: Case) -> None:
    point = case.point()
    grad = case.random(10)
    # Orthogonal to the factors but for noise like that of bfloat16.
    clean = Pair(*(g - p @ torch.linalg.pinv(p) @ g for g, p in zip(grad, point, strict=True)))
    noise = case.random(20)
    grad = Pair(*(g * (1 + 2**-9 * e) for g, e in zip(clean, noise, strict=True)))
    _, found = measured(case, point, grad, None)
    assert (found["gradient_inconsistency"] < 0.1).all()
    _, nothing = measured(case, point, Pair(*map(torch.zeros_like, point)), None)
    assert (nothing["gradient_inconsistency"] == 0).all()


@pytest.mark.parametrize("name", ["fixed-embedded", "isometry-embedded"])
def test_momentum_decoherence_is_its_formula(name: str) -> None:
    for grid in SHAPES if name == "fixed-embedded" else SHAPES[:1]:
        case = Case(name, *grid, 7, 5, 3, seed=2)
        point, momentum = case.point(), case.random(30)
        grad = case.ambient(point, 10)[1]
        _, found = measured(case, point, grad, momentum)
        outcome, _ = measured(case, point, grad, Pair(*map(torch.zeros_like, point)))
        _, kept = measured(case, outcome.point, grad, outcome.momentum)
        for k in range(2):
            left = stacked(point.left)[k].T @ stacked(momentum.left)[k]
            other = (stacked(point.right)[k].T @ stacked(momentum.right)[k]).T
            if case.geometry.isometry:
                left, other = skew(left), skew(other)
            expected = fro(left - other) / (fro(left) + fro(other))
            assert found["momentum_decoherence"][k] == pytest.approx(expected, rel=1e-9)
            assert kept["momentum_decoherence"][k] < 1e-12
        assert "momentum_horizontality" not in found


@every_case
def test_deskewing_and_horizontality_are_the_parts_that_are_not_tangent(case: Case) -> None:
    point, momentum = case.point(), case.random(30)
    _, found = measured(case, point, case.ambient(point, 10)[1], momentum)
    assert ("momentum_deskewing" in found) == case.geometry.isometry
    for k in range(2):
        s = reference(case, point, k).spaces
        z = upstairs(momentum, k)
        tangent = s.tangent @ (s.tangent.T @ z)
        vertical = s.vertical @ ((s.root @ s.vertical).T @ (s.root @ tangent))
        rows = case.lefts * case.m * case.r
        weights = torch.full_like(z, math.sqrt(case.lefts))
        weights[:rows] = math.sqrt(case.rights)
        if case.geometry.isometry:
            expected = fro(weights * (z - tangent)) / fro(weights * z)
            assert expected > 0.1
            assert found["momentum_deskewing"][k] == pytest.approx(expected, rel=1e-9)
        if "momentum_horizontality" not in found:
            assert "momentum_decoherence" in found
            continue
        if case.geometry.isometry:
            expected = fro(weights * vertical) / fro(weights * z)
        else:
            expected = fro(s.root @ vertical) / fro(s.root @ z)
        assert expected > 0.01
        assert found["momentum_horizontality"][k] == pytest.approx(expected, rel=1e-9)


def past_and_present(case: Case, point: Pair, z: Tensor, normalize: str | None) -> Any:
    """A momentum for the library, and for each member a reference, its gradient and its step."""
    past = case.ambient(point, 40)[0]
    dense = [reference(case, point, k, normalize=normalize) for k in range(2)]
    if dense[0].lives_downstairs:
        before = [ref.transport(x.flatten()) for ref, x in zip(dense, past, strict=True)]
        m = torch.stack(before).view_as(past)
        momentum = Pair(
            (m @ stacked(point.right)).view_as(point.left),
            (m.mT @ stacked(point.left)).view_as(point.right),
        )
    else:
        momentum = case.random(30)
        before = [upstairs(momentum, k) for k in range(2)]
    members = []
    for k, ref in enumerate(dense):
        gradient = ref.gradient(blocks(case, z[k]))
        vector = 0.5 * ref.transport(before[k]) + 0.5 * gradient
        members.append((ref, gradient, 0.3 * vector / ref.divisor(vector)))
    return momentum, members


every_norm = pytest.mark.parametrize("normalize", ["metric", "spectral", None])


@every_case
@every_norm
def test_norms_of_the_gradient_and_the_step(case: Case, normalize: str | None) -> None:
    point = case.point()
    z, grad = case.ambient(point, 10)
    momentum, members = past_and_present(case, point, z, normalize)
    _, found = measured(case, point, grad, momentum, normalize=normalize)
    for k, (ref, gradient, step) in enumerate(members):
        for what, x in (("gradient", gradient), ("step", step)):
            metric, spectral = ref.metric(x, x).sqrt(), torch.linalg.matrix_norm(ref.matrix(x), 2)
            assert found[f"{what}_metric_norm"][k] == pytest.approx(float(metric), rel=1e-8)
            assert found[f"{what}_spectral_norm"][k] == pytest.approx(float(spectral), rel=1e-8)


@every_case
@every_norm
def test_step_share_is_the_step_over_its_bound(case: Case, normalize: str | None) -> None:
    point = case.point()
    z, grad = case.ambient(point, 10)
    momentum, members = past_and_present(case, point, z, normalize)
    _, found = measured(case, point, grad, momentum, normalize=normalize)
    for k, (ref, _, step) in enumerate(members):
        share = expected_share(case, ref, step)
        if share is None:
            assert "step_share" not in found
        else:  # the library bounds spectral norms from above, by at most 1%
            assert share * (1 - 1e-6) <= found["step_share"][k] <= 1.011 * share


def expected_share(case: Case, ref: Reference, step: Tensor) -> float | None:
    """The step over its bound, by the definitions; None where there is none."""
    if case.geometry.isometry:
        return (
            float(torch.linalg.matrix_norm(ref.matrix(step), 2)) if ref.lives_downstairs else None
        )
    if case.name == "fixed-quotient":
        moves = ref.unflatten(step)
        pieces = zip(
            ref.A + ref.B,
            [*torch.split(moves[0], case.m), *torch.split(moves[1], case.n)],
            strict=True,
        )
        return max(float(torch.linalg.matrix_norm(torch.linalg.pinv(a) @ x, 2)) for a, x in pieces)
    last = [float(torch.linalg.svdvals(w)[case.r - 1]) for row in ref.W for w in row]
    whole = float(torch.linalg.svdvals(ref.a @ ref.b.T)[case.r - 1])
    size = float(torch.linalg.matrix_norm(ref.matrix(step), 2))
    return size * (1 / min(last) + 1 / whole)


def test_the_share_is_of_the_step_that_was_made() -> None:
    case = Case("fixed-quotient", 1, 1, 7, 5, 3, seed=0)
    point = case.point()
    grad = case.ambient(point, 10)[1]
    _, free = measured(case, point, grad, None, normalize=None)
    outcome, held = measured(case, point, grad, None, normalize=None, trust_region=0.25)
    assert (free["step_share"] > 1).all()
    torch.testing.assert_close(held["step_share"], torch.full((2,), 0.25, dtype=torch.float64))
    moved = product(outcome.point) - product(point)
    assert (held["step_metric_norm"] < 0.5 * free["step_metric_norm"]).all()
    assert moved.isfinite().all()


@every_case
def test_a_member_of_nan_is_measured_without_touching_the_other(case: Case) -> None:
    point = case.point()
    grad = case.ambient(point, 10)[1]
    _, right = measured(case, point, grad, None)
    point.left[0] = math.nan  # an eigensolver gives up on this, for the whole batch
    _, found = measured(case, point, grad, None)
    assert found["left_condition"][0].isnan()
    for name, values in right.items():
        torch.testing.assert_close(found[name][1], values[1])
