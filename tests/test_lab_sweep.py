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


def test_what_is_common_may_suit_the_grid_alone(tmp_path: Path) -> None:
    """The preset's optimizer has no growth; it is not the optimizer of any run."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        "[options]\noptimizer.growth = 0.5\n[[grid]]\noptimizer.name = 'fixed-quotient'\n",
        encoding="utf-8",
    )
    (config,) = read_sweep(path)
    assert (config.optimizer.name, config.optimizer.growth) == ("fixed-quotient", 0.5)
