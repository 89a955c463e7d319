"""Runs of a few seconds for the laboratory's tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from rankfold.lab.config import RunConfig, preset
from rankfold.lab.records import Run
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


def run(config: RunConfig, folder: Path) -> Run:
    return train(config, folder, device=torch.device("cpu"))


def die_at(config: RunConfig, folder: Path, step: int) -> None:
    """In a process of its own: make the run and be killed at a step."""

    def show(progress: Progress) -> None:
        if progress.step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, folder, device=torch.device("cpu"), show=show)


if __name__ == "__main__":
    import json

    from rankfold.lab.config import from_dict

    torch.set_num_threads(1)
    die_at(from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
