"""What a run trains: a model with its data and optimizers, step by step, and by the clock."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import graphs, optimizers
from .config import RunConfig, TrainingConfig
from .corpus import Corpus
from .loader import Loader, ValidationCycle
from .model import Decoder, ModelConfig

_MOST_COMPILED = 64


def rate_factor(step: int, config: TrainingConfig) -> float:
    """What the learning rates of step ``step``, from 0, are multiplied by."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.annealing == "none":
        return warm
    left = 1 - max(0, step - config.warmup) / max(1, config.steps - config.warmup)
    fall = left if config.annealing == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return warm * fall


class Clock:
    """Seconds of steps and of the optimizers' part, read without waiting at every step."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[list[Any]] = []

    def mark(self) -> None:
        """Begin a step, begin its optimizers, or end it: three marks a step."""
        if not self.marks or len(self.marks[-1]) == 3:
            self.marks.append([])
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks[-1].append(event)
        else:
            self.marks[-1].append(time.perf_counter())

    def read(self) -> list[tuple[float, float]]:
        """(whole, optimizers) of each step since the last reading."""
        taken, self.marks = self.marks, []
        if self.cuda:
            torch.cuda.synchronize()
            return [(a.elapsed_time(c) / 1000, b.elapsed_time(c) / 1000) for a, b, c in taken]
        return [(c - a, c - b) for a, b, c in taken]


@lru_cache(maxsize=1)
def _drawn(config: ModelConfig, vocabulary: int, seed: int) -> Decoder:
    """A model before its first step, on the CPU: many a run begins as the one before it did."""
    return Decoder(config, vocabulary, seed=seed)


class Trainer:
    """A model, its data and optimizers at some step of a run."""

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        self.config, self.device = config, device
        seed, graph = config.training.seed, config.training.graph
        if graph and device.type != "cuda":
            raise ValueError(
                f"training.graph needs a CUDA device, and this run is on {device.type}"
            )
        if graph:
            graphs.free_earlier()
        self.model = copy.deepcopy(_drawn(config.model, corpus.vocabulary, seed)).to(device)
        self.attention, self.others = optimizers.build(self.model, config.optimizer, graph)
        self.loader = Loader(corpus.training, config.data, corpus.end_of_text, seed)
        self.cycle = ValidationCycle(corpus.validation, config.data, corpus.end_of_text)
        self.step = self.validations = 0
        self.loss: Callable[[Tensor], Tensor] = self.model
        if config.training.compile:
            # The runs of a sweep share what is compiled: two versions, with and without
            # gradients, for every kind of model.
            torch._dynamo.config.recompile_limit = _MOST_COMPILED
            self.loss = torch.compile(self.model)
        # A step's batches stay in one place, from where a graph can read them.
        shape = (config.training.accumulate, config.data.batch, config.data.context)
        self.batches = torch.zeros(shape, dtype=torch.int64, device=device)
        self._differentiate: Callable[[], Tensor | None] = self._gradients
        self._evaluate: Callable[[], Tensor | None] = self._validation_loss
        self._update: Callable[[], object] = self._optimize
        if graph:
            self._differentiate = graphs.Captured(self._gradients, device)
            self._evaluate = graphs.Captured(self._validation_loss, device)
            if self.attention is not None and self.attention.capturable:
                both = graphs.beside(self.attention.step, self.others.step, device)
                self._update = graphs.Captured(both, device)

    def _take(self, batch: np.ndarray, place: int = 0) -> None:
        tokens = torch.from_numpy(batch)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        self.batches[place].copy_(tokens, non_blocking=True)

    def advance(self, clock: Clock) -> Tensor:
        """One training step; returns its loss, a 0-dim tensor on the device."""
        clock.mark()
        for place in range(len(self.batches)):
            self._take(self.loader.next(), place)
        loss = self._differentiate()
        assert loss is not None
        clock.mark()
        factor = rate_factor(self.step, self.config.training)
        if self.attention is not None:
            self.attention.set_lr(self.config.optimizer.lr * factor)
        self.others.set_lr(self.config.optimizer.other_lr * factor)
        self._update()
        clock.mark()
        self.step += 1
        return loss

    def _gradients(self) -> Tensor:
        """Of the mean loss of the batches, which is returned."""
        total = torch.zeros((), device=self.device)
        self.model.zero_grad(set_to_none=True)
        for tokens in self.batches.unbind():
            loss = self.loss(tokens) / len(self.batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.config.training.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        return total

    def _optimize(self) -> None:
        if self.attention is not None:
            self.attention.step()
        self.others.step()

    def validate(self) -> float:
        """Mean loss over the next batches of the fixed cycle."""
        count = self.config.training.validation_batches
        losses = []
        for number in range(self.validations * count, (self.validations + 1) * count):
            self._take(self.cycle.batch(number))
            loss = self._evaluate()
            assert loss is not None
            losses.append(loss)
        self.validations += 1
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def _validation_loss(self) -> Tensor:
        return self.loss(self.batches[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on."""
        return {
            "step": self.step,
            "validations": self.validations,
            "model": self.model.state_dict(),
            "attention": None if self.attention is None else self.attention.state_dict(),
            "others": self.others.state_dict(),
            "loader": self.loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self.validations = state["step"], state["validations"]
        self.model.load_state_dict(state["model"])
        if self.attention is not None:
            self.attention.load_state_dict(state["attention"])
        self.others.load_state_dict(state["others"])
        self.loader.load_state_dict(state["loader"])
