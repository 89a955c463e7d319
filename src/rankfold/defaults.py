"""`recommended`: the optimizer to begin with, from one table."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from .adapters import attention_grids
from .factors import Grid
from .geometries import is_isometry
from .groups import as_grid_list, as_groups
from .optimizer import RiemannianSGD
from .schatten import WHITENED

# What met the goal of the contest for both models (docs/contest.md); rates are for 10,000 steps. Of
# fixed rank, since isometries would need factors that start orthonormal.
RECOMMENDED_NAME = "recommended"  # in the laboratory and the benchmark
RECOMMENDED: Mapping[str, Any] = MappingProxyType(
    {
        "geometry": "fixed-quotient",
        "normalize": WHITENED,
        "momentum": 0.8,
        "nesterov": True,
        "momentum_form": "unit-smoothing",
        "growth": 0.5,
        "tilt": 0.25,
        "row_balance": 0.5,
        "lr": 2.0**-8,
    }
)
# Of value weights beside query·key products, and of output weights beside value weights.
VALUE_OUTPUT_RATE = 4.0
OUTPUT_RATE = 2.0


def recommended(
    model_or_grids: nn.Module | Grid | Iterable[Grid] | Iterable[dict[str, Any]],
    lr: float | Tensor | None = None,
    *,
    vo_rate: float = VALUE_OUTPUT_RATE,
    output_rate: float = OUTPUT_RATE,
    **overrides: Any,
) -> RiemannianSGD:
    """The optimizer to begin with.

    Args:
        model_or_grids: a model, of which it takes `attention_grids`, or what `RiemannianSGD` takes.
        lr: learning rate: every singular value that a step of one factor changes in a product, at
            first. The default, 2⁻⁸, is for factors with singular values of about one, and runs of
            10,000 steps; for 1,000 take twice as much.
        vo_rate: what the `Grid.rate` of value·output products is multiplied by, unless their group
            has an ``lr`` of its own. These are known by their names, as `attention_grids` gives
            them: ``"….vo"``.
        output_rate: how much faster than value weights output weights go there, the left factors.
            Steps that are not whitened have one rate for both, that of the output weights.
        overrides: options of `RiemannianSGD`, in place of those recommended. What is recommended
            for whitened steps of fixed rank alone, or for a momentum, is left out of others. A tilt
            or a row balance that is asked for is for query·key products as well.

    The choice is fixed-quotient geometry, normalize "whitened", with a tilt of ¼ and a row balance
    of ½ for all but query·key products, growth ½, and momentum 0.8 of unit gradients with nesterov.
    Parameters outside of the products need an optimizer of their own, such as AdamW.
    """
    if isinstance(model_or_grids, nn.Module):
        model_or_grids = attention_grids(model_or_grids)
    if lr is not None:
        overrides["lr"] = lr
    groups = []
    for given in as_groups(model_or_grids):
        grids = as_grid_list(given)
        chosen = _completed({**overrides, **given})
        if not {"tilt", "row_balance"} & (overrides.keys() | given.keys()):
            grids = [_untilted(grid) if _is(grid, "qk") else grid for grid in grids]
        if "lr" not in given:
            apart = chosen["normalize"] == WHITENED
            grids = [_at_rates(grid, vo_rate, output_rate, apart) for grid in grids]
        groups.append({**{name: chosen[name] for name in _CONDITIONAL}, **given, "grids": grids})
    return RiemannianSGD(groups, **_completed(overrides))


_CONDITIONAL = ("nesterov", "momentum_form", "growth", "tilt", "row_balance")


def _completed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options asked for, and what is recommended beside them."""
    chosen = {**RECOMMENDED, **asked}
    unsuited: set[str] = set()
    if not chosen["momentum"]:
        unsuited |= {"nesterov", "momentum_form"}
    if is_isometry(chosen["geometry"]) or chosen["normalize"] != WHITENED:
        unsuited |= {"momentum_form", "growth", "tilt", "row_balance"}
    if chosen.get("damping"):  # for products that start at zero, and would not grow
        unsuited.add("growth")
    plain = signature(RiemannianSGD).parameters
    chosen |= {name: plain[name].default for name in unsuited - asked.keys()}
    return chosen


def is_value_output(grid: Grid) -> bool:
    """Whether it is of value·output products, by its name."""
    return _is(grid, "vo")


def _is(grid: Grid, kind: str) -> bool:
    return str(grid.name).rpartition(".")[2] == kind


def _untilted(grid: Grid) -> Grid:
    """A copy that goes without tilt and row balance."""
    plain = copy.copy(grid)
    plain.tilted = False
    return plain


def _at_rates(grid: Grid, vo_rate: float, output_rate: float, apart: bool) -> Grid:
    """A copy of value·output products, at rates of their own, of both factors ``apart`` or one."""
    if not is_value_output(grid):
        return grid
    faster = copy.copy(grid)
    if apart:
        outputs, values = grid.sides
        faster.rate, faster.sides = vo_rate * grid.rate, (output_rate * outputs, values)
    else:
        faster.rate = vo_rate * output_rate * grid.rate
    return faster
