"""What is shown while runs are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from .config import RunConfig
from .sweep import Outcome
from .training import Progress


def _columns() -> tuple[TextColumn | BarColumn | MofNCompleteColumn | TimeRemainingColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )


@contextmanager
def tokenizing_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar over documents, once there are any to tokenize."""
    with Bar(*_columns(), console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done)

        yield show


@contextmanager
def training_bar(config: RunConfig) -> Iterator[Callable[[Progress], None]]:
    """A bar with loss, tokens a second and the optimizers' share of a step."""
    with Bar(*_columns(), console=Console(stderr=True)) as bar:
        task = bar.add_task(config.optimizer.name, total=config.training.steps)

        def show(progress: Progress) -> None:
            words = [config.optimizer.name, f"loss {progress.loss:.3f}"]
            if math.isfinite(progress.validation):
                words.append(f"validation {progress.validation:.3f}")
            words.append(f"{progress.tokens_per_second:,.0f} tokens/s")
            words.append(f"optimizer {100 * progress.optimizer_share:.0f}%")
            bar.update(task, completed=progress.step, description=" · ".join(words))

        yield show


@contextmanager
def sweep_bar(total: int, quiet: bool = False) -> Iterator[Callable[[Outcome, int, int], None]]:
    """A bar over runs, and a line for each that has ended."""
    console = Console(stderr=True, quiet=quiet)
    with Bar(*_columns(), console=console) as bar:
        task = bar.add_task("runs", total=total)

        def done(outcome: Outcome, count: int, _: int) -> None:
            words = f"{outcome.status:>9}  {outcome.key}"
            if math.isfinite(outcome.loss):
                words += f"  validation loss {outcome.loss:.4f}"
            if outcome.message:
                words += f"  {outcome.message}"
            bar.console.print(words, highlight=False, markup=False, soft_wrap=True)
            bar.update(task, completed=count)

        yield done
