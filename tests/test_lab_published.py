"""The published runs of the contest: they are what their table says, and lead to what docs say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rankfold.lab.contest import METHODS, Cell, Contest, Losses
from rankfold.lab.tuning import Setting

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "benchmarks" / "contest" / "restore.py"
    spec = importlib.util.spec_from_file_location("restore", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def losses(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    root = tmp_path_factory.mktemp("runs")
    assert script.restore(root) == len(list(root.iterdir())) > 200
    return Losses(root)


def contest(script: ModuleType, steps: int) -> Contest:
    methods = ("muon", "fixed-quotient")
    return Contest("paper", methods, ("mha",), (steps,), 8, ("linear",), script.TEXTS)


def test_a_contest_goes_on_from_them(script: ModuleType, losses: Losses) -> None:
    held = contest(script, 1000)
    assert not list(held.rounds(losses))
    cell = Cell("mha", 1000, "linear")
    means, chosen = [], []
    for method in held.entries():
        _, choice = held.tuning(cell, method, losses)
        assert choice is not None
        found = [losses.of(run) for run in held.finals(cell, method, choice)]
        values = [loss for loss in found if loss is not None]
        assert len(values) == 8
        means.append(sum(values) / 8)
        chosen.append(choice.setting)
    assert chosen == [Setting(-8, -6, -6, 0.8), Setting(-7, -5, -3, 0.8)]
    assert [round(mean, 4) for mean in means] == [6.0063, 5.9984]


def test_the_long_one_has_its_tuning(script: ModuleType, losses: Losses) -> None:
    held, cell = contest(script, 10000), Cell("mha", 10000, "linear")
    settings = []
    for name in ("muon", "fixed-quotient"):
        _, choice = held.tuning(cell, METHODS[name], losses)
        assert choice is not None
        settings.append((choice.setting, round(choice.loss, 4)))
    assert settings == [
        (Setting(-9, -7, -7, 0.8), 4.4189),
        (Setting(-8, -6, -4, 0.8), 4.4548),
    ]


def test_a_row_that_is_not_of_its_run_is_refused(script: ModuleType) -> None:
    row = {"run": "mha-muon-s0-0", "model.kv_heads": "8", "optimizer.name": "muon"}
    with pytest.raises(ValueError, match="mha-muon-s0-0 is not the run of its options"):
        script.config_of({**row, "steps": "1000", "seed": "0"})
