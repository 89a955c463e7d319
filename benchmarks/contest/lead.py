"""How far a method is ahead of Muon in the course of a contest's final runs: a table and a picture.

    python benchmarks/contest/lead.py comparison/runs --ours fixed-quotient \
        --output benchmarks/contest/samples-finals

Validation losses, means over windows of steps, paired by seed: of all runs below a folder that are
no tuning, ours and Muon's. Writes OUTPUT.csv and OUTPUT.png; with a ``--level``, OUTPUT-level.csv
too: when each run falls below that loss, beside where it ends.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from rankfold.lab import records
from rankfold.lab.contest import TUNING_SEED
from rankfold.lab.tables import write_csv

_COLUMNS = ("step", "muon", "ours", "lead", "error")
# Losses by the end of a window of steps, for each seed.
Curves = dict[int, dict[int, float]]


def curves(runs: list[records.Run], window: int) -> Curves:
    """Mean losses of each run; raises where two have one seed, and so other settings."""
    found: Curves = {}
    for run in runs:
        windows = defaultdict(list)
        for step, loss in zip(run.validation.steps, run.validation.values, strict=True):
            windows[-(-step // window) * window].append(loss)
        seed = run.config["training"]["seed"]
        if seed in found:
            raise ValueError(f"two runs have seed {seed}: give a folder of one model and setting")
        found[seed] = {step: statistics.mean(losses) for step, losses in windows.items()}
    return found


def leads(muon: Curves, ours: Curves) -> list[tuple[float, ...]]:
    """By step: the mean losses of both, how far ours is below, and the standard error of that."""
    seeds = sorted(muon.keys() & ours.keys())
    if len(seeds) < 2:
        raise ValueError(f"two seeds of both methods are needed, and there are {seeds}")
    rows = []
    for step in sorted(set.intersection(*(set(c[s]) for c in (muon, ours) for s in seeds))):
        below = [muon[seed][step] - ours[seed][step] for seed in seeds]
        means = (statistics.mean(c[seed][step] for seed in seeds) for c in (muon, ours))
        error = statistics.stdev(below) / len(seeds) ** 0.5
        rows.append((step, *means, statistics.mean(below), error))
    return rows


def passing(curve: dict[int, float], level: float) -> float:
    """The step at which a curve first falls below a level, between its windows; NaN if never."""
    before: tuple[int, float] | None = None
    for step, loss in sorted(curve.items()):
        if loss < level:
            if before is None:
                return step
            return before[0] + (before[1] - level) / (before[1] - loss) * (step - before[0])
        before = step, loss
    return math.nan


def draw(rows: list[tuple[float, ...]], path: Path) -> None:
    """The lead with an error to either side."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    steps, _, _, lead, error = zip(*rows, strict=True)
    low, high = ([x + sign * e for x, e in zip(lead, error, strict=True)] for sign in (-1, 1))
    axis.axhline(0, color="black", linewidth=0.8)
    axis.fill_between(steps, low, high, alpha=0.25, linewidth=0)
    axis.plot(steps, lead)
    axis.set(xlabel="step", ylabel="validation loss of Muon less ours")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Read the runs, write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("root", type=Path, help="folder of the runs, OUTPUT/runs of a contest")
    parser.add_argument("--ours", required=True, help="optimizer.name of ours")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--shuffle", default="samples")
    parser.add_argument("--window", type=int, default=200)
    parser.add_argument("--level", type=float, help="a loss that all runs pass")
    parser.add_argument("--output", type=Path, required=True, help="path without an ending")
    given = parser.parse_args()

    ended = [run for run in records.read_runs(given.root) if run.status == "finished"]
    asked = (given.steps, given.shuffle)

    def finals(name: str) -> Curves:
        told = ("training.steps", "data.shuffle", "optimizer.name")
        found = [run for run in ended if (*asked, name) == tuple(map(run.option, told))]
        kept = [run for run in found if run.option("training.seed") != TUNING_SEED]
        return curves(kept, given.window)

    found = {"muon": finals("muon"), "ours": finals(given.ours)}
    rows = leads(found["muon"], found["ours"])
    shown = [[row[0], *(f"{x:.4f}" for x in row[1:])] for row in rows]
    write_csv(given.output.with_suffix(".csv"), [_COLUMNS, *shown])
    draw(rows, given.output.with_suffix(".png"))
    if given.level is not None:
        passed = [
            [name, seed, f"{passing(curve, given.level):.0f}", f"{curve[max(curve)]:.4f}"]
            for name, by_seed in found.items()
            for seed, curve in sorted(by_seed.items())
        ]
        path = given.output.with_name(f"{given.output.name}-level.csv")
        write_csv(path, [("method", "seed", "step", "loss"), *passed])


if __name__ == "__main__":
    main()
