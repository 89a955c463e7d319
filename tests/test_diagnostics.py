"""Recording, logging and explaining: what it costs, what arrives, what is said."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rankfold
from rankfold.diagnostics import check_geometry, explain, log_to
from rankfold.geometries import EVENTS, GEOMETRIES

from .toys import Toy, clones, same_bits, saying, train
from .watching import Watch

SHAPES = [(1, 1), (2, 3)]
every_geometry = pytest.mark.parametrize("name", GEOMETRIES)


# Recording -----------------------------------------------------------------------------------


def toy(name: str, **changes: Any) -> tuple[Toy, rankfold.RiemannianSGD]:
    model = Toy(changes.pop("dtype", torch.float64))
    settings = {"lr": 0.1, "geometry": name, "momentum": 0.9, **changes}
    return model, rankfold.RiemannianSGD(model.grids(), **settings)


@every_geometry
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recording_changes_no_bit_of_a_run(name: str, dtype: torch.dtype) -> None:
    plain, plainly = toy(name, dtype=dtype)
    watched, watching = toy(name, dtype=dtype)
    watching.record_diagnostics()
    train(plain, plainly, range(4))
    train(watched, watching, range(4))
    assert same_bits(clones(plain), clones(watched))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        kept, same = plainly.state[one], watching.state[other]
        assert same_bits(kept.values(), same.values())
    assert watching.diagnostics().keys() == {"pair[0]", "heads[0]", "heads[1]"}


def watched_step(model: Toy, optimizer: rankfold.RiemannianSGD) -> dict[str, int]:
    optimizer.zero_grad()
    model.loss(3).backward()
    with Watch() as watch:
        optimizer.step()
    return dict(watch.operations)


@every_geometry
def test_a_step_that_is_not_recorded_dispatches_nothing_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = toy(name)
    train(model, optimizer, range(2))
    never = watched_step(model, optimizer)
    optimizer.record_diagnostics()
    recorded = watched_step(model, optimizer)
    optimizer.record_diagnostics(False)
    monkeypatch.setattr(rankfold.optimizer, "measure", None)  # would fail if called
    assert watched_step(model, optimizer) == never
    assert sum(recorded.values()) > sum(never.values())


def test_there_is_nothing_to_read_before_a_recorded_step() -> None:
    model, optimizer = toy("fixed-embedded")
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match=saying("recording is off", "record_diagnostics()")):
        optimizer.diagnostics()
    optimizer.record_diagnostics()
    with pytest.raises(RuntimeError, match="no step has been taken since recording"):
        optimizer.diagnostics()
    train(model, optimizer, range(1, 2))
    first = optimizer.diagnostics()
    optimizer.record_diagnostics(False)
    train(model, optimizer, range(2, 4))
    assert optimizer.diagnostics() == first  # the last one recorded
    optimizer.record_diagnostics()
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.diagnostics()
    with pytest.raises(RuntimeError, match="recording is off"):
        copy.deepcopy(optimizer).diagnostics()


@every_geometry
def test_numbers_are_plain_and_belong_to_their_members(name: str) -> None:
    model, optimizer = toy(name, normalize="metric", lr=0.05)
    optimizer.record_diagnostics()
    train(model, optimizer, range(3))
    found = optimizer.diagnostics()
    for numbers in found.values():
        assert {type(v) for k, v in numbers.items() if k not in EVENTS} == {float}
        assert {type(numbers[event]) for event in EVENTS} == {int}
        assert numbers["step_metric_norm"] == pytest.approx(0.05)
        assert numbers["precision"] == 2**-52
    # The parameters now, read by hand: heads[1] is queries 2 and 3 and key 1.
    queries = [model.q.detach()[2 * k : 2 * k + 2].T for k in range(4)]
    for k in range(2):
        values = [torch.linalg.svdvals(queries[i]) for i in (2 * k, 2 * k + 1)]
        smallest = min(float(v[-1]) for v in values)
        assert found[f"heads[{k}]"]["left_smallest_singular_value"] == pytest.approx(smallest)
    values = torch.linalg.svdvals(model.b.detach())
    assert found["pair[0]"]["right_condition"] == pytest.approx(float(values[0] / values[-1]))
    assert (
        "momentum_decoherence" in found["pair[0]"] or "momentum_horizontality" in found["pair[0]"]
    )


def test_only_members_of_the_last_step_are_there() -> None:
    model, optimizer = toy("isometry-quotient", momentum=0.0)
    optimizer.record_diagnostics()
    train(model, optimizer, range(1))
    assert len(optimizer.diagnostics()) == 3
    optimizer.zero_grad()
    model.losses(1)[0].backward()
    optimizer.step()
    found = optimizer.diagnostics()
    assert found.keys() == {"pair[0]"}
    assert not any("momentum" in key for key in found["pair[0]"])
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.diagnostics() == {}


@every_geometry
def test_a_skipped_member_made_no_step_and_the_others_are_as_ever(name: str) -> None:
    model, optimizer = toy(name)
    twin, other = toy(name)
    for opt in (optimizer, other):
        opt.record_diagnostics()
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    for m in (model, twin):
        m.zero_grad()
        m.loss(2).backward()
    assert model.q.grad is not None
    model.q.grad[0, 0] = math.nan
    optimizer.step()
    other.step()
    found, healthy = optimizer.diagnostics(), other.diagnostics()
    bad = found["heads[0]"]
    assert bad["skipped"] == 1
    assert math.isnan(bad["gradient_metric_norm"])
    assert bad["step_metric_norm"] == bad["step_spectral_norm"] == bad.get("step_share", 0) == 0
    assert math.isfinite(bad["left_condition"])
    assert found["heads[1]"] == healthy["heads[1]"]
    assert found["pair[0]"] == healthy["pair[0]"]
    assert explain(found)[0].startswith("heads[0]: steps were not finite")


@every_geometry
def test_non_finite_weights_are_told_and_do_not_stop_a_recorded_step(name: str) -> None:
    model, optimizer = toy(name)
    train(model, optimizer, range(1))
    optimizer.record_diagnostics()
    with torch.no_grad():
        model.a[0, 0] = math.inf
    train(model, optimizer, range(1, 2))
    found = optimizer.diagnostics()
    assert math.isnan(found["pair[0]"]["left_smallest_singular_value"])
    assert "NaN or infinities" in explain(found)[0]
    assert math.isfinite(found["heads[0]"]["left_condition"])


# Logging -------------------------------------------------------------------------------------


def test_every_kth_step_is_logged_and_no_other_is_measured() -> None:
    model, optimizer = toy("isometry-canonical")
    seen: list[tuple[int, dict[str, float]]] = []
    plain, bare = toy("isometry-canonical")
    train(plain, bare, range(2))
    quiet = sum(watched_step(plain, bare).values())
    handle = log_to(optimizer, lambda step, values: seen.append((step, values)), every=3)
    costs = []
    for step in range(9):
        costs.append(sum(watched_step(model, optimizer).values()))
        if (step + 1) % 3:
            assert not optimizer.recording_diagnostics
    assert [step for step, _ in seen] == [3, 6, 9]
    assert costs[1] == costs[3] == costs[4] == costs[6] == costs[7] == quiet
    assert min(costs[2], costs[5], costs[8]) > quiet
    values, found = seen[-1][1], optimizer.diagnostics()
    for member, numbers in found.items():
        for name, value in numbers.items():
            assert name == "precision" or values[f"{member}/{name}"] == value
    both = [
        numbers[f"{side}_condition"] for numbers in found.values() for side in ("left", "right")
    ]
    assert values["worst/condition"] == max(both)
    small = [
        numbers[f"{side}_smallest_singular_value"]
        for numbers in found.values()
        for side in ("left", "right")
    ]
    assert values["worst/smallest_singular_value"] == min(small)
    assert values["total/skipped"] == 0
    handle.remove()
    handle.remove()
    train(model, optimizer, range(9, 15))
    assert len(seen) == 3


def test_logging_keeps_what_the_user_switched_on_and_survives_its_sink() -> None:
    model, optimizer = toy("fixed-quotient")
    optimizer.record_diagnostics()
    handle = log_to(optimizer, lambda step, values: None, every=2)
    train(model, optimizer, range(2))
    assert optimizer.recording_diagnostics
    handle.remove()
    assert optimizer.recording_diagnostics
    optimizer.record_diagnostics(False)

    def failing(step: int, values: dict[str, float]) -> None:
        raise OSError("disk full")

    handle = log_to(optimizer, failing, every=1)
    with pytest.raises(OSError, match="disk full"):
        train(model, optimizer, range(2, 3))
    assert not optimizer.recording_diagnostics
    handle.remove()
    with pytest.raises(ValueError, match="every must be at least 1"):
        log_to(optimizer, failing, every=0)


def test_a_summary_writer_gets_scalars_and_a_run_that_goes_on_keeps_its_count() -> None:
    class Writer:
        def __init__(self) -> None:
            self.written: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.written.append((tag, scalar_value, global_step))

    model, optimizer = toy("fixed-embedded")
    writer = Writer()
    log_to(optimizer, writer, every=4, start=1002, per_member=False)
    optimizer.step()  # no gradients: counted, and there is nothing to log
    train(model, optimizer, range(1))
    assert {step for _, _, step in writer.written} == {1004}
    tags = {tag for tag, _, _ in writer.written}
    assert {"worst/condition", "worst/gradient_inconsistency", "total/lifted"} <= tags
    assert {tag.split("/")[0] for tag in tags} == {"worst", "total"}


def test_the_products_of_a_whole_models_optimizer_are_logged() -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = rankfold.build_optimizer(model)
    logged: list[int] = []
    handle = log_to(optimizer, lambda step, values: logged.append(step), every=2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8)).square().mean().backward()
        optimizer.step()
    handle.remove()
    assert logged == [2, 4]


def test_nan_is_the_worst() -> None:
    model, optimizer = toy("fixed-embedded")
    train(model, optimizer, range(1))
    seen: list[dict[str, float]] = []
    log_to(optimizer, lambda step, values: seen.append(values), every=1)
    optimizer.zero_grad()
    model.loss(1).backward()
    assert model.q.grad is not None
    model.q.grad[0] = math.nan
    optimizer.step()
    assert math.isnan(seen[0]["worst/gradient_metric_norm"])
    assert math.isfinite(seen[0]["heads[1]/gradient_metric_norm"])
    assert seen[0]["total/skipped"] == 1


# Explaining ----------------------------------------------------------------------------------

HEALTHY: dict[str, float] = {
    "left_condition": 3.0,
    "right_condition": 2.0,
    "left_smallest_singular_value": 0.4,
    "right_smallest_singular_value": 0.4,
    "gradient_inconsistency": 1e-7,
    "momentum_decoherence": 1e-7,
    "momentum_horizontality": 0.05,
    "step_share": 0.1,
    "precision": 2**-23,
    **dict.fromkeys(EVENTS, 0),
}
TROUBLES = [
    ({"left_smallest_singular_value": math.nan}, "weights hold NaN"),
    ({"skipped": 2}, "loss scaling"),
    ({"right_orthogonality_defect": 1e-2}, "orthonormalize_"),
    ({"right_condition": 5e3}, "damping"),
    ({"left_condition": math.inf}, "float64"),
    ({"step_share": 1.5}, "trust_region"),
    ({"gradient_inconsistency": 0.2}, "gradient_repair"),
    ({"lifted": 1}, "lifted"),
    ({"momentum_decoherence": 0.5}, "reset_momentum"),
    ({"momentum_horizontality": 0.9}, "projected away"),
    ({"momentum_deskewing": 0.9}, "projected away"),
    ({"unconverged": 7}, "orthographic"),
    ({"clipped": 3}, "trust region"),
]


@pytest.mark.parametrize(("numbers", "words"), TROUBLES)
def test_each_trouble_has_its_sentence(numbers: dict[str, float], words: str) -> None:
    said = explain({"fine[0]": HEALTHY, "sick[1]": {**HEALTHY, **numbers}})
    assert len(said) == 1
    assert said[0].startswith("sick[1]: ")
    assert words in said[0]


def test_what_is_healthy_in_float64_is_not_in_float32() -> None:
    numbers = {**HEALTHY, "left_condition": 1e5}
    assert "rank" in explain({"a[0]": numbers})[0]
    assert explain({"a[0]": {**numbers, "precision": 2**-52}})[0].startswith("Nothing is wrong")


def test_the_worst_comes_first_and_many_members_share_a_sentence() -> None:
    sick = {f"q[{k}]": {**HEALTHY, "step_share": 2.0 + k, "clipped": 1} for k in range(9)}
    said = explain({"fine[0]": HEALTHY, **sick, "nan[0]": {**HEALTHY, "skipped": 1}})
    assert [s.split(": ")[0] for s in said] == [
        "nan[0]",
        "q[8], q[7], q[6], q[5] and 5 more",
        "q[0], q[1], q[2], q[3] and 5 more",
    ]
    assert "10 times as long" in said[1]


@every_geometry
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_healthy_run_is_told_so(name: str, dtype: torch.dtype) -> None:
    model, optimizer = toy(name, lr=0.05, dtype=dtype)
    optimizer.record_diagnostics()
    train(model, optimizer, range(10))
    assert explain(optimizer.diagnostics()) == ["Nothing is wrong with the 3 members measured."]


def test_a_wrong_axis_and_a_long_step_are_found_in_a_run() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(6, 6, generator=generator)) for _ in range(2))
    wrong = rankfold.Grid(rankfold.Factor(a, axis=0), b, name="wrong")
    optimizer = rankfold.RiemannianSGD([wrong], lr=50.0, geometry="fixed-quotient")
    optimizer.record_diagnostics()
    (a @ b.mT - torch.eye(6)).square().sum().backward()
    with pytest.warns(UserWarning, match="inconsistent"):
        optimizer.step()
    said = explain(optimizer.diagnostics())
    assert any("Check axis=" in s for s in said)
    assert any("times as long" in s for s in said)


# The page ------------------------------------------------------------------------------------


def test_the_page_runs_and_names_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    written: list[tuple[Any, ...]] = []

    def writer(folder: str) -> SimpleNamespace:
        return SimpleNamespace(add_scalar=lambda *args: written.append(args))

    fake = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    printed: list[str] = []
    scope: dict[str, Any] = {"print": lambda *args: printed.append(" ".join(map(str, args)))}
    torch.manual_seed(0)
    found = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "docs/diagnostics.md", "exec"), scope)
    assert any("Nothing is wrong" in line for line in printed)
    assert any("tangential_slope" in line for line in printed)
    assert written
    names = set(re.findall(r"`([a-z_]+)`", text))
    names |= {f"{side}_{name}" for side in ("left", "right") for name in names}
    for name in GEOMETRIES:
        model, optimizer = toy(name)
        optimizer.record_diagnostics()
        train(model, optimizer, range(1))
        for numbers in optimizer.diagnostics().values():
            assert names.issuperset(numbers)
    report = check_geometry("fixed-quotient")
    assert names.issuperset(report.verdicts())


def test_loading_leaves_recording_as_it_was() -> None:
    model, optimizer = toy("fixed-quotient")
    optimizer.record_diagnostics()
    train(model, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.recording_diagnostics
    assert not copy.deepcopy(optimizer).recording_diagnostics
