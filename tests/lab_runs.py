"""Runs of a few seconds for the laboratory's tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rankfold.lab.config import RunConfig, from_dict, preset
from rankfold.lab.records import CHECKPOINT, WEIGHTS, Run, read_run
from rankfold.lab.training import Progress, train

SENTENCE = "the quick brown fox jumps over a lazy dog while seven sages sip some tea and talk"


def write_corpus(folder: Path) -> Path:
    """Forty documents of words in an order that can be learned."""
    path = folder / "corpus.txt"
    words = SENTENCE.split()
    documents = (" ".join(words[k % 5 :] * (3 + k % 4)) for k in range(40))
    path.write_text("\0".join(documents), encoding="utf-8")
    return path


def small(corpus: Path, **options: Any) -> RunConfig:
    """A model of one layer; options with __ for the dot."""
    chosen: dict[str, Any] = {
        "data.source": str(corpus),
        "data.context": 32,
        "data.batch": 2,
        "data.validation_share": 0.2,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.kv_heads": 2,
        "model.head_width": 4,
        "model.feedforward": 32,
        "training.steps": 30,
        "training.checkpoint_every": 10,
        **{name.replace("__", "."): value for name, value in options.items()},
    }
    return preset("tiny").with_options(chosen)


def run(config: RunConfig, folder: Path, device: str = "cpu") -> Run:
    return train(config, folder, device=torch.device(device))


def die_at(config: RunConfig, folder: Path, step: int, device: str) -> None:
    """In a process of its own: make the run and be killed at a step."""

    def show(progress: Progress) -> None:
        if progress.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, folder, device=torch.device(device), show=show)


def killed_at(config: RunConfig, folder: Path, step: int, device: str = "cpu") -> None:
    """Make the run up to a step, in a process that is then killed."""
    command = [sys.executable, __file__, json.dumps(config.as_dict()), str(folder), str(step)]
    done = subprocess.run([*command, device], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert read_run(folder).status == "running"
    assert (folder / CHECKPOINT).exists()


def same_weights(one: Path, other: Path) -> bool:
    first, second = (torch.load(folder / WEIGHTS) for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


if __name__ == "__main__":
    torch.set_num_threads(1)
    die_at(from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
