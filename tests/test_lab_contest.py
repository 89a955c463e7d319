"""The contest: its rule of tuning on made-up losses, its verdicts, and the command for real."""

from __future__ import annotations

import csv
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankfold.cli import app
from rankfold.lab import records
from rankfold.lab.config import RunConfig
from rankfold.lab.contest import (
    METHODS,
    TUNING_SEED,
    Cell,
    Choice,
    Contest,
    Losses,
    Setting,
    grown,
    run_contest,
)
from rankfold.lab.contest_report import Entry, Result, results, standing, write_contest
from rankfold.lab.sweep import Outcome

from .lab_runs import small, write_corpus

LossOf = Callable[[RunConfig], float]


def contest(**changed: Any) -> Contest:
    chosen: dict[str, Any] = {
        "preset": "tiny",
        "methods": ("adamw", "muon", "fixed-quotient"),
        "models": ("mha",),
        "steps": (40,),
        "seeds": 8,
        "annealings": ("none",),
    }
    return Contest(**{**chosen, **changed})


def method_of(config: RunConfig) -> str:
    names = [config.optimizer.name, f"{config.optimizer.name}-{config.optimizer.normalize}"]
    return next(n for n in reversed(names) if n in METHODS)


class Lab:
    """Runs that take no time: their losses are given, and what was made is kept in order."""

    def __init__(self, root: Path, loss: LossOf) -> None:
        self.root, self.loss = root, loss
        self.made: list[RunConfig] = []
        self.most = math.inf
        self.failing: set[str] = set()

    def make(self, configs: list[RunConfig]) -> list[Outcome]:
        return [self._make_one(config) for config in configs]

    def _make_one(self, config: RunConfig) -> Outcome:
        if len(self.made) >= self.most:
            raise KeyboardInterrupt
        self.made.append(config)
        if config.optimizer.name in self.failing:
            return Outcome(config.key, "failed", "", math.nan)
        loss, folder = self.loss(config), self.root / config.key
        folder.mkdir(parents=True)
        status = "finished" if math.isfinite(loss) else "diverged"
        records.write_json(folder / records.CONFIG, {"key": config.key, "config": config.as_dict()})
        told = {"status": status, "message": "", "machine": {}, "workers": 1}
        records.write_json(folder / records.STATUS, told)
        recorder = records.Recorder(folder, 0)
        recorder.add("train", 1, loss=5.0, seconds=0.01, optimizer_seconds=0.001)
        recorder.add("validation", config.training.steps, loss=loss)
        recorder.close()
        return Outcome(config.key, status, "", loss)


def bowl(best: dict[str, int], momentum: float = 0.95, gap: float = 0.05, vo: int = 0) -> LossOf:
    """A loss with its least value at these exponents, of value·output products ``vo`` higher.

    Ours is ``gap`` below all others.
    """

    def loss(config: RunConfig) -> float:
        name, seed, told = method_of(config), config.training.seed, config.optimizer
        away = math.log2(told.lr) - best[name]
        share = math.log2(told.vo_rate)
        noise = random.Random(f"{name}{seed}").gauss(0, 0.003)
        ours = gap if METHODS[name].kind == "ours" else 0.0
        rates = away**2 + (away + share - vo) ** 2
        return 4 + rates + abs(told.momentum - momentum) + seed / 50 + noise - ours

    return loss


CENTRES = {name: method.centres["tiny"] for name, method in METHODS.items()}


# The rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({-1: 3.0, 0: 1.0, 1: 2.0}, [-1, 0, 1]),
        ({-1: 1.0, 0: 2.0, 1: 3.0}, [-2, -1, 0, 1]),
        ({-1: 3.0, 0: 2.0, 1: 1.0}, [-1, 0, 1, 2]),
        ({-1: 3.0, 0: 2.0, 1: 1.0, 2: 0.5}, [-1, 0, 1, 2, 3]),
        ({-1: 3.0, 0: 2.0, 1: 1.0, 2: 1.5}, [-1, 0, 1, 2]),
        ({-1: 3.0, 0: 2.0}, [-1, 0, 1]),  # not before all have ended
        (dict.fromkeys(range(-1, 2), math.inf), [-2, -1, 0, 1]),
        ({k: float(-k) for k in range(-9, 9)}, [-1, 0, 1, 2, 3, 4, 5]),  # and no further
    ],
)
def test_lines_grow_until_the_best_is_inside(losses: dict[int, float], wanted: list[int]) -> None:
    assert grown([-1, 0, 1], losses.get) == wanted


