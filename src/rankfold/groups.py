"""Parameter groups as users write them: dicts with grids, and the names grids go by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from .factors import Grid


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
