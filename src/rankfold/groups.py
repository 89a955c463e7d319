"""Parameter groups as users write them: dicts with grids, the names grids go by, options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import Tensor

from .factors import Grid
from .geometries import Geometry, StepOptions


def as_grid_list(group: dict[str, Any]) -> list[Grid]:
    """The grids of a parameter group as a user wrote it."""
    if not isinstance(group, dict):
        raise TypeError(f"expected a dict with the key 'grids', got {type(group).__name__}")
    if "grids" not in group:
        raise ValueError("a parameter group is a dict with the key 'grids', a list of Grid")
    grids = [group["grids"]] if isinstance(group["grids"], Grid) else list(group["grids"])
    if not grids:
        raise ValueError("a parameter group has no grids")
    for grid in grids:
        if not isinstance(grid, Grid):
            raise TypeError(
                f"expected a rankfold.Grid, got {type(grid).__name__}; a product of two parameters "
                "is rankfold.Grid(left, right)"
            )
    return grids


def name_grids(grids: Sequence[Grid], taken: Sequence[str]) -> list[str]:
    """Names as given, or the next free ``grid<k>``; no name twice."""
    used = set(taken)
    given = {grid.name for grid in grids}
    names: list[str] = []
    for grid in grids:
        name = grid.name
        if name is None:
            name = next(free for k in count() if (free := f"grid{k}") not in used | given)
        elif name in used:
            raise ValueError(f"two grids are named {name!r}; names tell members apart in messages")
        used.add(name)
        names.append(name)
    return names


def step_options(group: dict[str, Any], geometry: Geometry, largest: float) -> StepOptions:
    """A group's options as a step of ``geometry`` wants them; ``largest`` is what can be stored."""
    lr = group["lr"]
    return StepOptions(
        # 0-dim, so that a float64 learning rate does not widen float32 steps.
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        momentum=float(group["momentum"]),
        normalize=group["normalize"],
        norm_floor=group["norm_floor"],
        retraction=group["retraction"] or geometry.retractions[0],
        maximize=group["maximize"],
        gradient_repair=group["gradient_repair"],
        damping=group["damping"],
        trust_region=group["trust_region"],
        rank_floor=group["rank_floor"],
        capturable=group["capturable"],
        nesterov=group["nesterov"],
        momentum_form=group["momentum_form"],
        second_moment=group["second_moment"],
        bias_correction=group["bias_correction"],
        weight_decay=group["weight_decay"],
        decay_to=group["decay_to"],
        largest=largest,
    )
