"""Groups that differ in nothing but their learning rates step together, each at its own rate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rankfold import RiemannianSGD, workspace

from .parts import CASES, RATES, Part, Parts, Race, state_of
from .reference import FIXED, GEOMETRIES, ISOMETRIES
from .test_checkpoints import through_a_file
from .toys import WIDE, same_bits, saying, unchanged

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_kind = pytest.mark.parametrize("kind", ["number", "tensor"])
every_case = pytest.mark.parametrize(
    ("geometry", "options"), [(g, o) for g, _, o in CASES], ids=[f"{g}-{n}" for g, n, _ in CASES]
)


# Where steps lead --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3])
@every_case
def test_as_separate_optimizers(geometry: str, options: dict[str, Any], number: int) -> None:
    race = Race(RATES[:number], geometry=geometry, **options)
    for step in range(4):
        race.step(step)
        race.check()


@every_case
def test_as_separate_optimizers_with_capturable_steps(
    geometry: str, options: dict[str, Any]
) -> None:
    options = {k: torch.tensor(v) if k == "scale_lr" else v for k, v in options.items()}
    rates = [torch.tensor(lr, dtype=WIDE) for lr in RATES]
    race = Race(rates, geometry=geometry, capturable=True, **options)
    for step in range(4):
        for k, optimizer in enumerate(race.several):
            for group in (race.one.param_groups[k], optimizer.param_groups[0]):
                group["lr"].fill_((k + 1) * RATES[k] / (step + 1))
        race.step(step)
        race.check()


@every_geometry
def test_a_chunk_has_the_rates_of_its_members(
    geometry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", 1)
    race = Race(RATES, geometry=geometry, momentum=0.9)
    for step in range(3):
        race.step(step)
    race.check()


@every_geometry
def test_rates_that_a_scheduler_changes(geometry: str) -> None:
    """Apart, equal, and apart again."""
    race = Race((0.1, 0.1), geometry=geometry, momentum=0.9)
    lambdas = [lambda k: 1 / (k + 1), lambda k: 0.5 if k == 1 else 1 + k]
    together = LambdaLR(race.one, lambdas)
    apart = [LambdaLR(o, f) for o, f in zip(race.several, lambdas, strict=True)]
    same = []
    for step in range(4):
        rates = [group["lr"] for group in race.one.param_groups]
        same.append(rates[0] == rates[1])
        race.step(step)
        race.check()
        for scheduler in (together, *apart):
            scheduler.step()
    assert same == [True, True, False, False]


@every_geometry
def test_a_group_without_gradients(geometry: str) -> None:
    race = Race(RATES, geometry=geometry, momentum=0.9, bias_correction=True)
    for step, absent in enumerate((1, None, 0, 2, None)):
        for parts in (race.ours, race.theirs):
            parts.backward(step)
            if absent is not None:
                parts[absent].zero_grad()
        for optimizer in (race.one, *race.several):
            optimizer.step()
    race.check()


@every_geometry
def test_a_group_added_later(geometry: str) -> None:
    race = Race(RATES[:2], geometry=geometry, momentum=0.9)
    race.step(0)
    more = [Part(2), Part(2)]
    race.ours.append(more[0])
    race.theirs.append(more[1])
    race.start += [p.detach().clone() for p in more[0].parameters()]
    race.one.add_param_group({"grids": more[0].grids(), "lr": RATES[2]})
    race.several.append(RiemannianSGD(more[1].grids(), RATES[2], geometry=geometry, momentum=0.9))
    for step in (1, 2):
        race.step(step)
    race.check()


@pytest.mark.parametrize("way", ["checkpoint", "deepcopy"])
@every_kind
@every_geometry
def test_a_run_goes_on_from_what_was_saved(geometry: str, kind: str, way: str) -> None:
    rates = [torch.tensor(lr) if kind == "tensor" else lr for lr in RATES]
    options: dict[str, Any] = {"geometry": geometry, "momentum": 0.9, "bias_correction": True}
    options["capturable"] = kind == "tensor"
    parts = Parts(3)
    optimizer = parts.together(rates, **options)
    for step in range(2):
        parts.backward(step)
        optimizer.step()
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] / 2
    if way == "deepcopy":
        fresh, again = copy.deepcopy((parts, optimizer))
    else:
        fresh = Parts(3)
        for part, saved in zip(fresh, parts, strict=True):
            part.load_state_dict(saved.state_dict())
        initial = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]
        again = fresh.together(initial, **options)
        again.load_state_dict(through_a_file(optimizer.state_dict()))
    for step in (2, 3):
        for these, one in ((parts, optimizer), (fresh, again)):
            these.backward(step)
            one.step()
    assert same_bits(parts.params(), fresh.params())
    assert same_bits(state_of([optimizer]), state_of([again]))


@every_case
def test_equal_rates_are_one_group_to_the_last_bit(geometry: str, options: dict[str, Any]) -> None:
    ends = []
    for grouped in (True, False):
        parts = Parts(3)
        if grouped:
            optimizer = parts.together([0.1] * 3, geometry=geometry, **options)
        else:
            grids = [grid for part in parts for grid in part.grids()]
            optimizer = RiemannianSGD(grids, 0.1, geometry=geometry, **options)
        for step in range(3):
            parts.backward(step)
            optimizer.step()
        ends.append([*(p.detach() for p in parts.params()), *state_of([optimizer])])
    assert same_bits(*ends)


# What happens to members -------------------------------------------------------------------------


@every_geometry
def test_diagnostics_are_those_of_separate_optimizers(geometry: str) -> None:
    decay = {"weight_decay": 0.5} if geometry in FIXED else {"scale_lr": 0.1}
    race = Race(RATES, geometry=geometry, momentum=0.9, **decay)
    race.step(0)
    for optimizer in (race.one, *race.several):
        optimizer.record_diagnostics()
    race.step(1)
    apart: dict[str, dict[str, float]] = {}
    for optimizer in race.several:
        apart.update(optimizer.diagnostics())
    together = race.one.diagnostics()
    assert together.keys() == apart.keys()
    for member, numbers in apart.items():
        assert together[member] == pytest.approx(numbers, rel=1e-9, abs=1e-12)
        rate = RATES[int(member.partition("[")[0][-1])]
        assert numbers["step_metric_norm"] == pytest.approx(rate)


@pytest.mark.parametrize("geometry", ISOMETRIES)
def test_only_rates_too_long_to_capture_are_clipped(geometry: str) -> None:
    race = Race([torch.tensor(lr) for lr in (0.3, 0.8)], geometry=geometry, capturable=True)
    race.step(0)
    race.check()
    clipped = {"pair1[0]", "turned1[0]", "grid1[0]"}
    assert race.one.counts() == {member: {"clipped": 1} for member in clipped}


@every_geometry
def test_a_member_that_is_not_finite_is_skipped_alone(geometry: str) -> None:
    race = Race(RATES, geometry=geometry, momentum=0.9)
    race.step(0)
    for parts in (race.ours, race.theirs):
        parts.backward(1)
        spoiled = parts[1].turned[1].grad
        assert spoiled is not None
        spoiled[0, 0] = torch.nan
    for optimizer in (race.one, *race.several):
        optimizer.step()
    race.check()
    assert race.one.counts()["turned1[0]"] == {"skipped": 1}


def test_what_raises_names_the_member_and_changes_nothing() -> None:
    parts = Parts(2)
    optimizer = parts.together(RATES[:2], geometry="fixed-quotient", on_nonfinite="raise")
    parts.backward(0)
    spoiled = parts[1].pair[0].grad
    assert spoiled is not None
    spoiled[0, 0] = torch.inf
    words = saying("pair1[0]", "not finite")
    with unchanged(parts.params(), optimizer), pytest.raises(RuntimeError, match=words):
        optimizer.step()


@pytest.mark.parametrize("group", [0, 1])
def test_the_rate_of_each_group_must_fit_its_weight_decay(group: int) -> None:
    parts = Parts(2)
    optimizer = parts.together((0.1, 0.2), geometry="fixed-embedded", weight_decay=2.0)
    optimizer.param_groups[group]["lr"] = 0.5
    parts.backward(0)
    words = saying("lr times weight_decay must be below 1", "0.5")
    with unchanged(parts.params(), optimizer), pytest.raises(ValueError, match=words):
        optimizer.step()
    parts[group].zero_grad()  # then it takes no step
    optimizer.step()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("geometry", FIXED)
def test_a_float64_rate_does_not_widen_steps(geometry: str, number: int) -> None:
    """Of float32 parameters: neither a tensor that groups share, nor each with its own."""
    for decay in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "decay_to": 2.0}):
        ends = []
        for dtype in (torch.float32, WIDE):
            parts = Parts(2, torch.float32)
            rates = [torch.tensor(lr, dtype=dtype) for lr in RATES[:number]]
            together = [rates[0], rates[-1]]
            optimizer = parts.together(together, geometry=geometry, momentum=0.9, **decay)
            parts.backward(0)
            optimizer.step()
            ends.append(parts.params())
        for narrow, wide in zip(*ends, strict=True):
            assert (narrow - wide).abs().max() <= 1e-6
