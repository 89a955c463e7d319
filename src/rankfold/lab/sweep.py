"""Many runs from one TOML file: spelled out, keyed, skipped when finished, resumed when not.

preset = "paper-mha"          # what every run starts from
seeds = [0, 1, 2]             # every combination once for each

[options]                     # the same for all runs
training.steps = 1000

[[grid]]                      # lists multiply; several grids add up
optimizer.name = ["fixed-embedded", "isometry-quotient"]
optimizer.lr = ["2^-8", "2^-6"]
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import records
from .config import RunConfig, preset
from .statistics import final_loss
from .training import train

ENGINES = ("processes", "ray")
_TOP = {"preset", "seeds", "options", "grid"}
_DIED = "its process died twice, killed for the memory it took or from outside"


@dataclass(frozen=True)
class Outcome:
    """What became of one run of a sweep."""

    key: str
    status: str
    message: str
    loss: float  # mean of the last five validations


More = Callable[[], list[RunConfig]]


def read_sweep(path: Path, extra: Mapping[str, Any] | None = None) -> list[RunConfig]:
    """All runs of a sweep file; ``extra`` options replace what the file says for every run."""
    try:
        spelled = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    unknown = sorted(set(spelled) - _TOP)
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is none of {', '.join(sorted(_TOP))}")
    options, seeds = spelled.get("options", {}), spelled.get("seeds", [0])
    grids = spelled.get("grid", [{}])
    _check_shapes(path, options, seeds, grids)
    base, common = preset(spelled.get("preset", "tiny")), _flat(options)
    configs = {}
    for grid in grids:
        for chosen in _product(_flat(grid)):
            for seed in seeds:
                # In one go: what is common to all may suit the grid's optimizer alone.
                config = base.with_options(
                    {**common, **chosen, "training.seed": seed, **(extra or {})}
                )
                configs[config.key] = config
    if not configs:
        raise ValueError(f"{path} has no runs: a list in it is empty")
    return list(configs.values())


def _check_shapes(path: Path, options: Any, seeds: Any, grids: Any) -> None:
    if not isinstance(seeds, list):
        raise ValueError(f"{path}: seeds is a list, like [0, 1, 2], not {seeds!r}")
    if not isinstance(options, dict):
        raise ValueError(f"{path}: options is a table, [options], not {options!r}")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{path}: a grid is written [[grid]], with two brackets")
    if any("training.seed" in _flat(each) for each in (options, *grids)):
        raise ValueError(f"{path}: seeds are listed as seeds = [0, 1, 2], not as training.seed")


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _product(grid: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    choices = [value if isinstance(value, list) else [value] for value in grid.values()]
    for values in itertools.product(*choices):
        yield dict(zip(grid, values, strict=True))


def run_one(
    config: RunConfig, root: Path, device: str, threads: int | None = None, workers: int = 1
) -> Outcome:
    """One run of a sweep, in whatever process; an error is an outcome, not an exception."""
    if threads is not None:
        torch.set_num_threads(threads)
    folder = root / config.key
    try:
        run = train(config, folder, device=torch.device(device), workers=workers)
    except Exception as error:
        return Outcome(config.key, "failed", f"{type(error).__name__}: {error}", float("nan"))
    return Outcome(run.key, run.status, run.message, final_loss(run))


def run_sweep(
    configs: list[RunConfig],
    root: Path,
    *,
    device: str,
    workers: int = 1,
    engine: str = "processes",
    done: Callable[[Outcome, int, int], object] = lambda outcome, count, total: None,
    more: More = list,
) -> list[Outcome]:
    """All runs, ``workers`` at a time; ``done`` is told of each as it ends.

    Then ``more`` is asked for runs that are wanted by what is known now.
    """
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}; there are {', '.join(ENGINES)}")
    root.mkdir(parents=True, exist_ok=True)
    each = _with_ray if engine == "ray" else _in_processes
    waiting, total, outcomes = deque(configs), len(configs), []
    for outcome in each(waiting, root, device, workers):
        outcomes.append(outcome)
        new = more()
        waiting.extend(new)
        total += len(new)
        done(outcome, len(outcomes), total)
    return outcomes


def _in_processes(
    waiting: deque[RunConfig], root: Path, device: str, workers: int
) -> Iterable[Outcome]:
    """All that waits, and what is put there in the meantime."""
    if workers == 1:
        while waiting:
            yield run_one(waiting.popleft(), root, device)
        return
    # On a GPU too: models are built on the CPU, where threads that outnumber the cores crawl.
    threads = max(1, torch.get_num_threads() // workers)
    # A fresh interpreter each: a forked one cannot use CUDA.
    context = get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)

    def begin(pool: ProcessPoolExecutor, config: RunConfig) -> Future[Outcome]:
        return pool.submit(run_one, config, root, device, threads, workers)

    def made(waiting: deque[RunConfig], at_once: int, lost: list[RunConfig]) -> Iterable[Outcome]:
        while waiting:
            with ProcessPoolExecutor(
                at_once, mp_context=context, initializer=_end_with, initargs=(theirs,)
            ) as pool:
                try:
                    yield from _in_pool(partial(begin, pool), waiting, at_once, lost)
                except BaseException:
                    # The pool would first end the runs that were begun.
                    ours.close()
                    raise

    while waiting:
        lost: list[RunConfig] = []
        yield from made(waiting, workers, lost)
        dead: list[RunConfig] = []
        # One at a time: a run may have been lost to the death of another, or to the memory of all.
        yield from made(deque(lost), 1, dead)
        yield from (Outcome(config.key, "failed", _DIED, float("nan")) for config in dead)


def _in_pool(
    begin: Callable[[RunConfig], Future[Outcome]],
    waiting: deque[RunConfig],
    at_once: int,
    lost: list[RunConfig],
) -> Iterable[Outcome]:
    """What becomes of the runs that wait, until all are made or a process of the pool dies.

    The others die with it, and so all runs that were begun and have not ended are ``lost``. No
    more are begun than there are processes, so that those that wait are not among them.
    """
    begun: dict[Future[Outcome], RunConfig] = {}
    while waiting or begun:
        while waiting and len(begun) < at_once:
            try:
                begun[begin(waiting[0])] = waiting[0]
            except BrokenProcessPool:
                if not begun:
                    return
                break
            waiting.popleft()
        for future in wait(begun, return_when=FIRST_COMPLETED).done:
            config = begun.pop(future)
            if isinstance(future.exception(), BrokenProcessPool):
                lost.append(config)
            else:
                yield future.result()


def _end_with(sweep: Connection) -> None:
    """End this worker at once when the sweep closes its end or dies, as if the run was killed.

    Left alone it would go on in a folder that the sweep, started again, writes to as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the sweep's to handle

    def watch() -> None:
        try:
            sweep.recv()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _with_ray(
    waiting: deque[RunConfig], root: Path, device: str, workers: int
) -> Iterable[Outcome]:
    """One task a run; ``root`` must be a folder that all machines share."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ValueError("engine ray needs Ray: pip install 'rankfold[ray]'") from None
    ray.init(ignore_reinit_error=True)
    share = {"num_gpus": 1 / workers} if device.startswith("cuda") else {"num_cpus": 1}
    remote = ray.remote(**share)(run_one)
    sharing = workers if device.startswith("cuda") else 1
    begun: dict[Any, RunConfig] = {}
    while waiting or begun:
        while waiting:
            config = waiting.popleft()
            begun[remote.remote(config, root.resolve(), device, None, sharing)] = config
        ready, _ = ray.wait(list(begun), num_returns=1)
        config = begun.pop(ready[0])
        try:
            yield ray.get(ready[0])
        except Exception as error:
            yield Outcome(config.key, "failed", str(error), float("nan"))


def statuses(configs: Iterable[RunConfig], root: Path) -> dict[str, str]:
    """Where each run of a sweep stands: "new", "interrupted" or its status."""
    return {config.key: records.standing(root / config.key) for config in configs}