def test_all_are_tuned_alike_and_compared_on_fresh_seeds(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES))
    held = contest(methods=tuple(METHODS))
    run_contest(held, tmp_path, lab.make)
    (cell,) = held.cells()
    for name, method in METHODS.items():
        runs = [config for config in lab.made if method_of(config) == name]
        tuning = [c for c in runs if c.training.seed == TUNING_SEED]
        assert [away(c, CENTRES[name]) for c in tuning] == [
            *((-1, -1, 0.9), (0, 0, 0.9), (1, 1, 0.9)),  # both rates
            *((0, -1, 0.9), (0, 1, 0.9)),  # that of value·output products
            *((0, 0, 0.6), (0, 0, 0.8), (0, 0, 0.95)),
            *((-1, 0, 0.95), (1, 0, 0.95)),  # that of query·key products
            *((0, -1, 0.95), (0, 1, 0.95)),  # and once more
        ]
        finals = runs[len(tuning) :]
        assert [c.training.seed for c in finals] == list(range(8))
        assert {away(c, CENTRES[name]) for c in finals} == {(0, 0, 0.95)}
        choice = held.tuning(cell, method, Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == Setting(CENTRES[name], CENTRES[name], 0.95)
        assert choice.interior
        assert choice.loss == pytest.approx(6.0, abs=0.06)
    alike = {(c.optimizer.weight_decay, c.optimizer.masters, c.model.final_norm) for c in lab.made}
    assert alike == {(0.0, True, True)}
    ours = [c for c in lab.made if METHODS[method_of(c)].kind == "ours"]
    assert {(c.optimizer.normalize, c.optimizer.nesterov) for c in ours} == {("whitened", True)}


def away(config: RunConfig, centre: int) -> tuple[int, int, float]:
    """How far the two rates are from the centre, and the momentum."""
    told = config.optimizer
    both = (math.log2(told.lr), math.log2(told.lr * told.vo_rate))
    return int(both[0]) - centre, int(both[1]) - centre, told.momentum


def test_the_two_rates_are_tuned_one_by_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES, vo=3))
    held = contest()
    run_contest(held, tmp_path, lab.make, "tune")
    for name in held.methods:
        choice = held.tuning(held.cells()[0], METHODS[name], Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == Setting(CENTRES[name], CENTRES[name] + 3, 0.95)
        assert choice.interior
    assert max(Counter(c.key for c in lab.made).values()) == 1


def test_rates_that_another_momentum_wants_are_found(tmp_path: Path) -> None:
    even, moved = bowl(CENTRES, momentum=0.8), {name: k + 1 for name, k in CENTRES.items()}

    def loss(config: RunConfig) -> float:
        at_first = config.optimizer.momentum == 0.9
        return even(config) if at_first else bowl(moved, momentum=0.8, vo=-1)(config) - 9

    lab, held = Lab(tmp_path, loss), contest()
    run_contest(held, tmp_path, lab.make, "tune")
    for name in held.methods:
        choice = held.tuning(held.cells()[0], METHODS[name], Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == Setting(CENTRES[name] + 1, CENTRES[name], 0.8)
        assert choice.interior


def test_lines_that_cross_want_a_run_once(tmp_path: Path) -> None:
    lab, held = Lab(tmp_path, bowl(CENTRES)), contest()
    lab.make(next(held.rounds(Losses(tmp_path))))
    wanted = [c.key for c in held.tuning_runs(held.cells()[0], Losses(tmp_path))]
    assert len(wanted) == len(set(wanted)) == 3 * (3 + 2)


def test_a_centre_that_is_off_is_left_behind(tmp_path: Path) -> None:
    best = CENTRES | {"muon": CENTRES["muon"] + 3, "adamw": CENTRES["adamw"] - 2}
    lab = Lab(tmp_path, bowl(best, momentum=0.9))
    held = contest()
    run_contest(held, tmp_path, lab.make)
    for name in held.methods:
        choice = held.tuning(held.cells()[0], METHODS[name], Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == Setting(best[name], best[name], 0.9)
        assert choice.interior
    assert max(Counter(c.key for c in lab.made).values()) == 1


def test_longer_horizons_begin_at_the_shorter_ones_best(tmp_path: Path) -> None:
    short, long = CENTRES, {name: k - 2 for name, k in CENTRES.items()}

    def loss(config: RunConfig) -> float:
        return bowl(short if config.training.steps == 40 else long)(config)

    lab = Lab(tmp_path, loss)
    held = contest(steps=(400, 40), annealings=("none", "linear"), models=("gqa", "rope"))
    run_contest(held, tmp_path, lab.make)
    cells = [Cell(m, s, a) for s in (40, 400) for a in ("none", "linear") for m in held.models]
    assert held.cells() == cells
    for name in held.methods:
        runs = [
            c
            for c in lab.made
            if c.training.steps == 400
            and c.training.annealing == "linear"
            and c.model.rope
            and method_of(c) == name
        ]
        tuning, finals = runs[: -held.seeds], runs[-held.seeds :]
        places = [math.log2(c.optimizer.lr) - CENTRES[name] for c in tuning]
        assert places == [-1, 0, -2, -3]
        assert {(c.training.seed, c.optimizer.momentum) for c in tuning} == {(100, 0.95)}
        assert {math.log2(c.optimizer.lr) - CENTRES[name] for c in finals} == {-2}
    steps = [c.training.steps for c in lab.made]
    assert steps == sorted(steps)
    # The longer horizon alone is tuned from the same runs.
    again = Lab(tmp_path, loss)
    run_contest(contest(steps=(400,), models=("gqa", "rope")), tmp_path, again.make)
    assert again.made == []
    assert contest(steps=(400,)).shortest == 40


def test_an_end_of_the_short_tuning_is_remembered_at_longer_horizons(tmp_path: Path) -> None:
    """Only the common rate is tuned there: what value·output products want was not found."""
    lab = Lab(tmp_path, bowl(CENTRES, vo=12))
    held = contest(steps=(40, 400), methods=("muon",))
    run_contest(held, tmp_path, lab.make)
    for cell in held.cells():
        choice = held.tuning(cell, METHODS["muon"], Losses(tmp_path))[1]
        assert choice is not None
        assert not choice.interior


def test_finals_go_seed_by_seed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(contest(seeds=3), tmp_path, lab.make)
    finals = [(c.training.seed, method_of(c)) for c in lab.made if c.training.seed < 100]
    assert finals == [(s, m) for s in range(3) for m in ("muon", "fixed-quotient", "adamw")]


def test_a_contest_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    best = CENTRES | {"muon": CENTRES["muon"] + 2}
    whole = Lab(tmp_path / "whole", bowl(best))
    run_contest(contest(), whole.root, whole.make)
    cut = Lab(tmp_path / "cut", bowl(best))
    calls = 0
    for most in range(7, 10**6, 7):
        cut.most = most
        calls += 1
        try:
            run_contest(contest(), cut.root, cut.make)
            break
        except KeyboardInterrupt:
            pass
    assert calls > 5
    # In another order, as a line may grow before all others have their first rates.
    assert sorted(c.key for c in cut.made) == sorted(c.key for c in whole.made)


def test_parts_of_a_contest(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(contest(), tmp_path, lab.make, "final")
    assert lab.made == []
    run_contest(contest(), tmp_path, lab.make, "tune")
    assert {c.training.seed for c in lab.made} == {TUNING_SEED}
    run_contest(contest(), tmp_path, lab.make, "final")
    assert {c.training.seed for c in lab.made} == {TUNING_SEED, *range(8)}


def test_a_failing_method_holds_up_no_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES))
    lab.failing = {"muon"}
    outcomes = run_contest(contest(), tmp_path, lab.make)
    assert sum(o.status == "failed" for o in outcomes) == 3
    assert max(Counter(c.key for c in lab.made).values()) == 1
    (result,) = results(contest(), Losses(tmp_path))
    assert [len(e.losses) for e in result.entries] == [0, 8, 8]
    assert result.met is None
    assert result.verdict.startswith("open, 8 runs")
    lab.failing = set()
    run_contest(contest(), tmp_path, lab.make)  # tried again by the next call
    (result,) = results(contest(), Losses(tmp_path))
    assert result.met


def test_a_method_that_always_diverges_is_not_compared(tmp_path: Path) -> None:
    fine = bowl(CENTRES)
    lab = Lab(tmp_path, lambda c: math.inf if c.optimizer.name == "adamw" else fine(c))
    run_contest(contest(), tmp_path, lab.make)
    (result,) = results(contest(), Losses(tmp_path))
    adamw = result.named("adamw")
    assert adamw is not None
    assert (adamw.note, adamw.losses) == ("diverged at every rate", {})
    assert result.met
    write_contest(contest(), tmp_path, tmp_path / "page")
    assert "diverged at every rate" in (tmp_path / "page/index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"preset": "tiny-gqa"}, "paper or tiny"),
        ({"methods": ("sgd",)}, "there is no method 'sgd'"),
        ({"models": ("vit",)}, "there are mha, gqa, rope"),
        ({"seeds": 101}, "1 to 100 seeds"),
        ({"annealings": ("exp",)}, "one of none, linear, cosine"),
        ({"steps": (0,)}, "at least 1"),
    ],
)
def test_contests_that_cannot_be_held(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        contest(**changed)


def test_the_papers_contest() -> None:
    held = Contest("paper", tuple(METHODS), ("mha", "gqa", "rope"), (1000, 10000), 8, ("none",))
    for cell in held.cells():
        config = held.config(cell, METHODS["muon"], Setting(-7, -6, 0.9), 0)
        assert (config.model.layers, config.model.weights) == (6, "bfloat16")
        assert config.optimizer.other_lr == 2.0**-10
        assert config.model.rope == config.model.qk_norm == (cell.model == "rope")
        assert (config.model.kv_heads == 1) == (cell.model == "gqa")
        assert config.training.graph
        assert (config.optimizer.lr, config.optimizer.vo_rate) == (2.0**-7, 2.0)


# Verdicts ----------------------------------------------------------------------------------------


def result_of(losses: dict[str, list[float]], planned: int = 8) -> Result:
    """A cell in which each method has these losses."""
    entries = [
        Entry(METHODS[name], Choice(Setting(-7, -7, 0.9), 4.0, True), dict(enumerate(values)))
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
        ({"muon": around(4, 0), "fixed-embedded": around(3.9, 0, 7)}, None, "open, 1 runs"),
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
    assert "It is met in 2 of 2 comparisons; 0 of them are open." in page
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


def test_a_contest_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    found = write_contest(contest(), tmp_path / "runs", tmp_path)
    assert [r.verdict for r in found] == ["open, 16 runs of the comparison are still to be made."]
    assert "not tuned yet" in (tmp_path / "index.html").read_text("utf-8")
    assert not (tmp_path / "figures" / "contest.svg").exists()


def test_where_a_contest_stands(tmp_path: Path) -> None:
    held = contest(seeds=2)
    fresh = standing(held, tmp_path)
    assert "tuning 0 of 9 runs known so far, comparison 0 of 6, 600 steps left" in fresh
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(held, tmp_path, lab.make, "tune")
    assert "tuning 36 of 36" in standing(held, tmp_path)
    assert "comparison 0 of 6, about 0 min left at 10.0 ms a step" in standing(held, tmp_path)
    run_contest(held, tmp_path, lab.make)
    text = standing(held, tmp_path)
    assert "comparison 6 of 6" in text
    assert text.count("finished") == 42


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
