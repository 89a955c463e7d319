"""One run: from a configuration to a folder with its record, resumable at any moment."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..diagnostics import ScalarWriter, log_to
from . import graphs, optimizers, records
from .config import RunConfig, TrainingConfig
from .corpus import Corpus, DataError, prepare
from .loader import Loader, ValidationCycle
from .model import Decoder, ModelConfig

# Losses and times are read from the device this often: each reading waits for it.
_READ_EVERY = 10
_MOST_COMPILED = 64


@dataclass(frozen=True)
class Progress:
    """How far a run is, for a display."""

    key: str
    step: int
    steps: int
    loss: float
    validation: float
    tokens_per_second: float
    optimizer_share: float


Show = Callable[[Progress], object]


def rate_factor(step: int, config: TrainingConfig) -> float:
    """What the learning rates of step ``step``, from 0, are multiplied by."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.annealing == "none":
        return warm
    left = 1 - max(0, step - config.warmup) / max(1, config.steps - config.warmup)
    fall = left if config.annealing == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return warm * fall


class _Clock:
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

    def advance(self, clock: _Clock) -> Tensor:
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


def train(
    config: RunConfig,
    folder: Path,
    *,
    device: torch.device,
    corpus: Corpus | None = None,
    show: Show = lambda progress: None,
    scalars: ScalarWriter | None = None,
    workers: int = 1,
) -> records.Run:
    """Make the run, or the rest of it, in ``folder``; a finished one is only read.

    ``workers`` runs are made on the device at a time, this one among them: the record says so.
    A loss that is no longer finite ends the run with the status "diverged". What else goes wrong
    is raised, after the status "failed" is written: that the text is another one than the run began
    with, too. A run that another process is making is left to it, with a ValueError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with records.held(folder):
        return _make(config, folder, device, corpus, show, scalars, workers)


def _make(
    config: RunConfig,
    folder: Path,
    device: torch.device,
    corpus: Corpus | None,
    show: Show,
    scalars: ScalarWriter | None,
    workers: int,
) -> records.Run:
    if records.status_of(folder) in ("finished", "diverged"):
        made = records.read_run(folder)
        _check_ended(config, folder, corpus)
        kept = (folder / records.WEIGHTS).exists()
        if config.training.keep_weights and made.status == "finished" and not kept:
            raise ValueError(
                f"the run in {folder} has finished without its weights being kept: remove the "
                "folder to make it again"
            )
        return made
    workers = max(workers, records.workers_of(folder))
    records.write_json(folder / records.CONFIG, {"key": config.key, "config": config.as_dict()})

    def write_status(status: str, message: str = "") -> None:
        written = {"status": status, "message": message, "machine": records.machine(device)}
        records.write_json(folder / records.STATUS, {**written, "workers": workers})

    write_status("running")
    try:
        with _deterministic(config.training.deterministic):
            corpus = corpus or prepare(config.data)
            if (folder / records.CHECKPOINT).exists():
                records.check_text(folder, corpus.fingerprint)
            else:
                text = {"fingerprint": corpus.fingerprint}
                records.write_json(folder / records.TEXT, text)
            trainer = Trainer(config, corpus, device)
            status, message = _run(trainer, folder, show, scalars)
    except Exception as error:
        write_status("failed", f"{type(error).__name__}: {error}")
        raise
    write_status(status, message)
    if status == "finished":
        (folder / records.CHECKPOINT).unlink(missing_ok=True)
    return records.read_run(folder)


def _check_ended(config: RunConfig, folder: Path, corpus: Corpus | None) -> None:
    """Raise if a run that has ended is of another text, where there still is one to read."""
    if records.text_of(folder) is None:
        return
    if corpus is None:
        try:
            corpus = prepare(config.data)
        except (OSError, DataError):
            return
    records.check_text(folder, corpus.fingerprint)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(
    trainer: Trainer, folder: Path, show: Show, scalars: ScalarWriter | None
) -> tuple[str, str]:
    checkpoint = folder / records.CHECKPOINT
    if checkpoint.exists():
        trainer.load_state_dict(records.saved(checkpoint, trainer.device))
    recorder = records.Recorder(folder, trainer.step)
    try:
        return _Loop(trainer, folder, recorder, show, scalars).run()
    finally:
        recorder.close()


class _Loop:
    """The steps of a run, with what is written and shown in between."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        recorder: records.Recorder,
        show: Show,
        scalars: ScalarWriter | None,
    ) -> None:
        self.trainer, self.folder, self.recorder = trainer, folder, recorder
        self.show, self.scalars = show, scalars
        self.clock = _Clock(trainer.device)
        self.pending: list[Tensor] = []
        self.loss = self.validation = math.nan
        every = trainer.config.training.diagnostics_every
        if every and isinstance(trainer.attention, optimizers.Riemannian):
            log_to(
                trainer.attention.inner,
                self._diagnose,
                every,
                start=trainer.step,
                per_member=False,
            )

    def _diagnose(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.recorder.add("diagnostics", step, values=finite)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if self.scalars is not None:
            self.scalars.add_scalar(tag, value, step)

    def run(self) -> tuple[str, str]:
        """Status and message at the end."""
        trainer, training = self.trainer, self.trainer.config.training
        while trainer.step < training.steps:
            self.pending.append(trainer.advance(self.clock))
            step = trainer.step
            validating = step % training.validate_every == 0 or step == training.steps
            saving = step % training.checkpoint_every == 0 and step < training.steps
            if validating or saving or len(self.pending) == _READ_EVERY:
                self._read()
                if not math.isfinite(self.loss):
                    return "diverged", self._advice(step)
            if validating:
                self.validation = trainer.validate()
                self.recorder.add("validation", step, loss=self.validation)
                self._scalar("loss/validation", self.validation, step)
                if not math.isfinite(self.validation):
                    return "diverged", self._advice(step)
            if saving:
                self.recorder.flush()
                records.save(self.folder / records.CHECKPOINT, trainer.state_dict())
        if training.keep_weights:
            records.save(self.folder / records.WEIGHTS, trainer.model.state_dict())
        if isinstance(trainer.attention, optimizers.Riemannian):
            return "finished", trainer.attention.events()
        return "finished", ""

    def _advice(self, step: int) -> str:
        told = self.trainer.config.optimizer
        return (
            f"the loss was not finite by step {step}; try a smaller optimizer.lr than "
            f"{told.lr:g}, or a smaller optimizer.other_lr than {told.other_lr:g}"
        )

    def _read(self) -> None:
        """Write down the losses and times since the last reading."""
        if not self.pending:
            return
        times = self.clock.read()
        losses = torch.stack(self.pending).tolist()
        first = self.trainer.step - len(losses) + 1
        self.pending = []
        for step, (loss, (whole, part)) in enumerate(zip(losses, times, strict=True), first):
            self.recorder.add("train", step, loss=loss, seconds=whole, optimizer_seconds=part)
            self._scalar("loss/training", loss, step)
        self.loss = losses[-1] if all(map(math.isfinite, losses)) else math.nan
        whole, part = (sum(column) for column in zip(*times, strict=True))
        data, training = self.trainer.config.data, self.trainer.config.training
        tokens = data.batch * data.context * training.accumulate * len(times)
        self._scalar("time/tokens_per_second", tokens / whole, self.trainer.step)
        self._scalar("time/optimizer_share", part / whole, self.trainer.step)
        self.show(
            Progress(
                key=self.trainer.config.key,
                step=self.trainer.step,
                steps=training.steps,
                loss=self.loss,
                validation=self.validation,
                tokens_per_second=tokens / whole,
                optimizer_share=part / whole,
            )
        )
