"""How far a method is ahead of Muon in the course of a contest's final runs: a table and a picture.

    python benchmarks/contest/lead.py comparison/runs --ours fixed-quotient --level 4.9 \
        --output benchmarks/contest/samples-finals

Validation losses, means over windows of steps, paired by seed: of all runs below a folder that are
no tuning, ours and Muon's. Writes OUTPUT.csv and OUTPUT.png; with a ``--level``, OUTPUT-level.csv
too: when each run falls below that loss, beside where it ends.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from rankfold.lab import records
from rankfold.lab.contest import TUNING_SEED
from rankfold.lab.records import Curve, Run
from rankfold.lab.statistics import band, difference, mean, paired
from rankfold.lab.tables import write_csv

_COLUMNS = ("step", "muon", "ours", "lead", "low", "high")
Row = tuple[float, ...]


def windowed(curve: Curve, window: int) -> Curve:
    """Means of windows of steps, at the end of each."""
    windows = defaultdict(list)
    for step, loss in zip(curve.steps, curve.values, strict=True):
        windows[-(-step // window) * window].append(loss)
    return Curve(list(windows), list(map(mean, windows.values())))


def by_seed(runs: Iterable[Run], window: int) -> dict[int, Curve]:
    """Validation losses of each; raises where two have one seed, and so other settings."""
    found: dict[int, Curve] = {}
    for run in runs:
        seed = run.option("training.seed")
        if seed in found:
            raise ValueError(f"two runs have seed {seed}: give a folder of one model and setting")
        found[seed] = windowed(run.validation, window)
    return found


def leads(muon: dict[int, Curve], ours: dict[int, Curve]) -> list[Row]:
    """By step: the mean losses of both, how far ours is below, and the 95% interval of that."""
    seeds = sorted(muon.keys() & ours.keys())
    if len(seeds) < 2:
        raise ValueError(f"two seeds of both methods are needed, and there are {seeds}")
    theirs, mine = (band([curves[seed] for seed in seeds]) for curves in (muon, ours))
    below = [difference(muon[seed], ours[seed]).values for seed in seeds]
    columns = zip(theirs.steps, theirs.means, mine.means, zip(*below, strict=True), strict=True)
    tested = ((*start, paired(lead)) for *start, lead in columns)
    return [(*start, lead.mean, lead.low, lead.high) for *start, lead in tested]


def passing(curve: Curve, level: float) -> float:
    """The step at which a curve first falls below a level, between its windows; NaN if never."""
    before: tuple[int, float] | None = None
    for step, loss in zip(curve.steps, curve.values, strict=True):
        if loss < level:
            if before is None:
                return step
            return before[0] + (before[1] - level) / (before[1] - loss) * (step - before[0])
        before = step, loss
    return math.nan


def draw(rows: list[Row], path: Path) -> None:
    """The lead in its interval."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    steps, _, _, lead, low, high = zip(*rows, strict=True)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.fill_between(steps, low, high, alpha=0.25, linewidth=0)
    axis.plot(steps, lead)
    axis.set(xlabel="training step", ylabel="validation loss of Muon − ours")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read the runs, write tables and picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("root", type=Path, help="folder of the runs, OUTPUT/runs of a contest")
    parser.add_argument("--ours", required=True, help="optimizer.name of ours")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--shuffle", default="samples")
    parser.add_argument("--window", type=int, default=200)
    parser.add_argument("--level", type=float, help="a loss that all runs pass")
    parser.add_argument("--output", type=Path, required=True, help="path without an ending")
    given = parser.parse_args()
    told = ("training.steps", "data.shuffle", "optimizer.name")
    finals = [
        run
        for run in records.read_runs(given.root)
        if run.status == "finished" and run.option("training.seed") != TUNING_SEED
    ]
    found = {}
    for method, name in (("muon", "muon"), ("ours", given.ours)):
        asked = (given.steps, given.shuffle, name)
        chosen = (run for run in finals if tuple(map(run.option, told)) == asked)
        found[method] = by_seed(chosen, given.window)
    rows = leads(found["muon"], found["ours"])
    shown = [[row[0], *(f"{x:.4f}" for x in row[1:])] for row in rows]
    write_csv(given.output.with_suffix(".csv"), [_COLUMNS, *shown])
    draw(rows, given.output.with_suffix(".png"))
    if given.level is not None:
        passed = [
            [method, seed, f"{passing(curve, given.level):.0f}", f"{curve.values[-1]:.4f}"]
            for method, curves in found.items()
            for seed, curve in sorted(curves.items())
        ]
        path = given.output.with_name(f"{given.output.name}-level.csv")
        write_csv(path, [("method", "seed", "step", "loss"), *passed])


if __name__ == "__main__":
    main()
