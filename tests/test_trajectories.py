"""Trajectories of the products W_ij, against a dense reference built from the definitions.

The optimizer differentiates a smooth loss of the products through its own factors; the reference
gets the dense gradient of the same loss at its own point. They never exchange anything after the
start. In float64 the two must agree, block by block and step by step, to 1e-9 of the distance
travelled; in float32 to 1e-4 of the size of the block. The path stays within a quarter of the
smallest nonzero singular value of the blocks at the start, inside the domain of every retraction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import rankfold

from .problems import (
    Blocks,
    Case,
    Loss,
    methods,
    smallest_singular_value,
    starting_factors,
)
from .reference import FIXED, GEOMETRIES, Reference

STEPS = 6
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


# The two trajectories ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the reference did: the start, the learning rate, and W after 0, 1, ..., 6 steps."""

    left: list[Tensor]
    right: list[Tensor]
    loss: Loss
    lr: float
    floored: bool  # whether the first gradient is shorter than the norm's floor
    trajectory: list[Blocks]


@functools.lru_cache(maxsize=4)
def expected(case: Case) -> Expected:
    """The reference trajectory, at a learning rate that spends most of the path allowed."""
    generator = case.generator()
    left, right = starting_factors(case, generator)
    reference = Reference(
        case.geometry,
        left,
        right,
        lr=1.0,
        momentum=case.momentum,
        normalize=case.normalize,
        norm_floor=case.norm_floor,
        retraction=case.retraction,
        nesterov=case.nesterov,
    )
    start = reference.W
    loss = Loss(start, case.rank, generator)
    allowed = smallest_singular_value(start, case.rank) / 4

    gradient = reference.gradient(loss.gradient(start))
    length = float(torch.linalg.matrix_norm(reference.matrix(gradient)))
    divisor = reference.divisor(gradient)
    floored = divisor == case.norm_floor
    # Without a norm to divide by the first steps are shorter: momentum fades in.
    fade = case.momentum if case.normalize is None or floored else 0.0
    steps = sum(case.decay**t * (1 - fade ** (t + 1)) for t in range(STEPS))
    lr = reference.lr = 0.9 * allowed / steps * divisor / length

    trajectory = [start]
    for _ in range(STEPS):
        reference.step(loss.gradient(reference.W))
        reference.lr *= case.decay
        trajectory.append(reference.W)
    path = sum(distance(old, new) for old, new in itertools.pairwise(trajectory))
    assert allowed / 2 < path <= allowed
    return Expected(left, right, loss, lr, floored, trajectory)


