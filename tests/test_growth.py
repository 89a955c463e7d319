"""Steps that grow with products, against the dense reference and by what defines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD

from .beyond import SHAPES, check
from .problems import Case
from .reference import FIXED

every_geometry = pytest.mark.parametrize("geometry", FIXED)


def case(geometry: str, shape: str, **options: Any) -> Case:
    heights, widths, rank = SHAPES[shape]
    return Case(geometry, heights=heights, widths=widths, rank=rank, **options)


@every_geometry
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("growth", [0.5, 1.0])
@pytest.mark.parametrize("normalize", ["metric", "spectral", None])
def test_growing_steps(geometry: str, shape: str, growth: float, normalize: str | None) -> None:
    check(case(geometry, shape, momentum=0.5, normalize=normalize), growth=growth)


@every_geometry
@pytest.mark.parametrize("momentum", [0.0, 0.875])
def test_in_float32(geometry: str, momentum: float) -> None:
    check(case(geometry, "ragged", momentum=momentum), torch.float32, growth=0.5)


@every_geometry
def test_with_other_options(geometry: str) -> None:
    chosen = case(geometry, "ragged", momentum=0.5)
    check(chosen, growth=0.5, momentum_form="heavy-ball", nesterov=True)
    check(chosen, growth=0.5, second_moment=0.75, bias_correction=True)
    # The rate that singular values decay by is not that of the step.
    check(chosen, growth=0.5, shrink=0.05)


def moved(geometry: str, gauge: Tensor, size: float, **options: Any) -> Tensor:
    """What a step adds to ``size`` times a product, whose factors are written in a gauge."""
    generator = torch.Generator().manual_seed(0)
    left, right, slope = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((9, 3), (7, 3), (9, 7))
    )
    a = nn.Parameter(size * left @ gauge)
    b = nn.Parameter(right @ torch.linalg.inv(gauge).mT)
    optimizer = RiemannianSGD(Grid(a, b), 1e-6, geometry=geometry, **options)
    before = (a @ b.mT).detach()
    torch.autograd.backward((a @ b.mT * slope).sum())
    optimizer.step()
    return (a @ b.mT).detach() - before


@every_geometry
@pytest.mark.parametrize("normalize", ["metric", "whitened"])
@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
def test_a_step_is_as_long_as_it_should_be(geometry: str, normalize: str, growth: float) -> None:
    """16 times the product, 16^growth times the step; whatever factors it is written in."""
    eye = torch.eye(3, dtype=torch.float64)
    gauge = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.1, 0.3], [1.0, 0.0, 5.0]], dtype=torch.float64)
    options = {"normalize": normalize, "growth": growth}
    one, large = moved(geometry, eye, 1.0, **options), moved(geometry, gauge, 16.0, **options)
    assert (large - 16**growth * one).norm() < 1e-5 * large.norm()
