"""Groups that differ in their learning rates alone: what they cost, and which these are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from rankfold import RiemannianSGD, stacks

from .parts import RATES, Parts, Race
from .reference import FIXED, GEOMETRIES
from .watching import Deny, DenyReading, Watch

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_kind = pytest.mark.parametrize("kind", ["number", "tensor"])


# What steps cost ---------------------------------------------------------------------------------


VIEWS = ("aten.view.default", "aten.unbind.int", "aten.slice.Tensor", "aten.expand.default")


def operations(optimizer: RiemannianSGD, parts: Parts) -> Counter[str]:
    """What the second step dispatches."""
    parts.backward(0)
    optimizer.step()
    with Watch() as watch:
        optimizer.step()
    return watch.operations


def in_one_group(number: int, lr: Any, **options: Any) -> Counter[str]:
    parts = Parts(number)
    grids = [grid for part in parts for grid in part.grids()]
    return operations(RiemannianSGD(grids, lr, **options), parts)


@every_kind
@every_geometry
def test_groups_cost_what_their_rates_need(geometry: str, kind: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "geometry": geometry}
    options["capturable"] = kind == "tensor"
    shapes = 2

    def rate(lr: float) -> Any:
        return torch.tensor(lr) if kind == "tensor" else lr

    for number in (2, 3):
        alone = in_one_group(number, rate(0.3), **options)
        equal, different = Parts(number), Parts(number)
        # One tensor, or numbers that are equal and not one object.
        lr = rate(0.3)
        shared = [lr if kind == "tensor" else float(str(lr)) for _ in equal]
        assert operations(equal.together(shared, **options), equal) == alone
        rates = [rate(lr) for lr in (0.3, 0.2, 0.1)[:number]]
        found = operations(different.together(rates, **options), different)
        more = {name: n for name, n in (found - alone).items() if name not in VIEWS}
        fill = "aten.fill_.Tensor" if kind == "tensor" else "aten.fill_.Scalar"
        less = {name: n for name, n in (alone - found).items() if name not in VIEWS}
        # One number is spread over members as it is made; one tensor takes on the dtype of the
        # factors, which a table of tensors has.
        numbers = kind == "number"
        assert more == {
            "aten.empty.memory_format": shapes,
            fill: shapes * number,
            "aten.index_select.default": shapes,
        }
        assert less == {("aten.new_full" if numbers else "aten._to_copy") + ".default": shapes}


@every_geometry
@pytest.mark.usefixtures("as_on_a_device")
def test_different_rates_ask_for_no_values(geometry: str) -> None:
    decay = {"weight_decay": 0.1} if geometry in FIXED else {}
    rates: list[list[Any]] = [list(RATES), [torch.tensor(lr) for lr in RATES]]
    for kind in rates:
        parts = Parts(3)
        optimizer = parts.together(kind, geometry=geometry, momentum=0.9, **decay)
        parts.backward(0)
        optimizer.step()
        with Deny(), DenyReading():
            optimizer.step()
            if isinstance(kind[0], float):
                optimizer.param_groups[0]["lr"] = 0.2
            optimizer.step()


def test_changing_rates_plan_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counting(grids: Any) -> Any:
        planned.append(grids)
        return stacks.plans_for(grids)

    monkeypatch.setattr("rankfold.optimizer.plans_for", counting)
    parts = Parts(2)
    optimizer = parts.together((0.1, 0.2), geometry="fixed-embedded")
    for step, rates in enumerate([(0.1, 0.2), (0.2, 0.2), (0.3, 0.1), (0.1, 0.1)]):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        parts.backward(step)
        optimizer.step()
    assert len(planned) == 1


# Who steps with whom -----------------------------------------------------------------------------

OTHER: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "geometry": ("fixed-embedded", "fixed-quotient", {}),
    "momentum": ("fixed-embedded", 0.8, {"momentum": 0.9}),
    "momentum_form": ("fixed-embedded", "heavy-ball", {"momentum": 0.9}),
    "nesterov": ("fixed-embedded", True, {"momentum": 0.9}),
    "bias_correction": ("fixed-embedded", True, {"momentum": 0.9}),
    "second_moment": ("fixed-embedded", 0.9, {}),
    "growth": ("fixed-embedded", 0.5, {}),
    "tilt": ("fixed-embedded", 0.25, {"normalize": "whitened"}),
    "row_balance": ("fixed-embedded", 0.5, {"normalize": "whitened"}),
    "normalize": ("fixed-embedded", None, {}),
    "weight_decay": ("fixed-embedded", 0.1, {}),
    "decay_to": ("fixed-embedded", 1.0, {"weight_decay": 0.1}),
    "scale_lr": ("isometry-quotient", 0.2, {"scale_lr": 0.1}),
    "norm_floor": ("fixed-embedded", 1e-3, {}),
    "retraction": ("fixed-embedded", "orthographic", {}),
    "maximize": ("fixed-embedded", True, {}),
    "gradient_repair": ("fixed-embedded", "none", {}),
    "damping": ("fixed-embedded", 1e-3, {}),
    "trust_region": ("fixed-embedded", 0.5, {}),
    "rank_floor": ("fixed-embedded", 0.1, {}),
    "capturable": ("fixed-embedded", True, {}),
    "on_nonfinite": ("fixed-embedded", "raise", {}),
}


def planned(optimizer: RiemannianSGD) -> int:
    """How many plans there are by now."""
    return sum(len(plans) for plans in optimizer._plans.values())


def plans(optimizer: RiemannianSGD, parts: Parts) -> int:
    """How many plans a step has."""
    parts.backward(0)
    optimizer.step()
    return planned(optimizer)


@pytest.mark.parametrize("option", OTHER)
def test_groups_that_differ_in_another_option_do_not(option: str) -> None:
    geometry, value, options = OTHER[option]
    rates = [torch.tensor(rate) for rate in RATES] if option == "capturable" else RATES
    race = Race(rates, geometry=geometry, **options)
    race.step(0)
    assert planned(race.one) == 1
    for group in (race.one.param_groups[1], race.several[1].param_groups[0]):
        group[option] = value  # as users and schedulers may, at any time
    race.step(1)
    assert planned(race.one) == 1 + 2
    race.step(2)
    assert planned(race.one) == 1 + 2
    race.check()


def test_every_option_is_looked_at() -> None:
    optimizer = Parts(1).together([0.1], geometry="fixed-embedded")
    assert {*OTHER, "lr"} == optimizer.defaults.keys()


def test_numbers_and_tensors_step_apart() -> None:
    parts = Parts(3)
    rates = (0.1, torch.tensor(0.2), 0.3)
    assert plans(parts.together(rates, geometry="fixed-quotient"), parts) == 2


def test_what_else_a_group_holds_does_not_matter() -> None:
    parts = Parts(2)
    optimizer = parts.together((0.1, 0.2), geometry="fixed-quotient")
    optimizer.param_groups[0]["of_its_owner"] = torch.ones(3)
    optimizer.param_groups[1]["of_its_owner"] = [1, 2]
    assert plans(optimizer, parts) == 1


def test_nor_do_groups_of_other_dtypes() -> None:
    """What a float16 weight can store is no limit to another group's."""
    parts = Parts(2, torch.float32)
    parts[1].half()
    assert plans(parts.together((0.1, 0.2), geometry="fixed-quotient"), parts) == 2
    parts = Parts(2, torch.float16)
    assert plans(parts.together((0.1, 0.2), geometry="fixed-quotient"), parts) == 1
