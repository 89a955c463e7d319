"""Sweeps whose processes are killed, as by a machine that runs out of memory."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rankfold.lab import sweep
from rankfold.lab.config import RunConfig, preset
from rankfold.lab.sweep import Outcome, read_sweep, run_sweep

ALWAYS, ONCE = 0, 3  # seeds


def die_of_some(config: RunConfig, root: Path, *_: object) -> Outcome:
    """In place of a run: its process is killed, always or the first time, by its seed."""
    seed, before = config.training.seed, root / f"{config.key}-begun"
    if seed == ALWAYS or (seed == ONCE and not before.exists()):
        before.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(config.key, "finished", "", float(seed))


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_a_worker_that_dies_fails_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the runs that wait, nor those that were made beside it."""
    monkeypatch.setattr(sweep, "run_one", die_of_some)
    configs = [preset("tiny").with_options({"training.seed": seed}) for seed in range(6)]
    told: list[str] = []
    outcomes = run_sweep(
        configs, tmp_path, device="cpu", workers=2, done=lambda each, *_: told.append(each.key)
    )
    assert sorted(told) == sorted(config.key for config in configs)
    found = {outcome.key: outcome for outcome in outcomes}
    statuses = [found[config.key].status for config in configs]
    assert statuses == ["failed", *["finished"] * 5]
    assert "its process died twice" in found[configs[ALWAYS].key].message


def who_made_it(config: RunConfig, root: Path, *_: object) -> Outcome:
    """In place of a run: the process it is made in."""
    return Outcome(config.key, "finished", str(os.getpid()), float(config.training.seed))


@pytest.mark.parametrize("workers", [1, 2])
def test_more_runs_as_others_end(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same processes make them, which would else begin with torch, and with a compiler."""
    monkeypatch.setattr(sweep, "run_one", who_made_it)
    configs = [preset("tiny").with_options({"training.seed": seed}) for seed in range(12)]
    later, totals = configs[2:], []

    def more() -> list[RunConfig]:
        new, later[:] = later[:2], later[2:]
        return new

    def done(outcome: Outcome, count: int, total: int) -> None:
        totals.append((count, total))

    first = configs[:2]
    outcomes = run_sweep(first, tmp_path, device="cpu", workers=workers, done=done, more=more)
    assert sorted(each.loss for each in outcomes) == list(range(12))
    assert totals == [(k, min(12, 2 + 2 * k)) for k in range(1, 13)]
    assert len({each.message for each in outcomes}) <= workers
    assert len(first) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_more_runs_after_one_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_one", die_of_some)
    configs = [preset("tiny").with_options({"training.seed": seed}) for seed in range(6)]
    later = [[], [], configs[4:]]

    def more() -> list[RunConfig]:
        return later.pop(0) if later else []

    lost, *others = configs[:3]  # seed 0 always dies
    outcomes = run_sweep([*others, lost], tmp_path, device="cpu", workers=2, more=more)
    assert outcomes[2].status == "failed"  # the last of those there were
    assert {o.key for o in outcomes[3:]} == {config.key for config in configs[4:]}


def test_what_is_common_may_suit_the_grid_alone(tmp_path: Path) -> None:
    """The preset's optimizer has no growth; it is not the optimizer of any run."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        "[options]\noptimizer.growth = 0.5\n[[grid]]\noptimizer.name = 'fixed-quotient'\n",
        encoding="utf-8",
    )
    (config,) = read_sweep(path)
    assert (config.optimizer.name, config.optimizer.growth) == ("fixed-quotient", 0.5)
