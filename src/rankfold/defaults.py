"""`recommended`: the optimizer to begin with, from one table."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from .adapters import attention_grids
from .factors import Grid
from .groups import as_grid_list, as_groups
from .optimizer import RiemannianSGD

# Provisional: from the contest's tuning on one seed, until it is run whole (docs/lab.md). Of fixed
# rank, since isometries would need factors that start orthonormal.
RECOMMENDED: Mapping[str, Any] = MappingProxyType(
    {
        "geometry": "fixed-quotient",
        "normalize": "whitened",
        "momentum": 0.8,
        "nesterov": True,
        "lr": 2.0**-8,
    }
)
VALUE_OUTPUT_RATE = 8.0


def recommended(
    model_or_grids: nn.Module | Grid | Iterable[Grid] | Iterable[dict[str, Any]],
    lr: float | Tensor | None = None,
    *,
    vo_rate: float = VALUE_OUTPUT_RATE,
    **overrides: Any,
) -> RiemannianSGD:
    """The optimizer to begin with.

    Args:
        model_or_grids: a model, of which it takes `attention_grids`, or what `RiemannianSGD` takes.
        lr: learning rate: every singular value that a step of one factor changes in a product. The
            default, 2⁻⁸, is for factors with singular values of about one.
        vo_rate: what the `Grid.rate` of value·output products is multiplied by, unless their group
            has an ``lr`` of its own. These are known by their names, as `attention_grids` gives
            them: ``"….vo"``.
        overrides: options of `RiemannianSGD`, in place of those recommended. Without a momentum
            there is no nesterov either.

    The choice is fixed-quotient geometry, normalize "whitened", momentum 0.8 and nesterov. It is
    provisional: from the contest's tuning on one seed. Parameters outside of the products need an
    optimizer of their own, such as AdamW.
    """
    if isinstance(model_or_grids, nn.Module):
        model_or_grids = attention_grids(model_or_grids)
    options = {**RECOMMENDED, **overrides}
    if not options["momentum"]:  # there is nothing to look ahead along
        options["nesterov"] = overrides.get("nesterov", False)
    if lr is not None:
        options["lr"] = lr
    groups = [{**group, "grids": as_grid_list(group)} for group in as_groups(model_or_grids)]
    for group in groups:
        if "lr" not in group:
            group["grids"] = [_at_rate(grid, vo_rate) for grid in group["grids"]]
    return RiemannianSGD(groups, **options)


def is_value_output(grid: Grid) -> bool:
    """Whether it is of value·output products, by its name."""
    return str(grid.name).rpartition(".")[2] == "vo"


def _at_rate(grid: Grid, vo_rate: float) -> Grid:
    if not is_value_output(grid):
        return grid
    faster = copy.copy(grid)
    faster.rate = vo_rate * grid.rate
    return faster
