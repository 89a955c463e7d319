"""The recommended optimizer is its table, on a model or on grids, and gives way to options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankfold
from rankfold.defaults import RECOMMENDED

from .heads import Heads
from .whole_models import opt


def options_of(optimizer: rankfold.RiemannianSGD) -> dict[str, object]:
    return {name: optimizer.param_groups[0][name] for name in RECOMMENDED}


def test_a_model_gets_its_attention_products() -> None:
    model = nn.TransformerEncoderLayer(16, 2)
    optimizer = rankfold.recommended(model)
    assert options_of(optimizer) == RECOMMENDED
    grids = rankfold.attention_grids(model)
    assert optimizer.param_groups[0]["grid_names"] == [grid.name for grid in grids]
    assert not rankfold.geometries.is_isometry(RECOMMENDED["geometry"])


def test_value_output_products_take_longer_steps() -> None:
    """Though both kinds lie in one weight; the grids given are left as they are."""
    model = nn.TransformerEncoderLayer(16, 2)
    grids = rankfold.attention_grids(model)
    for optimizer, values, outputs in (
        (rankfold.recommended(model), 4.0, 8.0),
        (rankfold.recommended(grids, vo_rate=2.0), 2.0, 4.0),
        (rankfold.recommended([{"grids": grids}], vo_rate=1.0, output_rate=1.0), 1.0, 1.0),
        (rankfold.recommended(grids, normalize="metric"), 8.0, 8.0),
    ):
        rates = {
            grid.name: tuple(grid.rate * side for side in grid.sides)
            for grid in optimizer.param_groups[0]["grids"]
        }
        assert rates == {"self_attn.qk": (1.0, 1.0), "self_attn.vo": (outputs, values)}
    assert [(grid.rate, grid.sides) for grid in grids] == 2 * [(1.0, (1.0, 1.0))]


def test_query_key_products_are_not_tilted_unless_asked() -> None:
    """Nor are the grids given changed by it."""
    grids = rankfold.attention_grids(nn.TransformerEncoderLayer(16, 2))

    def tilted(optimizer: rankfold.RiemannianSGD) -> dict[str | None, bool]:
        return {grid.name: grid.tilted for g in optimizer.param_groups for grid in g["grids"]}

    assert tilted(rankfold.recommended(grids)) == {"self_attn.qk": False, "self_attn.vo": True}
    for asked in ({"tilt": 0.5}, {"row_balance": 0.0}):
        assert all(tilted(rankfold.recommended(grids, **asked)).values())
        assert all(tilted(rankfold.recommended([{"grids": grids, **asked}])).values())
    assert all(grid.tilted for grid in grids)
    assert rankfold.recommended(Heads().grid()).param_groups[0]["grids"][0].tilted


def test_a_group_with_a_learning_rate_of_its_own_goes_by_that() -> None:
    """As the docs give value·output products one; 8 times it would be no rate that anyone chose."""
    qk, vo = rankfold.attention_grids(opt())[:2]
    groups = [{"grids": [qk], "lr": 0.01}, {"grids": [vo], "lr": 0.04}]
    optimizer = rankfold.recommended(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.04]
    assert [group["grids"][0].rate for group in optimizer.param_groups] == [1.0, 1.0]
    vo.rate = 2.0
    assert rankfold.recommended(groups).param_groups[1]["grids"][0].rate == 2.0


def test_grids_are_taken_as_they_are_and_trained() -> None:
    """Of any kind RiemannianSGD takes, from factors that are not orthonormal."""
    for form in (lambda g: g, lambda g: [g], lambda g: [{"grids": [g], "momentum": 0.5}]):
        model = Heads()
        with torch.no_grad():
            model.a.mul_(1.5)
        optimizer = rankfold.recommended(form(model.grid()))
        losses = model.run(optimizer, 50)
        assert losses[-1] < losses[0] - 0.5
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_everything_can_be_overridden() -> None:
    optimizer = rankfold.recommended(Heads().grid(), 0.1, momentum=0.5, geometry="fixed-quotient")
    wanted = {**RECOMMENDED, "lr": 0.1, "momentum": 0.5, "geometry": "fixed-quotient"}
    assert options_of(optimizer) == wanted
    with pytest.raises(TypeError, match="rate"):
        rankfold.recommended(Heads().grid(), rate=1)
    with pytest.raises(TypeError):
        RECOMMENDED["lr"] = 1.0  # type: ignore[index]


WHITENED_ALONE = {"momentum_form": "smoothing", "growth": 0.0, "tilt": 0.0, "row_balance": 0.0}


@pytest.mark.parametrize(
    ("asked", "left_out"),
    [
        ({"normalize": "metric"}, WHITENED_ALONE),
        ({"normalize": None, "growth": 1.0}, {**WHITENED_ALONE, "growth": 1.0}),
        ({"geometry": "isometry-quotient"}, WHITENED_ALONE),
        ({"damping": 0.1}, {"growth": 0.0}),
        ({"momentum": 0.0}, {"momentum_form": "smoothing", "nesterov": False}),
    ],
)
def test_what_is_for_whitened_steps_is_left_out_of_others(
    asked: dict[str, Any], left_out: dict[str, Any]
) -> None:
    """Whether these are asked for all groups or for one; and what is asked for stays."""
    wanted = {**RECOMMENDED, **asked, **left_out}
    for given in ({}, asked):
        models = Heads(seed=0), Heads(seed=1)
        one, other = (rankfold.Grid(model.a, model.b, groups=model.members) for model in models)
        groups = [{"grids": [one]}, {"grids": [other], **asked}]
        optimizer = rankfold.recommended(groups, **given)
        first, second = optimizer.param_groups
        expected = wanted if given else RECOMMENDED
        assert {name: first[name] for name in expected} == expected
        assert {name: second[name] for name in wanted} == wanted
        for model in models:
            model.backward()
        optimizer.step()


def test_without_grids_there_is_nothing_to_optimize() -> None:
    with pytest.raises(ValueError, match="no grids to optimize"):
        rankfold.RiemannianSGD([], 0.1, geometry="fixed-quotient")
    with pytest.raises(ValueError, match="no grids to optimize"):
        rankfold.recommended([])
    with pytest.raises(ValueError, match="no grids to optimize"):
        rankfold.build_optimizer(nn.TransformerEncoderLayer(16, 2), grids=[])


def test_without_momentum_there_is_nothing_to_look_ahead_along() -> None:
    model = nn.MultiheadAttention(12, 3)
    group = rankfold.recommended(model, momentum=0.0).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0, False)
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        rankfold.recommended(model, momentum=0.0, nesterov=True)
