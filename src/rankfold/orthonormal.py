"""orthonormalize_: bring the factors of grids onto the isometry manifold."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from .checks import check_full_rank, orthonormal_tolerance, orthonormality_defect
from .factors import Grid
from .geometries import Pair
from .groups import listed
from .precision import exact_arithmetic
from .stacks import Plan


def _polar(blocks: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(blocks.double(), full_matrices=False)
    result: Tensor = u @ vh
    return result


def orthonormalize_(grids: Grid | Iterable[Grid]) -> None:
    """Replace every factor by the nearest one with orthonormal columns, in place.

    Factors are treated one by one (their polar factor, computed in float64), so afterwards every
    ``W_ij = A_i B_jᵀ`` is a partial isometry, as the isometry geometries need. Meant for freshly
    initialised models: it sets all singular values to one, so it changes the function of a model
    that has been trained, and warns when the change is more than rounding.
    """
    every = listed(grids)
    if not every:
        raise ValueError("orthonormalize_ got no grids")
    plan = Plan([(grid.name or f"grid{k}", grid) for k, grid in enumerate(every)])
    with torch.no_grad(), exact_arithmetic(plan.device_types):
        weights = plan.gather(lambda p: p)
        points = [stack.read(weights) for stack in plan.stacks]
        for stack, point in zip(plan.stacks, points, strict=True):
            check_full_rank(stack.members, point)
        changed = any(
            orthonormality_defect(side).max().item() > orthonormal_tolerance(stack.rounded)
            for stack, point in zip(plan.stacks, points, strict=True)
            for side in point
        )
        for stack, point in zip(plan.stacks, points, strict=True):
            stack.write(weights, Pair(_polar(point.left), _polar(point.right)))
        plan.scatter(weights, lambda p: p)
    if changed:
        warnings.warn(
            "orthonormalize_ set all singular values of the products to one, which changes the "
            "function of a trained model; it is meant for models about to be trained",
            stacklevel=2,
        )
