"""What a run leaves on disk, written as it goes and read by reports.

A folder a run:

    config.json     the configuration, and with it the run's key
    metrics.jsonl   one line a measurement, of kind "train", "validation" or "diagnostics"
    status.json     "running", "finished", "diverged" or "failed", a message, the machine, and how
                    many workers shared it
    text.json       a fingerprint of the text it was begun with; runs of earlier versions have none
    checkpoint.pt   while it runs
    weights.pt      the trained model's state_dict, if asked for
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..bench.report import device_name
from .config import DEFAULTS, RunConfig

CONFIG, METRICS, STATUS = "config.json", "metrics.jsonl", "status.json"
CHECKPOINT, WEIGHTS, TEXT = "checkpoint.pt", "weights.pt", "text.json"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep all others off a run until the end, of this process at the latest.

    Raises ValueError if it is held already. Does nothing where there are no such locks.
    """
    with _lock(folder) as mine:
        if mine is False:
            raise ValueError(
                f"the run in {folder} is being made by another process: wait for it, or give "
                "another folder"
            )
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[bool | None]:
    """Whether the lock of a folder is ours now, None where there are no locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    mine: bool | None = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        except OSError:  # a file system without locks
            mine = None
        yield mine
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Curve:
    """Values measured at steps, both of one length."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def last_mean(self, count: int) -> float:
        """Mean of the last ``count`` values, NaN if there are none."""
        last = self.values[-count:]
        return sum(last) / len(last) if last else float("nan")


@dataclass(frozen=True)
class Run:
    """One run as read back. ``config`` has the groups model, data, optimizer and training."""

    key: str
    folder: Path
    config: dict[str, dict[str, Any]]
    status: str
    message: str
    machine: dict[str, str]
    workers: int  # runs made at a time on that machine
    training: Curve
    validation: Curve
    step_seconds: Curve  # a training step, whole
    optimizer_seconds: Curve  # its part in the optimizers
    tokens_a_step: int
    diagnostics: dict[str, Curve]

    def option(self, dotted: str) -> Any:
        """``option("optimizer.lr")``."""
        group, name = dotted.split(".")
        return self.config[group][name]


def machine(device: torch.device) -> dict[str, str]:
    """Where a run was made."""
    return {
        "device": device_name(device),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_json(path: Path, value: Any) -> None:
    """Atomically: a reader sees the old file or the new one."""
    _write(path, json.dumps(value, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def save(path: Path, state: dict[str, Any]) -> None:
    """What torch can save, atomically: a kill leaves the last file or this one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def saved(checkpoint: Path, device: torch.device) -> dict[str, Any]:
    """What was saved; raises ValueError if the file was cut off or is another one."""
    with checkpoint.open("rb") as file:
        try:
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, OSError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"cannot read {checkpoint}: it is damaged; remove it, and the run begins anew"
            ) from error
    return state


class Recorder:
    """Appends to a run's metrics. Opened again, it first forgets what came after ``step``."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / METRICS
        if step and self.path.exists():
            kept = [line for line in _lines(self.path) if line["step"] <= step]
            _write(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        else:
            self.path.write_text("", encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, kind: str, step: int, **values: Any) -> None:
        """One measurement."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def flush(self) -> None:
        """Onto the disk, before a checkpoint that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush, and no more."""
        self.flush()
        self._file.close()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return  # a line cut off by a kill; nothing after it counts


def _status(folder: Path) -> dict[str, Any]:
    # Nothing there: killed between its first two files, or the machine lost power. Workers are what
    # earlier versions did not write down.
    unknown = {"status": "running", "message": "", "machine": {}, "workers": 1}
    return {**unknown, **read_object(folder / STATUS)}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run of the laboratory."""
    return {"key", "config"} <= read_object(folder / CONFIG).keys()


def workers_of(folder: Path) -> int:
    """The most workers that the run of a folder was made beside, itself included."""
    return int(_status(folder)["workers"])


def status_of(folder: Path) -> str:
    """Where the run of a folder stands, "new" if there is none."""
    return str(_status(folder)["status"]) if (folder / CONFIG).exists() else "new"


def standing(folder: Path) -> str:
    """Its status, or "interrupted" if it is said to be running and no process is at it."""
    status = status_of(folder)
    if status != "running":
        return status
    with _lock(folder) as mine:
        return "interrupted" if mine else status


def as_it_stands(run: Run) -> Run:
    """The run, whose message says so where it was interrupted."""
    if standing(run.folder) != "interrupted":
        return run
    return replace(run, message="interrupted: no process is at it, and the same command goes on")


def text_of(folder: Path) -> str | None:
    """The fingerprint of the text that a run was begun with, if it was written down."""
    return read_object(folder / TEXT).get("fingerprint")


def check_text(folder: Path, fingerprint: str) -> None:
    """Raise if the run began with another text, as far as that was written down."""
    if text_of(folder) not in (None, fingerprint):
        raise ValueError(
            "the text of this run has changed since it began: put the old one back, give another "
            f"--output, or remove {folder}"
        )


def read_run(folder: Path) -> Run:
    """The run of a folder.

    Raises FileNotFoundError if there is none, and ValueError if its record makes no sense.
    """
    try:
        return _read_run(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read the record of the run in {folder} ({type(error).__name__}: {error})"
        ) from error


def _read_run(folder: Path) -> Run:
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    status, metrics = _status(folder), folder / METRICS
    curves: dict[str, Curve] = {
        name: Curve() for name in ("train", "validation", "seconds", "optimizer_seconds")
    }
    diagnostics: dict[str, Curve] = {}

    def add(curve: Curve, step: int, value: float) -> None:
        curve.steps.append(step)
        curve.values.append(value)

    for line in _lines(metrics) if metrics.exists() else ():
        kind, step = line["kind"], line["step"]
        if kind == "diagnostics":
            for name, value in line["values"].items():
                add(diagnostics.setdefault(name, Curve()), step, value)
            continue
        add(curves[kind], step, line["loss"])
        for name in ("seconds", "optimizer_seconds"):
            if name in line:
                add(curves[name], step, line[name])
    # A version with fewer options ran as the others' defaults say.
    config = {g: {**options, **written["config"][g]} for g, options in DEFAULTS.items()}
    return Run(
        key=written["key"],
        folder=folder,
        config=config,
        status=status["status"],
        message=status["message"],
        machine=status["machine"],
        workers=status["workers"],
        training=curves["train"],
        validation=curves["validation"],
        step_seconds=curves["seconds"],
        optimizer_seconds=curves["optimizer_seconds"],
        tokens_a_step=config["data"]["batch"]
        * config["data"]["context"]
        * config["training"]["accumulate"],
        diagnostics=diagnostics,
    )


def read_runs_of(configs: Iterable[RunConfig], root: Path) -> list[Run]:
    """The runs of these configurations in a folder, as far as they were begun."""
    folders = (root / key for key in dict.fromkeys(config.key for config in configs))
    return [read_run(folder) for folder in folders if (folder / CONFIG).exists()]


def read_runs(root: Path, unreadable: Callable[[Path], object] = lambda folder: None) -> list[Run]:
    """All runs below a folder, in the order of their paths; others have a config.json too.

    ``unreadable`` is told of each folder of a run whose record cannot be read.
    """
    found = []
    for folder in (path.parent for path in sorted(root.rglob(CONFIG))):
        if not (is_run(folder) or (folder / METRICS).exists()):
            continue
        try:
            found.append(read_run(folder))
        except (OSError, ValueError):
            unreadable(folder)
    return found
