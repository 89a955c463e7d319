"""Orthonormality over thousands of float32 steps: errors of one step are repaired by the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold.checks import orthonormality_defect
from rankfold.geometries import Pair, geometry_for

from .points import options, product

ALGORITHMS = [
    ("isometry-embedded", 1, "svd"),
    ("isometry-embedded", 3, "polar"),
    ("isometry-embedded", 3, "qr"),
    ("isometry-quotient", 1, "polar"),
    ("isometry-quotient", 1, "qr"),
    ("isometry-canonical", 1, "polar"),
    ("isometry-canonical", 1, "qr"),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("geometry", "lefts", "retraction"), ALGORITHMS)
def test_factors_stay_orthonormal_for_2000_steps(
    geometry: str, lefts: int, retraction: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)

    def orthonormal(rows: int) -> nn.Parameter:
        random = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
        return nn.Parameter(torch.linalg.qr(random).Q.to(dtype))

    left, right = [orthonormal(64) for _ in range(lefts)], [orthonormal(48)]
    noise = torch.randn(32, lefts, 64, 48, generator=generator)
    optimizer = rankfold.RiemannianSGD(
        [rankfold.Grid(left, right)],
        2**-5,
        geometry=geometry,
        momentum=0.9,
        retraction=retraction,
    )
    worst = 0.0
    for step in range(2000):
        # A fresh direction each step, so that the path wanders and never settles.
        for i, a in enumerate(left):
            a.grad = (noise[step % 32, i] @ right[0].detach().float()).to(dtype)
        right[0].grad = sum(
            (noise[step % 32, i].T @ a.detach().float() for i, a in enumerate(left)),
            torch.zeros(48, 16),
        ).to(dtype)
        optimizer.step()
        if step % 100 == 99:
            worst = max(worst, *(stored_defect(optimizer, p) for p in (*left, *right)))
    assert worst < 1e-6


def stored_defect(optimizer: torch.optim.Optimizer, param: Tensor) -> float:
    """Of the parameter, or of its master where it has one."""
    return orthonormality_defect(optimizer.state[param].get("master", param)).item()


def test_a_step_is_little_further_off_than_its_result_is_rounded() -> None:
    """Of large rank, where matrices near I are summed from many small terms beside a 1."""
    generator = torch.Generator().manual_seed(0)
    geometry = geometry_for("isometry-embedded", 1, 1)
    told = options("svd", 0.02, momentum=0.0)
    point, grad = (
        Pair(*(torch.randn(3, 1, rows, 70, generator=generator) for rows in (90, 80)))
        for _ in range(2)
    )
    point = Pair(*(torch.linalg.qr(x).Q for x in point))
    at, along = (Pair(*(x.double() for x in pair)) for pair in (point, grad))
    exact = geometry.step(at, along, None, told).point
    rounded = Pair(*(x.float() for x in exact))
    found = geometry.step(point, grad, None, told).point
    off, least = (
        torch.linalg.matrix_norm(product(each).double() - product(exact))
        for each in (found, rounded)
    )
    assert (off < 1.5 * least).all()


@pytest.mark.parametrize("length", [1.0, 1e2, 1e4, 1e6])
def test_a_long_step_is_no_further_off_than_a_short_one(length: float) -> None:
    """Along X Vᵀ, which leaves rank r as it is, so that the polar factor of U + X is the result."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(5, 1, rows, 4, generator=generator)).Q for rows in (12, 9))
    x = torch.randn(5, 1, 12, 4, generator=generator)
    x = x - u @ (u.mT @ x)
    told = options("svd", length, momentum=0.0)
    geometry = geometry_for("isometry-embedded", 1, 1)
    found = geometry.step(Pair(u, v), Pair(x, torch.zeros_like(v)), None, told).point
    norm = torch.linalg.matrix_norm(x.double(), keepdim=True)
    left, _, right = torch.linalg.svd(u.double() - length * x.double() / norm, full_matrices=False)
    off = product(found).double() - (left @ right @ v.double().mT)[:, 0]
    assert torch.linalg.matrix_norm(off, ord=2).max() < 16 * torch.finfo(torch.float32).eps
