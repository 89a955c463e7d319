"""The published runs of the contest: they are what their table says, and lead to what docs say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from rankfold.lab.contest import METHODS, Cell, Contest, Losses
from rankfold.lab.tuning import Setting

from .contest_runs import contest_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return contest_script("restore")


@pytest.fixture(scope="module")
def losses(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    root = tmp_path_factory.mktemp("runs")
    assert script.restore(root) == len(list(root.iterdir())) > 200
    return Losses(root)


# On eight fresh seeds after 1,000 steps with linear annealing, in docs/lab.md.
PUBLISHED = {
    ("mha", "muon"): (Setting(-8, -6, -6, 0.8), 6.0063),
    ("mha", "fixed-quotient"): (Setting(-7, -5, -3, 0.8), 5.9984),
    ("mha", "fixed-quotient-tilted"): (Setting(-6, -5, -3, 0.8), 5.9312),
    ("mha", "adamw"): (Setting(-13, -7, -8, 0.6), 6.2398),
    ("gqa", "muon"): (Setting(-8, -6, -6, 0.6), 6.0283),
    ("gqa", "fixed-quotient"): (Setting(-7, -6, -5, 0.8), 6.0452),
    ("gqa", "fixed-quotient-tilted"): (Setting(-7, -6, -4, 0.8), 6.0237),
    ("gqa", "adamw"): (Setting(-13, -10, -9, 0.6), 6.1914),
}


def contest(script: ModuleType, steps: int) -> Contest:
    methods = ("muon", "fixed-quotient", "fixed-quotient-tilted", "adamw")
    return Contest("paper", methods, ("mha", "gqa"), (steps,), 8, ("linear",), script.TEXTS)


def test_a_contest_goes_on_from_them(script: ModuleType, losses: Losses) -> None:
    held = contest(script, 1000)
    assert not list(held.rounds(losses))
    for (model, name), (setting, mean) in PUBLISHED.items():
        cell = Cell(model, 1000, "linear")
        _, choice = held.tuning(cell, METHODS[name], losses)
        assert choice is not None
        assert choice.setting == setting
        found = [losses.of(run) for run in held.finals(cell, METHODS[name], choice)]
        values = [loss for loss in found if loss is not None]
        assert len(values) == 8
        assert round(sum(values) / 8, 4) == mean


def test_where_the_long_one_is(script: ModuleType, losses: Losses) -> None:
    """Muon is tuned; of ours other momenta are left to be tried."""
    held, cell = contest(script, 10000), Cell("mha", 10000, "linear")
    _, choice = held.tuning(cell, METHODS["muon"], losses)
    assert choice is not None
    assert (choice.setting, choice.interior) == (Setting(-9, -7, -7, 0.8), True)
    assert round(choice.loss, 3) == 4.419
    ours = METHODS["fixed-quotient"]
    runs, open_choice = held.tuning(cell, ours, losses)
    assert open_choice is None
    missing = [run.key for run in runs if losses.of(run) is None]
    wanted = [Setting(-8, -6, -4, momentum) for momentum in (0.6, 0.9, 0.95)]
    assert missing == [held.config(cell, ours, s, 100).key for s in wanted]


def test_a_row_that_is_not_of_its_run_is_refused(script: ModuleType) -> None:
    row = {"run": "mha-muon-s0-0", "model.kv_heads": "8", "optimizer.name": "muon"}
    with pytest.raises(ValueError, match="mha-muon-s0-0 is not the run of its options"):
        script.config_of({**row, "steps": "1000", "seed": "0"})


def test_docs_name_every_method() -> None:
    text = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    start = text.index("`--methods` takes some of")
    named = text[start : text.index("`--models` takes", start)]
    assert [name for name in METHODS if f"`{name}`" not in named] == []
