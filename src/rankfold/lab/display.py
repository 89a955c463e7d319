"""What is shown while runs are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

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


class _WhatFits(ProgressColumn):
    """The description, cut off where the line ends."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


@contextmanager
def training_bar(
    config: RunConfig, console: Console | None = None
) -> Iterator[Callable[[Progress], None]]:
    """A bar with loss, tokens a second and the optimizers' share of a step.

    Where there is no terminal, a line for every tenth of the run.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(config, console)
        return
    columns = (
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
        _WhatFits(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(config.optimizer.name, total=config.training.steps)
        yield lambda progress: bar.update(
            task, completed=progress.step, description=_told(config, progress)
        )


def _lines(config: RunConfig, console: Console) -> Callable[[Progress], None]:
    told = 0

    def show(progress: Progress) -> None:
        nonlocal told
        tenth = 10 * progress.step // progress.steps
        if tenth > told:
            told = tenth
            line = f"{progress.step}/{progress.steps} {_told(config, progress)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return show


def _told(config: RunConfig, progress: Progress) -> str:
    words = [config.optimizer.name, f"loss {progress.loss:.3f}"]
    if math.isfinite(progress.validation):
        words.append(f"validation {progress.validation:.3f}")
    words.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    words.append(f"optimizer {100 * progress.optimizer_share:.0f}%")
    return " · ".join(words)


@contextmanager
def sweep_bar(total: int, quiet: bool = False) -> Iterator[Callable[[Outcome, int, int], None]]:
    """A bar over runs, and a line for each that has ended."""
    console = Console(stderr=True, quiet=quiet)
    with Bar(*_columns(), console=console) as bar:
        task = bar.add_task("runs", total=total)

        def done(outcome: Outcome, count: int, total: int) -> None:
            words = f"{outcome.status:>9}  {outcome.key}"
            if math.isfinite(outcome.loss):
                words += f"  validation loss {outcome.loss:.4f}"
            if outcome.message:
                words += f"  {outcome.message}"
            bar.console.print(words, highlight=False, markup=False, soft_wrap=True)
            bar.update(task, completed=count, total=total)

        yield done
