"""Contests whose runs take no time, since their losses are made up; and the scripts beside them."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rankfold.lab import records
from rankfold.lab.config import RunConfig
from rankfold.lab.contest import (
    METHODS,
    Contest,
)
from rankfold.lab.sweep import More, Outcome

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
    """The most particular one whose options the run has."""
    told = {f"optimizer.{name}": value for name, value in config.as_dict()["optimizer"].items()}
    of = [name for name, method in METHODS.items() if method.options.items() <= told.items()]
    return max(of, key=lambda name: len(METHODS[name].options))


class Lab:
    """Runs that take no time: their losses are given, and what was made is kept in order."""

    def __init__(self, root: Path, loss: LossOf) -> None:
        self.root, self.loss = root, loss
        self.made: list[RunConfig] = []
        self.most = math.inf
        self.failing: set[str] = set()

    def make(self, configs: list[RunConfig], more: More = list) -> list[Outcome]:
        waiting, outcomes = list(configs), []
        while waiting:
            outcomes.append(self._make_one(waiting.pop(0)))
            waiting += more()
        return outcomes

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


def exponents(config: RunConfig) -> tuple[int, int, int]:
    """Of the rates of query·key products, values and outputs."""
    told = config.optimizer
    rates = told.lr, told.lr * told.vo_rate, told.lr * told.vo_rate * told.output_rate
    qk, v, o = (round(math.log2(rate)) for rate in rates)
    return qk, v, o


def bowl(
    best: dict[str, int],
    momentum: float = 0.95,
    gap: float = 0.05,
    vo: int = 0,
    o: int = 0,
    decay: int | None = None,
) -> LossOf:
    """A loss with its least value at these exponents, of value·output products ``vo`` higher.

    In these it is ``o`` higher for outputs. Ours is ``gap`` below all others.
    """

    def loss(config: RunConfig) -> float:
        name, seed, told = method_of(config), config.training.seed, config.optimizer
        qk, values, outputs = (rate - best[name] for rate in exponents(config))
        noise = random.Random(f"{name}{seed}").gauss(0, 0.003)
        ours = gap if METHODS[name].kind == "ours" else 0.0
        away = 1.0 * qk**2 + (values - vo) ** 2 + (outputs - vo - o) ** 2
        fastest = 2.0 ** max(exponents(config))
        shrunk = told.product_decay * fastest * config.training.steps
        away += 0.01 * abs(shrunk - (0 if decay is None else 2**decay))
        return 4 + away + abs(told.momentum - momentum) + seed / 50 + noise - ours

    return loss


CENTRES = {name: method.centres["tiny"] for name, method in METHODS.items()}


def contest_script(name: str) -> ModuleType:
    """A script of benchmarks/contest, as a module."""
    return benchmark_script(name, "contest")


def benchmark_script(name: str, folder: str = "") -> ModuleType:
    """A script of benchmarks, as a module."""
    path = Path(__file__).parents[1] / "benchmarks" / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the words in their annotations
    spec.loader.exec_module(module)
    return module
