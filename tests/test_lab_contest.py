"""The contest: its rule of tuning, on made-up losses."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rankfold.lab.config import RunConfig
from rankfold.lab.contest import (
    METHODS,
    TUNING_SEED,
    Cell,
    Contest,
    Losses,
    run_contest,
)
from rankfold.lab.contest_report import write_contest
from rankfold.lab.contest_results import results
from rankfold.lab.tuning import Setting, grown

from .contest_runs import CENTRES, Lab, bowl, contest, exponents, method_of


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
        wanted = [
            *((-1, -1, -1, 0.9), (0, 0, 0, 0.9), (1, 1, 1, 0.9)),  # all rates
            *((0, -1, -1, 0.9), (0, 1, 1, 0.9)),  # that of value·output products
            *((0, 0, 0, 0.6), (0, 0, 0, 0.8), (0, 0, 0, 0.95)),
            *((-1, 0, 0, 0.95), (1, 0, 0, 0.95)),  # that of query·key products
            *((0, -1, -1, 0.95), (0, 1, 1, 0.95)),  # and once more
        ]
        if method.kind != "reference":  # whose factors have one rate
            wanted += [(0, 0, -1, 0.95), (0, 0, 1, 0.95)]  # that of output weights
            wanted += [(0, -1, 0, 0.95), (0, 1, 0, 0.95)]  # that of value weights
        assert [away(c, CENTRES[name]) for c in tuning] == wanted
        finals = runs[len(tuning) :]
        assert [c.training.seed for c in finals] == list(range(8))
        assert {away(c, CENTRES[name]) for c in finals} == {(0, 0, 0, 0.95)}
        choice = held.tuning(cell, method, Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == level(CENTRES[name], 0.95)
        assert choice.interior
        assert choice.loss == pytest.approx(6.0, abs=0.06)
    alike = {(c.optimizer.weight_decay, c.optimizer.masters, c.model.final_norm) for c in lab.made}
    assert alike == {(0.0, True, True)}
    ours = [c for c in lab.made if METHODS[method_of(c)].kind == "ours"]
    assert {(c.optimizer.normalize, c.optimizer.nesterov) for c in ours} == {("whitened", True)}


def away(config: RunConfig, centre: int) -> tuple[int, int, int, float]:
    """How far the rates are from the centre, and the momentum."""
    told, rates = config.optimizer, exponents(config)
    return rates[0] - centre, rates[1] - centre, rates[2] - centre, told.momentum


def level(exponent: int, momentum: float) -> Setting:
    """All rates alike."""
    return Setting(exponent, exponent, exponent, momentum)


def test_rates_are_tuned_one_by_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES, vo=3, o=-2))
    held = contest()
    run_contest(held, tmp_path, lab.make, "tune")
    for name in held.methods:
        choice = held.tuning(held.cells()[0], METHODS[name], Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == Setting(CENTRES[name], CENTRES[name] + 3, CENTRES[name] + 1, 0.95)
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
        assert choice.setting == Setting(CENTRES[name] + 1, CENTRES[name], CENTRES[name], 0.8)
        assert choice.interior


def test_lines_that_cross_want_a_run_once(tmp_path: Path) -> None:
    lab, held = Lab(tmp_path, bowl(CENTRES)), contest()
    lab.make(next(held.stages(Losses(tmp_path)))())
    wanted = [c.key for c in held.tuning_runs(held.cells()[0], Losses(tmp_path))]
    assert len(wanted) == len(set(wanted)) == 3 * (3 + 2)


def test_a_method_goes_on_while_others_wait(tmp_path: Path) -> None:
    lab, held = Lab(tmp_path, bowl(CENTRES)), contest()
    more = next(held.stages(Losses(tmp_path)))
    begun = more()
    assert more() == []  # they are being made
    of_muon = [config for config in begun if method_of(config) == "muon"]
    lab.make(of_muon[:-1])
    assert more() == []
    lab.make(of_muon[-1:])
    new = more()
    assert {method_of(config) for config in new} == {"muon"}
    assert not {c.key for c in new} & {c.key for c in begun}


def test_a_centre_that_is_off_is_left_behind(tmp_path: Path) -> None:
    best = CENTRES | {"muon": CENTRES["muon"] + 3, "adamw": CENTRES["adamw"] - 2}
    lab = Lab(tmp_path, bowl(best, momentum=0.9))
    held = contest()
    run_contest(held, tmp_path, lab.make)
    for name in held.methods:
        choice = held.tuning(held.cells()[0], METHODS[name], Losses(tmp_path))[1]
        assert choice is not None
        assert choice.setting == level(best[name], 0.9)
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
        assert places == [-1, 0, -2, -3] + [-2] * 8
        assert [c.optimizer.vo_rate for c in tuning] == [1] * 4 + [0.5, 2] + [1] * 6
        momenta = [0.95] * 6 + [0.6, 0.8, 0.9] + [0.95] * 3
        assert [c.optimizer.momentum for c in tuning] == momenta
        shrunk = [c.optimizer.product_decay * c.optimizer.lr * 400 for c in tuning]
        assert shrunk == pytest.approx([0] * 9 + [4, 8, 16])
        assert {c.training.seed for c in tuning} == {100}
        assert {math.log2(c.optimizer.lr) - CENTRES[name] for c in finals} == {-2}
    steps = [c.training.steps for c in lab.made]
    assert steps == sorted(steps)
    # The longer horizon alone is tuned from the same runs.
    again = Lab(tmp_path, loss)
    run_contest(contest(steps=(400,), models=("gqa", "rope")), tmp_path, again.make)
    assert again.made == []
    assert contest(steps=(400,)).shortest == 40


def test_longer_horizons_have_settings_of_their_own(tmp_path: Path) -> None:
    """A momentum and a rate of value·output products."""
    short, long = bowl(CENTRES, momentum=0.6, vo=3), bowl(CENTRES, momentum=0.9, vo=1)

    def loss(config: RunConfig) -> float:
        return (short if config.training.steps == 40 else long)(config)

    held = contest(steps=(40, 400), methods=("muon",))
    run_contest(held, tmp_path, Lab(tmp_path, loss).make)
    chosen = [held.tuning(c, METHODS["muon"], Losses(tmp_path))[1] for c in held.cells()]
    wanted = [(CENTRES["muon"] + k, CENTRES["muon"] + k, m) for k, m in ((3, 0.6), (1, 0.9))]
    assert [c.setting[1:4] for c in chosen if c is not None] == wanted


def test_longer_horizons_have_a_decay_but_for_isometries(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES, vo=2, decay=3))
    names = "muon", "fixed-quotient", "adamw", "isometry-quotient"
    held = contest(steps=(40, 400), methods=names)
    run_contest(held, tmp_path, lab.make)
    short, long = held.cells()
    for name in names:
        choices = (held.tuning(cell, METHODS[name], Losses(tmp_path))[1] for cell in (short, long))
        decays = [c.setting.decay for c in choices if c is not None]
        assert decays == [None, None if name == "isometry-quotient" else 3]
    assert {c.optimizer.weight_decay for c in lab.made} == {0.0}
    write_contest(held, tmp_path, tmp_path / "page")
    assert "e^−8<" in (tmp_path / "page/index.html").read_text("utf-8")
    lines = (tmp_path / "page/tables/contest.csv").read_text("utf-8").splitlines()
    place = lines[0].split(",").index("decay")
    told = {tuple(line.split(",")[1:4:2]): line.split(",")[place] for line in lines[1:]}
    assert {told["40", name] for name in names} == {""}
    assert [told["400", name] for name in names] == ["8", "8", "8", ""]


@pytest.mark.parametrize(("wanted", "found"), [(5, 5), (8, 8), (9, 8)])
def test_decays_grow_until_the_best_is_inside(wanted: int, found: int, tmp_path: Path) -> None:
    """By four at most, one more than three."""
    lab = Lab(tmp_path, bowl(CENTRES, decay=wanted))
    held = contest(steps=(40, 400), methods=("muon",))
    run_contest(held, tmp_path, lab.make)
    choice = held.tuning(held.cells()[1], METHODS["muon"], Losses(tmp_path))[1]
    assert choice is not None
    assert (choice.setting.decay, choice.interior) == (found, found < 8)


def test_an_end_of_the_short_tuning_is_remembered_at_longer_horizons(tmp_path: Path) -> None:
    """What one rate of value·output products wants is found there, and for one factor not."""
    lab = Lab(tmp_path, bowl(CENTRES, o=-12))
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


def test_finals_on_other_seeds_are_of_the_same_settings(tmp_path: Path) -> None:
    lab = Lab(tmp_path, bowl(CENTRES))
    run_contest(contest(seeds=2), tmp_path, lab.make)
    first = {method_of(c): c for c in lab.made if c.training.seed == 0}
    lab.made.clear()
    run_contest(contest(seeds=3, first_seed=8), tmp_path, lab.make)
    assert [c.training.seed for c in lab.made] == [8] * 3 + [9] * 3 + [10] * 3
    for config in lab.made:
        like = first[method_of(config)]
        assert config == like.with_options({"training.seed": config.training.seed})


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
        ({"seeds": 101}, "seeds from 0 to 99, one at least, not 101 from 0 on"),
        ({"seeds": 0}, "not 0 from 0 on"),
        ({"first_seed": -1}, "not 8 from -1 on"),
        ({"first_seed": 93}, "not 8 from 93 on"),
        ({"annealings": ("exp",)}, "one of none, linear, cosine"),
        ({"steps": (0,)}, "at least 1"),
        ({"extra": {"optimizer.product_decay": 0.1}}, "is the contest's to choose"),
        ({"extra": {"optimizer.momentum": 0.1}}, "is the contest's to choose"),
    ],
)
def test_contests_that_cannot_be_held(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        contest(**changed)


def test_an_entry_tilts_value_output_products_alone() -> None:
    whole, part = (METHODS[f"fixed-quotient-tilted{suffix}"] for suffix in ("", "-vo"))
    assert part.options == {**whole.options, "optimizer.tilted_products": "vo"}
    assert (part.kind, part.centres) == (whole.kind, whole.centres)


def test_the_papers_contest() -> None:
    held = Contest("paper", tuple(METHODS), ("mha", "gqa", "rope"), (1000, 10000), 8, ("none",))
    for cell in held.cells():
        config = held.config(cell, METHODS["muon"], Setting(-7, -6, -5, 0.9), 0)
        assert (config.model.layers, config.model.weights) == (6, "bfloat16")
        assert config.optimizer.other_lr == 2.0**-10
        assert config.model.rope == config.model.qk_norm == (cell.model == "rope")
        assert (config.model.kv_heads == 1) == (cell.model == "gqa")
        assert config.training.graph
        assert (config.optimizer.lr, config.optimizer.vo_rate) == (2.0**-7, 2.0)
        assert config.optimizer.output_rate == 2.0
