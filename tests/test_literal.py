"""The library's steps against the appendix's own, momentum included, on every geometry."""

from __future__ import annotations

import pytest
import torch

from rankfold.bench.literal import literal_for
from rankfold.geometries import GEOMETRIES, geometry_for

from .points import GRIDS, Case, options, product

ALGORITHMS = [
    (name, grid, retraction)
    for name in GEOMETRIES
    for grid in GRIDS
    for retraction in geometry_for(name, *grid).retractions
    if retraction != "orthographic"  # the paper has no such step; the dense reference covers it
]


@pytest.mark.parametrize("normalize", ["metric", "spectral", None])
@pytest.mark.parametrize(("name", "grid", "retraction"), ALGORITHMS)
def test_five_steps_agree(
    name: str, grid: tuple[int, int], retraction: str, normalize: str | None
) -> None:
    case = Case(name, *grid, 8, 6, 3, seed=7)
    geometry, literal = case.geometry, literal_for(name, *grid)
    lr = 0.05 if normalize else 1e-3
    opts = options(retraction, lr, momentum=0.75, normalize=normalize)
    fast = slow = case.point()
    start = product(fast)
    momentum, state = type(fast)(*map(torch.zeros_like, fast)), None
    for k in range(5):
        outcome = geometry.step(fast, case.ambient(fast, 10 * k)[1], momentum, opts)
        assert outcome.momentum is not None
        fast, momentum = outcome.point, outcome.momentum
        slow, state = literal.step(slow, case.ambient(slow, 10 * k)[1], state, opts)
    travelled = torch.linalg.matrix_norm(product(fast) - start).min()
    error = torch.linalg.matrix_norm(product(fast) - product(slow)).max()
    assert error < 1e-11 * travelled
