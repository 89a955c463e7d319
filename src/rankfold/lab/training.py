"""One run: from a configuration to a folder with its record, resumable at any moment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..diagnostics import ScalarWriter, log_to
from . import optimizers, records
from .config import RunConfig
from .corpus import Corpus, DataError, prepare
from .trainer import Clock, Trainer

# Losses and times are read from the device this often: each reading waits for it.
_READ_EVERY = 10


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
        self.clock = Clock(trainer.device)
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