def distance(old: Blocks, new: Blocks) -> float:
    """The Frobenius distance of two collections of blocks."""
    squares = [
        ((u - v) ** 2).sum()
        for old_row, new_row in zip(old, new, strict=True)
        for u, v in zip(old_row, new_row, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt())


def library_trajectory(case: Case, want: Expected, dtype: torch.dtype) -> Iterator[Blocks]:
    """W after each step of the optimizer, multiplied out in float64."""
    left = [nn.Parameter(a.to(dtype, copy=True)) for a in want.left]
    right = [nn.Parameter(b.to(dtype, copy=True)) for b in want.right]
    optimizer = rankfold.RiemannianSGD(
        [rankfold.Grid(left, right)],
        lr=want.lr,
        geometry=case.geometry,
        momentum=case.momentum,
        normalize=case.normalize,
        norm_floor=case.norm_floor,
        retraction=case.retraction,
        nesterov=case.nesterov,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(want.loss([[a @ b.T for b in right] for a in left]))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= case.decay
        yield [[a.detach().double() @ b.detach().double().T for b in right] for a in left]


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare the two trajectories, block by block, after every step."""
    want = expected(case)
    start = want.trajectory[0]
    steps = zip(want.trajectory[1:], library_trajectory(case, want, dtype), strict=True)
    for t, (there, here) in enumerate(steps, start=1):
        for i, j in itertools.product(range(len(case.heights)), range(len(case.widths))):
            error = torch.linalg.matrix_norm(here[i][j] - there[i][j])
            travelled = there[i][j] - start[i][j] if dtype == torch.float64 else there[i][j]
            relative = float(error / torch.linalg.matrix_norm(travelled))
            assert relative <= TOLERANCE[dtype], f"W_{i}{j} is off by {relative:.1e} at step {t}"


def parametrize(cases: list[Case], dtypes: tuple[torch.dtype, ...]) -> pytest.MarkDecorator:
    """Run every case in every dtype, the dtypes side by side so that they share a reference."""
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
            for case, dtype in itertools.product(cases, dtypes)
        ],
    )


BOTH = (torch.float64, torch.float32)
GRIDS = {
    "1x1": ((7,), (5,)),
    "4x1": ((5, 5, 5, 5), (6,)),
    "1x3": ((6,), (4, 4, 4)),
    "2x3": ((5, 5), (4, 4, 4)),
    "ragged": ((4, 7, 2), (5, 3)),
}
NORMALIZATIONS: tuple[str | None, ...] = ("metric", "spectral", None)


OPTIONS = [
    Case(geometry, retraction, normalize, momentum, heights, widths)
    for heights, widths in GRIDS.values()
    for geometry, retraction in methods(heights, widths)
    for normalize in NORMALIZATIONS
    for momentum in (0.0, 0.125, 0.875)
]


@parametrize(OPTIONS, BOTH)
def test_every_option_on_every_grid(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(
    [
        dataclasses.replace(case, nesterov=True)
        for case in OPTIONS
        if case.normalize is not None and case.momentum > 0
    ],
    BOTH,
)
def test_nesterov(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


# m > n, m < n, m = n, r = 1, r = min(m, n), on one block and on grids.
SHAPES = [
    ((14,), (4,), 3),
    ((4,), (14,), 3),
    ((8,), (8,), 3),
    ((6,), (5,), 1),
    ((1,), (5,), 1),
    ((9,), (3,), 3),
    ((3,), (9,), 3),
    ((4,), (4,), 4),
    ((12, 12), (4, 4, 4), 3),
    ((4, 4), (9, 9, 9), 3),
    ((5, 5), (5, 5), 4),
    ((5, 3), (4, 2, 1), 1),
    ((3, 8), (6, 3, 5), 3),
    ((3, 3), (3, 3, 3), 3),
]


@parametrize(
    [
        Case(geometry, retraction, normalize, momentum, heights, widths, rank)
        for heights, widths, rank in SHAPES
        for geometry, retraction in methods(heights, widths)
        for normalize, momentum in (("metric", 0.875), ("spectral", 0.125))
    ],
    BOTH,
)
def test_shapes(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def conditioned(condition: float, starts: tuple[str, ...]) -> list[Case]:
    """The fixed-rank methods, single and on a ragged grid, at one condition number."""
    return [
        Case(geometry, retraction, normalize, momentum, heights, widths, 4, condition, start=start)
        for heights, widths in [((14,), (9,)), ((9,), (12,)), ((6, 9), (7, 4, 6))]
        for geometry, retraction in methods(heights, widths)
        if geometry in FIXED
        for normalize, momentum in (("metric", 0.875), ("spectral", 0.125), (None, 0.875))
        for start in starts
    ]


@parametrize(conditioned(1e3, ("balanced", "left", "right")), (torch.float64,))
def test_conditioning_up_to_1e3_in_float64(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(conditioned(30.0, ("balanced", "left", "right")), (torch.float32,))
def test_conditioning_up_to_30_in_float32(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(conditioned(1.0, ("orthonormal", "balanced", "left")), BOTH)
def test_repeated_singular_values(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(
    [
        Case(geometry, retraction, normalize, 0.875, heights, widths, norm_floor=300.0)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry, retraction in methods(heights, widths)
        for normalize in ("metric", "spectral")
    ],
    BOTH,
)
def test_the_norm_floor(case: Case, dtype: torch.dtype) -> None:
    """Below the floor steps shrink with the momentum, and its norm plays no part."""
    assert expected(case).floored
    check(case, dtype)


@parametrize(
    [
        Case(geometry, retraction, normalize, heights=heights, widths=widths, decay=0.5)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry, retraction in methods(heights, widths)
        for normalize in NORMALIZATIONS
    ],
    BOTH,
)
def test_a_falling_learning_rate(case: Case, dtype: torch.dtype) -> None:
    """Normalized, the first step takes nearly half of the path: retractions have the most to do."""
    check(case, dtype)


@parametrize(
    [
        Case(geometry, None, heights=heights, widths=widths)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry in GEOMETRIES
    ],
    (torch.float64,),
)
def test_the_default_retraction(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_the_problems_are_as_hard_as_they_say() -> None:
    for condition in (1.0, 30.0, 1e3):
        for case in conditioned(condition, ("balanced", "left", "right")):
            left, right = starting_factors(case, case.generator())
            for a, b in itertools.product(left, right):
                s = torch.linalg.svdvals(a @ b.T)[: case.rank]
                assert condition / 1.7 < float(s[0] / s[-1]) < condition * 1.7
