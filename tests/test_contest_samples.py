"""Long runs of the contest on samples of the whole text: what docs tell of their course."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from rankfold.lab import records
from rankfold.lab.config import preset
from rankfold.lab.records import Curve
from rankfold.lab.statistics import student_quantile

from .contest_runs import Lab, contest_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def lead() -> ModuleType:
    return contest_script("lead")


def of_samples(name: str) -> list[dict[str, str]]:
    path = ROOT / f"benchmarks/contest/samples-{name}.csv"
    assert f"{path.relative_to(ROOT)})" in (ROOT / "docs/contest.md").read_text(encoding="utf-8")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_how_products_grow_on_samples() -> None:
    """Two of these runs were made twice; all others are the published ones."""
    script = contest_script("restore")
    _, rows = script.published(script.RUNS)
    published = {row["run"]: float(row["loss"]) for row in rows if row["loss"]}
    found = of_samples("norms")
    again = {row["run"]: float(row["loss"]) for row in found}
    differ = {run: loss for run, loss in again.items() if abs(loss - published[run]) > 1e-5}
    pairs = sorted((round(published[run], 3), round(loss, 3)) for run, loss in differ.items())
    assert pairs == [(4.377, 4.377), (4.379, 4.390)]
    norms = {row["run"]: float(row["median"]) for row in found if row["products"] == "vo"}
    told = {run: round(norm) for run, norm in norms.items() if run in differ}
    assert sorted(told.values()) == [72, 144]
    assert all(("muon" in run) is (norm == 72) for run, norm in told.items())
    by_loss = {round(published[run], 3): round(norm) for run, norm in norms.items()}
    assert [by_loss[loss] for loss in (4.345, 4.354)] == [46, 11]


def test_the_lead_goes_on_samples() -> None:
    lead = {}
    for row in of_samples("curves"):
        step, theirs, ours = (float(x) for x in row.values())
        lead[int(step)] = round(theirs - ours, 2)
    told = {1000: 0.04, 2000: 0.04, 4000: 0.03, 6000: 0.02, 8000: 0.01, 10000: 0.0}
    assert {step: lead[step] for step in told} == told


def test_the_lead_of_the_finals_on_samples() -> None:
    rows = {int(row["step"]): row for row in of_samples("finals")}
    assert len(rows) == 50
    told = {1000: 0.016, 3000: 0.013, 6000: -0.008, 10000: -0.015}
    assert {step: round(float(rows[step]["lead"]), 3) for step in told} == told
    assert [round(float(rows[step]["muon"]), 1) for step in (3000, 6000)] == [5.0, 4.5]
    late = [row for step, row in rows.items() if step > 4000]
    below = [-float(row["lead"]) for row in late]
    assert [round(pick(below), 3) for pick in (min, max)] == [0.003, 0.015]
    assert all(float(row["low"]) < 0 < float(row["high"]) for row in late)
    early, late_width = (
        statistics.mean(float(rows[k]["high"]) - float(rows[k]["low"]) for k in steps)
        for steps in (range(1000, 3001, 200), range(6000, 10001, 200))
    )
    assert late_width > 1.5 * early  # seeds scatter


def test_where_runs_on_samples_end_is_settled_early() -> None:
    rows = of_samples("finals-level")
    steps, losses = ([float(row[name]) for row in rows] for name in ("step", "loss"))
    text = (ROOT / "docs/contest.md").read_text(encoding="utf-8")
    told = f"below 4.9, {min(steps):,.0f} to\n{max(steps):,.0f}, has a correlation of "
    assert f"{told}{statistics.correlation(steps, losses):.2f} with the loss at the end" in text
    assert len(rows) == 16


def curve(loss: float, seed: int = 0) -> Curve:
    return Curve([50, 100, 150], [3.0 + seed, 1.0 + seed, loss])


def test_how_far_one_is_ahead_is_paired_by_seed(lead: ModuleType) -> None:
    """Means of windows, over seeds that both have."""
    muon = {seed: lead.windowed(curve(loss, seed), 100) for seed, loss in ((0, 0.5), (1, 0.7))}
    assert muon[0] == Curve([100, 200], [2.0, 0.5])
    ours = {
        seed: Curve(each.steps, [loss - 0.1 * (seed + 1) for loss in each.values])
        for seed, each in muon.items()
    }
    half = student_quantile(1) * 0.05
    for row, means in zip(lead.leads(muon, ours), ((100, 2.5), (200, 0.6)), strict=True):
        step, loss = means
        assert row == pytest.approx((step, loss, loss - 0.15, 0.15, 0.15 - half, 0.15 + half))
    told = r"two seeds of both methods are needed, and there are \[1\]"
    with pytest.raises(ValueError, match=told):
        lead.leads(muon, {1: ours[1], 7: ours[0]})


def test_when_a_loss_is_passed(lead: ModuleType) -> None:
    falling = Curve([100, 200], [2.0, 0.5])
    assert [lead.passing(falling, level) for level in (3.0, 1.25)] == [100, 150]
    assert math.isnan(lead.passing(falling, 0.5))


def test_a_lead_is_of_one_setting(lead: ModuleType, tmp_path: Path) -> None:
    runs = Lab(tmp_path, lambda _: 5.0)
    runs.make([preset("tiny").with_options({"optimizer.lr": lr}) for lr in (0.25, 0.5)])
    with pytest.raises(ValueError, match="two runs have seed 0: give a folder of one model"):
        lead.by_seed(records.read_runs(tmp_path), 100)
