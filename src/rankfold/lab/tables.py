"""The CSV files of a report: curves, settings with their numbers, and single runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import figures
from .figures import in_order
from .records import Curve, Run
from .statistics import Band, Setting, Study, band, differing, final_loss, flat_options


def shown_options(settings: Sequence[Setting]) -> list[str]:
    """Options by which settings differ; the optimizer's name has a column of its own."""
    names = differing([setting.options for setting in settings])
    return [name for name in names if name != "optimizer.name"]


def write_tables(runs: Sequence[Run], studies: Sequence[Study], folder: Path) -> list[Path]:
    """All of them, into a folder; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = (("train", figures.training_curve), ("valid", figures.validation_curve))
    paths = []
    for study in studies:
        for word, which in kinds:
            if study.best:
                paths.append(folder / f"{study.name}_{word}.csv")
                write_csv(paths[-1], _curve_lines(study, which))
    whole = {"summary": _summary_lines(studies), "runs": _run_lines(runs)}
    for name, lines in whole.items():
        paths.append(folder / f"{name}.csv")
        write_csv(paths[-1], lines)
    return paths


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Lines of values, the first of them the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def _column(optimizer: str) -> str:
    """The paper calls isometry geometries partial."""
    return optimizer.replace("isometry-", "partial-").replace("-", "_")


def _curve_lines(study: Study, which: Callable[[Run], Curve]) -> Iterator[list[Any]]:
    names = in_order(list(study.best))
    yield ["step", *map(_column, names)]
    bands: list[Band] = [band(list(study.best[name].curves(which).values())) for name in names]
    values = [dict(zip(drawn.steps, drawn.means, strict=True)) for drawn in bands]
    for step in sorted(set().union(*values)):
        yield [step, *(column.get(step, "") for column in values)]


def _summary_lines(studies: Sequence[Study]) -> Iterator[list[Any]]:
    names = shown_options([setting for study in studies for setting in study.settings])
    yield [
        *("study", "optimizer", *names, "status", "best", "baseline", "runs", "seeds", "loss"),
        *("deviation", "pairs", "difference", "low", "high", "p"),
        *("ms_a_step", "optimizer_share", "tokens_per_second"),
    ]
    for study in studies:
        for setting in study.settings:
            paired = study.against_baseline(setting)
            tested = [paired.mean, paired.low, paired.high, paired.p] if paired else [math.nan] * 4
            numbers: list[float] = [setting.loss, setting.spread, *tested]
            numbers += [1000 * setting.step_seconds, setting.optimizer_share]
            numbers += [setting.tokens_per_second]
            loss, spread, *rest = [n if math.isfinite(n) else "" for n in numbers]
            yield [
                *(study.label, setting.name),
                *(setting.options.get(name, "") for name in names),
                setting.status,
                int(study.best.get(setting.name) is setting),
                int(study.baseline is setting),
                *(len(setting.runs), len(setting.losses), loss, spread),
                *(paired.count if paired else "", *rest),
            ]


def _run_lines(runs: Sequence[Run]) -> Iterator[list[Any]]:
    """One run a line: what tells it apart, and what came out."""
    options = [flat_options(run) for run in runs]
    names = differing(options)
    yield ["run", *names, "seed", "status", "steps", "training_loss", "loss"]
    for run, chosen in zip(runs, options, strict=True):
        trained, loss = run.training.values, final_loss(run)
        yield [
            *(run.key, *(chosen.get(name, "") for name in names), run.config["training"]["seed"]),
            *(run.status, len(trained), trained[-1] if trained else ""),
            loss if math.isfinite(loss) else "",
        ]
