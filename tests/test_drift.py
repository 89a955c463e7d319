"""Orthonormality over thousands of float32 steps: errors of one step are repaired by the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold.checks import orthonormality_defect

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
