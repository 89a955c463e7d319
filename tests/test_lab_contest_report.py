"""The contest: its verdicts, its page, and the command for real."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankfold.cli import app
from rankfold.lab import records
from rankfold.lab.contest import (
    METHODS,
    TUNING_SEED,
    Cell,
    Choice,
    Losses,
    run_contest,
)
from rankfold.lab.contest_report import dot_plot, standing, write_contest
from rankfold.lab.contest_results import Entry, Result, results
from rankfold.lab.figures import style
from rankfold.lab.report import write_report
from rankfold.lab.tuning import Setting

from .contest_runs import CENTRES, Lab, bowl, contest
from .lab_runs import small, write_corpus

# Verdicts ----------------------------------------------------------------------------------------


def result_of(losses: dict[str, list[float]], planned: int = 8) -> Result:
    """A cell in which each method has these losses."""
    entries = [
        Entry(METHODS[name], Choice(Setting(-7, -7, -7, 0.9), 4.0, True), dict(enumerate(values)))
        for name, values in losses.items()
    ]
    return Result(Cell("mha", 1000, "none"), planned, entries)


def around(centre: float, spread: float = 0.001, seeds: int = 8) -> list[float]:
    return [centre + seed / 10 + spread * (-1) ** seed for seed in range(seeds)]


@pytest.mark.parametrize(
    ("losses", "met", "words"),
    [
        ({"muon": around(4, 0), "fixed-embedded": around(3.98)}, True, "goal met: fixed-embedded"),
        ({"muon": around(4, 0), "fixed-embedded": around(3.995)}, False, "is below 0.01 nats"),
        ({"muon": around(4, 0), "fixed-embedded": around(3.98, 0.1)}, False, "null, no difference"),
        ({"muon": around(4, 0), "fixed-embedded": around(4.02)}, False, "Muon is better"),
        ({"muon": around(4, 0)}, None, "no verdict"),
        ({"adamw": around(4, 0), "fixed-embedded": around(3.9)}, None, "no verdict"),
        ({"muon": around(4, 0), "fixed-embedded": around(3.9, 0, 7)}, None, "open, 1 run of"),
        (
            {"muon": around(4, 0), "dion": around(3.97, 0), "fixed-embedded": around(3.98)},
            False,
            "fixed-embedded − dion",
        ),
        (
            {"muon": around(4, 0), "fixed-embedded-metric": around(3.9)},
            None,
            "no verdict",
        ),
    ],
)
def test_verdicts(losses: dict[str, list[float]], met: bool | None, words: str) -> None:
    result = result_of(losses)
    assert result.met is met
    assert words in result.verdict


def test_fewer_seeds_are_no_verdict() -> None:
    result = result_of(
        {"muon": around(4, 0, 3), "fixed-embedded": around(3.9, 0.001, 3)}, planned=3
    )
    assert result.met is None
    assert result.verdict.startswith("preliminary, of fewer than 8 seeds")


def test_a_verdict_waits_for_those_it_is_about_alone() -> None:
    losses = {"muon": around(4, 0), "fixed-embedded": around(3.98), "adamw": around(4.2, 0, 5)}
    result = result_of(losses)
    assert result.met
    assert result.verdict.endswith("; 3 runs of other methods are still to be made.")


def test_the_best_of_several_pays_for_the_choice() -> None:
    noisy = around(3.985, 0.0105)
    alone = result_of({"muon": around(4, 0), "fixed-embedded": noisy})
    assert alone.best is not None
    assert alone.best[1].p < 0.01
    assert alone.met
    others = {"fixed-quotient": around(4.1), "isometry-quotient": around(4.2)}
    several = result_of({"muon": around(4, 0), "fixed-embedded": noisy, **others})
    assert several.best is not None
    assert several.best[1].p == pytest.approx(3 * alone.best[1].p)
    assert several.met is False
    assert several.verdict.startswith("null")


def test_a_diverged_seed_has_no_number_and_does_not_hold_up_the_others() -> None:
    spoilt = [*around(3.9, 0, 7), math.inf]
    result = result_of({"muon": around(4, 0), "dion": spoilt, "fixed-embedded": around(3.98)})
    dion = result.named("dion")
    assert dion is not None
    assert dion.note == "1 diverged"
    assert dion.against(result.named("muon")) is None
    assert result.met
    assert result.verdict.endswith("without a mean, as seeds diverged: dion.")


def test_a_candidate_that_diverged_was_one_to_choose_from() -> None:
    losses = {"muon": around(4, 0), "fixed-embedded": around(3.98)}
    alone = result_of(losses)
    spoilt = result_of({**losses, "fixed-quotient": [*around(3.9, 0, 7), math.inf]})
    assert alone.best is not None
    assert spoilt.best is not None
    assert spoilt.best[1].p == pytest.approx(2 * alone.best[1].p)
    assert "our candidates counted: 2" in spoilt.verdict


# Pages -------------------------------------------------------------------------------------------


def test_the_page_has_what_the_numbers_say(tmp_path: Path) -> None:
    best = CENTRES | {"adamw": CENTRES["adamw"] - 30}
    lab = Lab(tmp_path / "runs", bowl(best, gap=0.03))
    held = contest(models=("rope",), annealings=("none", "linear"))
    run_contest(held, lab.root, lab.make)
    found = write_contest(held, lab.root, tmp_path)
    assert [r.met for r in found] == [True] * 2
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "It is met in 2 of 2 comparisons. The pair" in page
    assert "chosen by the losses shown here" not in page
    assert "Settings were tuned on another seed" in page
    assert len(re.findall(r"Goal met: fixed-quotient − muon = −0\.0[23]", page)) == 2
    assert "2⁻¹⁸*" in page  # where AdamW's lines ended
    assert "0.95*" in page  # the last momentum there is
    told = [
        page.index(words)
        for words in ("in powers of two", "momenta 0.6", "query·key products alone")
    ]
    assert told == sorted(told)
    assert page.index("The contest") < page.index("Models and data") < page.index("Summary")
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for name in ("figures/contest.svg", "figures/contest.png", "tuning/index.html"):
        assert (tmp_path / name).stat().st_size > 1000
    with (tmp_path / "tables" / "contest.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 3
    (ours,) = [
        line
        for line in lines
        if (line["model"], line["annealing"], line["method"])
        == ("rope", "linear", "fixed-quotient")
    ]
    result = next(r for r in found if r.cell == Cell("rope", 40, "linear"))
    ours_entry, test = result.best or pytest.fail("no best")
    assert float(ours["lr_qk"]) == 2.0 ** CENTRES["fixed-quotient"]
    assert float(ours["loss"]) == pytest.approx(ours_entry.loss)
    assert float(ours["rival_mean"]) == pytest.approx(test.mean)
    assert float(ours["adamw_p"]) < 1e-6
    assert ours["goal_met"] == "1"
    keys = {c.key for c in lab.made if c.training.seed == TUNING_SEED}
    assert sum(int(line["tuning_runs"]) for line in lines) == len(keys)
    adamw = next(line for line in lines if line["method"] == "adamw")
    assert (adamw["interior"], adamw["adamw_mean"]) == ("0", "")
    tuning = (tmp_path / "tuning/index.html").read_text("utf-8")
    assert "Learning rates" in tuning
    assert "chosen by the losses shown here" in tuning


def test_a_contest_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    found = write_contest(contest(), tmp_path / "runs", tmp_path)
    assert [r.verdict for r in found] == ["open, 24 runs of the comparison are still to be made."]
    assert "not tuned yet" in (tmp_path / "index.html").read_text("utf-8")
    assert not (tmp_path / "figures" / "contest.svg").exists()


def test_methods_of_one_optimizer_stay_apart(tmp_path: Path) -> None:
    names = ("muon", "fixed-quotient", "fixed-quotient-tilted", "fixed-quotient-tilted-vo")
    lab = Lab(tmp_path / "runs", bowl(CENTRES))
    held = contest(methods=names, seeds=2)
    run_contest(held, lab.root, lab.make)
    write_contest(held, lab.root, tmp_path)
    for page, settings in ((tmp_path, 1), (tmp_path / "tuning", 16)):
        with (page / "tables/summary.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        assert {line["optimizer"] for line in lines} == set(names)
        assert len(lines) == settings * len(names)
        assert sum(int(line["best"]) for line in lines) == len(names)
        shown = (page / "index.html").read_text("utf-8").partition("<h2>Summary</h2>")[2]
        tags = re.findall(r"best of \d+", shown.partition("<details>")[0])
        assert tags == ["best of 16"] * (len(names) if settings > 1 else 0)


def test_methods_have_lines_of_their_own() -> None:
    assert len({style(name) for name in METHODS}) == len(METHODS)


def test_what_a_contest_no_longer_shows_is_removed(tmp_path: Path) -> None:
    lab, held = Lab(tmp_path / "runs", bowl(CENTRES)), contest(seeds=2)
    run_contest(held, lab.root, lab.make)
    write_contest(held, lab.root, tmp_path)
    assert (tmp_path / "figures/contest.svg").exists()
    write_contest(contest(methods=("adamw",)), lab.root, tmp_path)
    assert not (tmp_path / "figures/contest.svg").exists()
    assert (tmp_path / "tables/contest.csv").exists()
    write_report(records.read_runs(lab.root), tmp_path)
    assert not (tmp_path / "tables/contest.csv").exists()


def test_losses_are_known_by_their_seeds(tmp_path: Path) -> None:
    held, lab = contest(seeds=2, first_seed=8), Lab(tmp_path, bowl(CENTRES))
    run_contest(held, tmp_path, lab.make)
    (result,) = results(held, Losses(tmp_path))
    assert [sorted(entry.losses) for entry in result.entries] == [[8, 9]] * 3


def test_counts_agree(tmp_path: Path) -> None:
    held = contest(seeds=2, methods=("muon", "adamw"))
    assert "comparison 0 of 4" in standing(held, tmp_path / "runs")
    (found,) = write_contest(held, tmp_path / "runs", tmp_path)
    assert found.verdict.startswith("open, 4 runs of the comparison are")
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "met in 0 of 1 comparison; 1 is open, with runs still to be made." in page


def test_a_comparison_of_few_seeds_is_not_called_open(tmp_path: Path) -> None:
    held, lab = contest(seeds=2, models=("mha", "gqa")), Lab(tmp_path / "runs", bowl(CENTRES))
    run_contest(held, lab.root, lab.make)
    write_contest(held, lab.root, tmp_path)
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "met in 0 of 2 comparisons; 2 are preliminary, of fewer than 8 seeds." in page


def test_the_figure_has_room_for_its_words(tmp_path: Path) -> None:
    names = ("muon", "fixed-quotient", "adamw", "whitened")
    held = contest(models=("mha", "rope"), methods=names, annealings=("linear",))
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(held, tmp_path, lab.make)
    ((_, _, figure),) = dot_plot(results(held, Losses(tmp_path)))
    figure.draw_without_rendering()
    width = figure.bbox.width
    for axis in figure.axes:
        for text in (axis.title, *axis.get_yticklabels()):
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= width
        low, high = sorted(axis.get_ylim())
        assert low <= -0.5
        assert high >= len(axis.get_yticks()) - 0.5
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["ours", "Muon with a part of what ours have", "AdamW", "goal, −0.01 nats"]


def test_where_a_contest_stands(tmp_path: Path) -> None:
    held = contest(seeds=2)
    fresh = standing(held, tmp_path)
    assert "tuning 0 of 9 runs known so far, comparison 0 of 6, 600 steps left" in fresh
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(held, tmp_path, lab.make, "tune")
    assert "tuning 48 of 48" in standing(held, tmp_path)
    assert "comparison 0 of 6, about 0 min left at 10.0 ms a step" in standing(held, tmp_path)
    run_contest(held, tmp_path, lab.make)
    text = standing(held, tmp_path)
    assert "comparison 6 of 6" in text
    assert text.count("finished") == 54


def test_what_always_diverges_has_nothing_left_to_run(tmp_path: Path) -> None:
    held, fine = contest(seeds=2), bowl(CENTRES)
    lab = Lab(tmp_path, lambda run: math.inf if run.optimizer.name == "adamw" else fine(run))
    run_contest(held, tmp_path, lab.make)
    assert "comparison 4 of 4, about 0 min left" in standing(held, tmp_path)


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["compare", *map(str, words)])


def test_a_contest_for_real(command: Callable[..., Any], tmp_path: Path) -> None:
    wanted = small(write_corpus(tmp_path)).as_dict()
    sizes = [
        f"--set={group}.{name}={value}"
        for group in ("data", "model")
        for name, value in wanted[group].items()
        if value
    ]
    asked = ("--contest", *sizes, "--steps", 10, "--seeds", 2, "--device", "cpu", "--workers", 1)
    asked = (*asked, "--models", "mha", "--methods", "muon,fixed-embedded")
    listed = command(*asked, "--dry-run")
    assert listed.exit_code == 0, listed.output
    assert listed.stdout.count("new") == 6
    made = command(*asked)
    assert made.exit_code == 0, made.output
    assert "preliminary, of fewer than 8 seeds: fixed-embedded − muon" in made.stdout
    runs = records.read_runs(tmp_path / "comparison" / "runs")
    assert len(runs) >= 20 + 4
    assert {run.status for run in runs} == {"finished"}
    page = tmp_path / "comparison" / "index.html"
    before = page.read_bytes()
    again = command(*asked)
    assert again.exit_code == 0
    assert "finished" not in again.output
    assert page.read_bytes() == before
    page.unlink()
    assert command(*asked, "--only", "report").exit_code == 0
    assert page.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "mha"), "--models is an option of --contest"),
        (("--dry-run",), "--dry-run is an option of --contest"),
        (("--first-seed", 0), "--first-seed is an option of --contest"),
        (("--contest", "--first-seed", 99), "not 3 from 99 on"),
        (("--set", "training.seed=5"), "as many as --seeds says"),
        (("--contest", "--set", "training.steps=5"), "training.steps is the contest's to choose"),
        (("--contest", "--set", "optimizer.lr=1"), "optimizer.lr is the contest's to choose"),
        (("--contest", "--optimizer", "adamw"), "no --optimizer"),
        (("--contest", "--only", "all"), "one of tune, final, report"),
        (("--contest", "--steps", "few"), "like 1000,10000"),
        (("--contest", "--preset", "paper-gqa"), "paper or tiny"),
        (("--contest", "--methods", "sgd"), "there is no method 'sgd'"),
    ],
)
def test_wrong_uses_are_told(
    command: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    failed = command(*words)
    assert failed.exit_code == 2
    assert message in failed.stderr
    assert failed.stderr.strip().count("\n") == 0
