"""A sweep with workers that is interrupted or killed, and what becomes of its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rankfold.lab import records
from rankfold.lab.config import from_dict
from rankfold.lab.sweep import run_sweep, statuses

from .lab_runs import small, write_corpus


def sweep_in_this_process(given: str, root: str) -> None:
    """Until a signal comes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configs = [from_dict(config) for config in json.loads(given)]
    run_sweep(configs, Path(root), device="cpu", workers=2)


def written(root: Path) -> dict[Path, int]:
    """Checkpoints and when they were written, which in these runs is at every step."""
    found = {}
    for path in root.glob(f"*/{records.CHECKPOINT}"):
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_no_run_outlives_its_sweep(
    kind: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    corpus, root = write_corpus(tmp_path), tmp_path / "runs"
    endless = {"training__steps": 10**6, "training__checkpoint_every": 1}
    configs = [small(corpus, training__seed=seed, **endless) for seed in range(4)]
    given = json.dumps([config.as_dict() for config in configs])
    command = [sys.executable, "-m", "tests.test_lab_interrupted", given, str(root)]
    # In a session of its own, so that what is left of it can be ended.
    sweep = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while len(written(root)) < 2:
            assert sweep.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        assert sorted(statuses(configs, root).values()) == ["new", "new", "running", "running"]
        os.kill(sweep.pid, kind)
        sweep.wait(timeout=20)
        time.sleep(2)
        before = written(root)
        time.sleep(1)
        assert written(root) == before
        expected = ["interrupted", "interrupted", "new", "new"]
        assert sorted(statuses(configs, root).values()) == expected
    finally:
        with suppress(ProcessLookupError):
            os.killpg(sweep.pid, signal.SIGKILL)
        sweep.wait()


if __name__ == "__main__":
    sweep_in_this_process(*sys.argv[1:])
