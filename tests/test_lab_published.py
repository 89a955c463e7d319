"""The published runs of the contest: they are what their table says, and lead to what docs say."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rankfold.lab import records
from rankfold.lab.config import DEFAULTS, RunConfig
from rankfold.lab.contest import METHODS, TUNING_SEED, Cell, Contest, Losses
from rankfold.lab.statistics import paired
from rankfold.lab.tuning import Setting

from .contest_runs import Lab, contest_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return contest_script("restore")


@pytest.fixture(scope="module")
def losses(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    root = tmp_path_factory.mktemp("runs")
    assert script.restore(root) == len(list(root.iterdir())) > 200
    return Losses(root)


@pytest.fixture(scope="module")
def publisher() -> ModuleType:
    return contest_script("publish")


# On eight fresh seeds after 1,000 steps with linear annealing, in docs/contest.md.
PUBLISHED = {
    ("mha", "muon"): (Setting(-8, -6, -6, 0.8), 6.0063),
    ("mha", "fixed-quotient"): (Setting(-7, -5, -3, 0.8), 5.9984),
    ("mha", "fixed-quotient-tilted"): (Setting(-6, -5, -3, 0.8), 5.9312),
    ("mha", "fixed-quotient-tilted-vo"): (Setting(-7, -4, -3, 0.8), 5.9532),
    ("mha", "adamw"): (Setting(-13, -7, -8, 0.6), 6.2398),
    ("gqa", "muon"): (Setting(-8, -6, -6, 0.6), 6.0283),
    ("gqa", "fixed-quotient"): (Setting(-7, -6, -5, 0.8), 6.0452),
    ("gqa", "fixed-quotient-tilted"): (Setting(-7, -6, -4, 0.8), 6.0237),
    ("gqa", "fixed-quotient-tilted-vo"): (Setting(-7, -5, -4, 0.8), 6.0117),
    ("gqa", "adamw"): (Setting(-13, -10, -9, 0.6), 6.1914),
}


OURS = "fixed-quotient-tilted-vo"


def contest(
    script: ModuleType,
    steps: int,
    seeds: int = 8,
    first: int = 0,
    models: tuple[str, ...] = ("mha", "gqa"),
    shuffle: str = "documents",
) -> Contest:
    methods = ("muon", "fixed-quotient", "fixed-quotient-tilted", OURS, "adamw")
    told = {**script.TEXTS, "data.shuffle": shuffle}
    return Contest("paper", methods, models, (steps,), seeds, ("linear",), told, first)


def test_a_contest_goes_on_from_them(script: ModuleType, losses: Losses) -> None:
    held = contest(script, 1000)
    assert not [run for more in held.stages(losses) for run in more()]
    for (model, name), (setting, mean) in PUBLISHED.items():
        cell = Cell(model, 1000, "linear")
        _, choice = held.tuning(cell, METHODS[name], losses)
        assert choice is not None
        assert choice.setting == setting
        found = [losses.of(run) for run in held.finals(cell, METHODS[name], choice)]
        values = [loss for loss in found if loss is not None]
        assert len(values) == 8
        assert round(sum(values) / 8, 4) == mean


def loss_at(held: Contest, losses: Losses, name: str, setting: Setting, **more: float) -> float:
    """Of the run of the tuning at this setting."""
    (cell,) = held.cells()
    config = held.config(cell, METHODS[name], setting, TUNING_SEED)
    loss = losses.of(config.with_options({f"optimizer.{k}": value for k, value in more.items()}))
    assert loss is not None
    return round(loss, 3)


# At 10,000 steps with grouped queries and samples of the whole text, at these exponents of rates,
# this momentum and, as optimizer.product_decay, decay.
LOOKS = [
    ("muon", (-8, -6, -6, 0.8), 0, 4.385),
    ("muon", (-9, -7, -7, 0.8), 0, 4.379),
    ("muon", (-10, -8, -8, 0.8), 0, 4.465),
    ("muon", (-9, -8, -8, 0.8), 0, 4.410),
    ("muon", (-10, -8, -8, 0.9), 0, 4.402),
    (OURS, (-6, -4, -4, 0.8), 0, 4.485),
    (OURS, (-7, -5, -5, 0.8), 0, 4.377),
    (OURS, (-8, -6, -6, 0.8), 0, 4.380),
    (OURS, (-6, -5, -5, 0.8), 0, 4.435),
    (OURS, (-8, -5, -5, 0.8), 0, 4.379),
    (OURS, (-7, -6, -6, 0.8), 0, 4.345),
    (OURS, (-7, -7, -7, 0.8), 0, 4.464),
    (OURS, (-8, -6, -6, 0.9), 0, 4.355),
    (OURS, (-7, -5, -5, 0.8), 0.05, 4.354),
    (OURS, (-7, -5, -5, 0.8), 0.2, 4.656),
    (OURS, (-7, -6, -6, 0.8), 0.05, 4.337),
]


def test_looks_at_long_runs_on_samples_of_the_whole_text(
    script: ModuleType, losses: Losses
) -> None:
    held = contest(script, 10000, models=("gqa",), shuffle="samples")
    for name, setting, decay, loss in LOOKS:
        more = {"product_decay": decay} if decay else {}
        assert loss_at(held, losses, name, Setting(*setting), **more) == loss
    assert loss_at(held, losses, OURS, Setting(-7, -5, -5, 0.8), growth=0) == 4.398
    assert loss_at(held, losses, "muon", Setting(-9, -7, -7, 0.8), weight_decay=0.1) == 4.356


# What the rule finds on samples; a decay is one of the highest rate's products to e^(-2^decay).
ON_SAMPLES = {
    1000: {"muon": Setting(-8, -6, -6, 0.8), OURS: Setting(-7, -5, -5, 0.8)},
    10000: {"muon": Setting(-9, -7, -7, 0.9, 3), OURS: Setting(-7, -6, -6, 0.8, 2)},
}


@pytest.mark.parametrize("steps", ON_SAMPLES)
def test_tuning_on_samples(steps: int, script: ModuleType, losses: Losses) -> None:
    held = contest(script, steps, models=("gqa",), shuffle="samples")
    (cell,) = held.cells()
    for name, best in ON_SAMPLES[steps].items():
        _, choice = held.tuning(cell, METHODS[name], losses)
        assert choice is not None
        assert (choice.setting, choice.interior) == (best, True)


def test_the_lines_of_the_last_horizon_on_samples(script: ModuleType, losses: Losses) -> None:
    """Of momentum, decay, and the rate that looks had left."""
    held = contest(script, 10000, models=("gqa",), shuffle="samples")
    assert loss_at(held, losses, "muon", Setting(-9, -6, -6, 0.8)) == 4.396
    told = {
        "muon": ([4.475, 4.367, 4.416], [4.352, 4.336, 4.371]),
        OURS: ([4.445, 4.387, 4.701], [4.337, 4.350, 4.361]),
    }
    for name, (momenta, decays) in told.items():
        best = ON_SAMPLES[10000][name]
        plain = best._replace(decay=None)
        tried = [plain._replace(momentum=momentum) for momentum in (0.6, 0.9, 0.95)]
        assert [loss_at(held, losses, name, setting) for setting in tried] == momenta
        tried = [best._replace(decay=decay) for decay in (2, 3, 4)]
        (cell,) = held.cells()
        runs = [held.config(cell, METHODS[name], setting, TUNING_SEED) for setting in tried]
        assert [round(losses.of(run) or 0, 3) for run in runs] == decays


# What docs/contest.md has of longer runs that were tuned by the rule of that time: one rate for
# all products, and the momentum.
LONG = {"muon": Setting(-8, -6, -6, 0.8), OURS: Setting(-7, -5, -4, 0.8)}


def test_long_runs_without_grouped_queries(script: ModuleType, losses: Losses) -> None:
    held, best = contest(script, 10000, models=("mha",)), Setting(-9, -7, -7, 0.8)
    others = [best._replace(momentum=m) for m in (0.6, 0.9, 0.95)]
    others += [Setting(-10, -8, -8, 0.8), Setting(-8, -6, -6, 0.8)]
    assert loss_at(held, losses, "muon", best) == 4.419
    assert min(loss_at(held, losses, "muon", setting) for setting in others) > 4.419


def test_tuning_of_long_runs_with_grouped_queries(script: ModuleType, losses: Losses) -> None:
    held = contest(script, 10000, models=("gqa",))
    for name, best in LONG.items():
        around = [best._replace(momentum=m) for m in (0.6, 0.9)]
        around += [best._replace(qk=best.qk + k, v=best.v + k, o=best.o + k) for k in (-1, 1)]
        if name == "muon":  # its rates were tuned with momentum 0.6
            around[2:] = [setting._replace(momentum=0.6) for setting in around[2:]]
        least = loss_at(held, losses, name, best)
        assert least == {"muon": 4.524, OURS: 4.512}[name]
        assert min(loss_at(held, losses, name, setting) for setting in around) > least


@pytest.mark.parametrize(
    ("shuffle", "first", "muon", "ours", "difference"),
    [
        (
            "samples",
            0,
            [4.324, 4.360, 4.326, 4.323, 4.350, 4.341, 4.359, 4.375],
            [4.352, 4.357, 4.346, 4.369, 4.371, 4.350, 4.335, 4.384],
            [0.0132, -0.0044, 0.0308, 0.1191],
        ),
        (
            "documents",
            0,
            [4.581, 4.554, 4.541, 4.525, 4.531, 4.563, 4.555, 4.538],
            [4.518, 4.562, 4.489, 4.500, 4.530, 4.505, 4.494, 4.524],
            [-0.0334, -0.0574, -0.0093, 0.0135],
        ),
        (
            "documents",
            8,
            [4.538, 4.531, 4.528, 4.525, 4.543, 4.530, 4.527, 4.529, 4.507, 4.520, 4.535, 4.514],
            [4.497, 4.491, 4.513, 4.496, 4.523, 4.535, 4.511, 4.525, 4.558, 4.511, 4.530, 4.515],
            [-0.0101, -0.0256, 0.0053, 0.1769],
        ),
    ],
)
def test_long_runs_with_grouped_queries(
    script: ModuleType,
    losses: Losses,
    shuffle: str,
    first: int,
    muon: list[float],
    ours: list[float],
    difference: list[float],
) -> None:
    """The comparisons of 10,000 steps, as README and docs have them."""
    cell, by_seed = Cell("gqa", 10000, "linear"), []
    tuned = LONG if shuffle == "documents" else ON_SAMPLES[10000]
    for name, wanted in (("muon", muon), ("fixed-quotient-tilted-vo", ours)):
        held = contest(script, 10000, len(wanted), first, shuffle=shuffle)
        finals = [held.config(cell, METHODS[name], tuned[name], s) for s in held.final_seeds]
        ended = [value for value in map(losses.of, finals) if value is not None]
        assert [round(value, 3) for value in ended] == wanted
        by_seed.append(ended)
    found = paired([b - a for a, b in zip(*by_seed, strict=True)])
    assert [round(x, 4) for x in (found.mean, found.low, found.high, found.p)] == difference


def mean_losses(steps: int, name: str, seeds: int) -> tuple[float, float]:
    """Of training's last batches and of validation, with grouped queries and tuned settings."""
    with (ROOT / "benchmarks/contest/runs.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["steps"] == str(steps)]
    wanted = {"model.kv_heads": "1", "training.annealing": "linear", "optimizer.name": "muon"}
    wanted["data.shuffle"] = "documents"
    if name != "muon":
        wanted |= {"optimizer.name": "fixed-quotient", "optimizer.tilted_products": "vo"}
        wanted["optimizer.tilt"] = "0.25"
    found = [
        (float(row["training_loss"]), float(row["loss"]))
        for row in rows
        if wanted.items() <= row.items() and int(row["seed"]) < 20  # others are of the tuning
    ]
    assert len(found) == seeds
    training, validation = (sum(column) / seeds for column in zip(*found, strict=True))
    return training, validation


@pytest.mark.parametrize(
    ("steps", "name", "seeds", "training", "gap"),
    [
        (1000, "muon", 8, 5.963, 0.066),
        (1000, "fixed-quotient-tilted-vo", 8, 5.946, 0.066),
        (10000, "muon", 20, 4.280, 0.256),
        (10000, "fixed-quotient-tilted-vo", 20, 4.252, 0.264),
    ],
)
def test_how_far_training_is_below_validation(
    steps: int, name: str, seeds: int, training: float, gap: float
) -> None:
    trained, validated = mean_losses(steps, name, seeds)
    assert round(trained, 3) == training
    assert round(validated - trained, 3) == gap


def test_how_far_ours_is_below_muon_on_either() -> None:
    theirs, ours = (mean_losses(10000, x, 20) for x in ("muon", "fixed-quotient-tilted-vo"))
    below = [round(a - b, 3) for a, b in zip(theirs, ours, strict=True)]
    assert below == [0.027, 0.019]


def test_a_row_that_is_not_of_its_run_is_refused(script: ModuleType) -> None:
    row = {"run": "mha-muon-s0-0", "model.kv_heads": "8", "optimizer.name": "muon"}
    with pytest.raises(ValueError, match="mha-muon-s0-0 is not the run of its options"):
        script.config_of({**row, "steps": "1000", "seed": "0"})


def lines_of(table: Path) -> list[str]:
    return table.read_text(encoding="utf-8").splitlines(keepends=True)


def test_what_is_restored_is_published_as_it_was(
    script: ModuleType, publisher: ModuleType, losses: Losses, tmp_path: Path
) -> None:
    lines = lines_of(script.RUNS)
    for kept in (lines, lines[:1], lines[:1] + lines[2::3]):
        table = tmp_path / "runs.csv"
        table.write_text("".join(kept), encoding="utf-8")
        assert publisher.publish(losses.root, table) == len(lines) - len(kept)
        assert lines_of(table) == lines


def test_rows_that_are_there_stay(
    script: ModuleType, publisher: ModuleType, losses: Losses, tmp_path: Path
) -> None:
    """Also where the folder has the run with another loss."""
    table, changed = tmp_path / "runs.csv", lines_of(script.RUNS)
    changed[1] = changed[1].rpartition(",")[0] + ",7.50\n"
    table.write_text("".join(changed), encoding="utf-8")
    assert publisher.publish(losses.root, table) == 0
    assert lines_of(table) == changed


def made(script: ModuleType, name: str, seed: int, **changed: Any) -> RunConfig:
    setting, extra = Setting(-7, -5, -3, 0.8), {k.replace("__", "."): v for k, v in changed.items()}
    run = contest(script, 1000).config(Cell("mha", 1000, "linear"), METHODS[name], setting, seed)
    return run.with_options(extra)


def test_an_option_that_none_had_gets_a_column(
    script: ModuleType, publisher: ModuleType, tmp_path: Path
) -> None:
    """And a run that diverged has no loss, and one that has not ended no row."""
    table, lab = tmp_path / "runs.csv", Lab(tmp_path / "made", lambda c: 5.25 + c.training.seed)
    outcome = ["seed", "status", "steps", "training_loss", "loss"]
    table.write_text(",".join(["run", "model.kv_heads", *outcome]) + "\n", encoding="utf-8")
    lab.make([made(script, "muon", seed) for seed in (0, 1)])
    assert publisher.publish(lab.root, table) == 2
    columns, before = script.published(table)
    assert "optimizer.tilted_products" not in columns
    lost = made(script, "fixed-quotient-tilted-vo", 1)
    good, begun = (made(script, "fixed-quotient-tilted-vo", seed) for seed in (0, 2))
    Lab(lab.root, lambda _: math.inf).make([lost])
    lab.make([good, begun, made(script, "adamw", 0, model__rope=True)])
    (lab.root / begun.key / records.STATUS).unlink()
    assert publisher.publish(lab.root, table) == 3
    columns, rows = script.published(table)
    of = {row["run"]: row for row in rows}
    assert list(of) == sorted(of)
    assert [of[c.key]["optimizer.tilted_products"] for c in (good, lost)] == ["vo", "vo"]
    assert [of[c.key]["loss"] for c in (good, lost)] == ["5.25", ""]
    named = [f"{group}.{name}" for group, options in DEFAULTS.items() for name in options]
    assert columns == ["run", *(name for name in named if name in columns), *outcome]
    for row in before:
        added = {name: x for name, x in of[row["run"]].items() if name not in row}
        assert of[row["run"]] == {**row, **added}
        assert (added["model.rope"], added["optimizer.tilted_products"]) == ("False", "all")
    assert script.restore(tmp_path / "again", table) == len(rows) == 5
    again = Losses(tmp_path / "again")
    assert [again.of(c) for c in (good, lost, begun)] == [5.25, math.inf, None]
    assert publisher.publish(tmp_path / "again", table) == 0


def test_runs_of_other_texts_are_not_published(
    script: ModuleType, publisher: ModuleType, tmp_path: Path
) -> None:
    table = tmp_path / "runs.csv"
    table.write_bytes(script.RUNS.read_bytes())
    for option, value in (("source", "elsewhere.txt"), ("documents", 100)):
        elsewhere = made(script, "muon", 0, **{f"data__{option}": value})
        Lab(tmp_path / option, lambda _: 5.0).make([elsewhere])
        told = rf"has another data\.{option} than the published runs"
        with pytest.raises(ValueError, match=told):
            publisher.publish(tmp_path / option, table)
        assert table.read_bytes() == script.RUNS.read_bytes()


def test_docs_name_every_method() -> None:
    text = (ROOT / "docs" / "contest.md").read_text(encoding="utf-8")
    start = text.index("`--methods` takes some of")
    named = text[start : text.index("`--models` takes", start)]
    assert [name for name in METHODS if f"`{name}`" not in named] == []
