"""What a step costs as one size grows: rows, rank, number of pairs, and factors of a grid.

    python benchmarks/scaling_study.py --output docs/figures        # minutes, on a GPU
    python benchmarks/scaling_study.py --output quick --quick       # small sizes, under a minute

Times the five geometries with momentum by the means of ``rankfold bench``, as CUDA graphs where
there is a GPU and eagerly elsewhere, and draws beside them the line of O((I m + J n) r²) for each
pair or grid. A curve below the line's slope still pays for launching its operations; one along
it has reached the cost that counts. Writes scaling.csv and scaling.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from rankfold.bench import stacked_case, time_contender
from rankfold.bench.cases import StackedCase
from rankfold.bench.contenders import enlist
from rankfold.bench.report import device_name, progress_bar
from rankfold.geometries import GEOMETRIES

MOMENTUM = 0.9
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73")
MARKERS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True)
class Sizes:
    """A case: ``pairs`` members of lefts × rights factors, all of rows × rank."""

    pairs: int
    rows: int
    rank: int
    lefts: int = 1
    rights: int = 1

    def case(self) -> StackedCase:
        """The case for the bench."""
        return stacked_case(self.pairs, self.rows, self.rows, self.rank, self.lefts, self.rights)

    def work(self) -> int:
        """(I m + J n) r² over all members."""
        return self.pairs * (self.lefts + self.rights) * self.rows * self.rank**2


@dataclass(frozen=True)
class Panel:
    """One size that grows while the others stay."""

    title: str
    label: str
    points: list[tuple[str, Sizes]]


def panels(quick: bool) -> list[Panel]:
    """The four sweeps; the quick ones are for CPUs and tests."""
    pairs, rows, rank = (8, 128, 16) if quick else (96, 512, 64)
    heights = (64, 128, 256) if quick else (256, 512, 1024, 2048, 4096, 8192)
    ranks = (8, 16, 32) if quick else (8, 16, 32, 64, 128)
    counts = (4, 8, 16) if quick else (12, 24, 48, 96, 192, 384)
    grids = ((1, 1), (2, 2), (4, 4)) if quick else ((1, 1), (2, 1), (4, 1), (8, 1), (8, 4), (8, 8))
    fewer = 4 if quick else 12
    return [
        Panel(
            f"rows: {pairs} pairs, rank {rank}",
            "m = n",
            [(str(m), Sizes(pairs, m, rank)) for m in heights],
        ),
        Panel(
            f"rank: {pairs} pairs, {rows} rows",
            "r",
            [(str(r), Sizes(pairs, rows, r)) for r in ranks],
        ),
        Panel(
            f"pairs: {rows}×{rank}",
            "pairs",
            [(str(n), Sizes(n, rows, rank)) for n in counts],
        ),
        Panel(
            f"grids: {fewer} of {rows}×{rank} factors",
            "I×J",
            [(f"{i}×{j}", Sizes(fewer, rows, rank, i, j)) for i, j in grids],
        ),
    ]


def measure(sizes: Sizes, device: torch.device, mode: str, repeats: int) -> Iterator[float]:
    """Milliseconds of each geometry in turn."""
    case = sizes.case()
    for geometry in GEOMETRIES:
        entered = enlist(
            case,
            geometries=[geometry],
            momenta=[MOMENTUM],
            modes=[mode],
            literal=False,
            rivals=False,
        )
        timing, _, _ = time_contender(case, entered.contenders[-1], device, repeats, budget=1.0)
        yield timing.ms


def draw(sweeps: list[Panel], times: list[list[list[float]]], title: str, path: Path) -> None:
    """Four panels of five curves, and the line of the work through the dearest last point."""
    figure = Figure(figsize=(11, 8), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axis, panel, points in zip(figure.subplots(2, 2).flat, sweeps, times, strict=True):
        work = [sizes.work() for _, sizes in panel.points]
        for k, geometry in enumerate(GEOMETRIES):
            axis.plot(
                work,
                [point[k] for point in points],
                color=COLOURS[k],
                marker=MARKERS[k],
                markersize=4,
                linewidth=1.4,
                label=geometry,
            )
        top = max(points[-1])
        axis.plot(
            work,
            [top * w / work[-1] for w in work],
            color="black",
            linestyle=":",
            linewidth=1.2,
            label="(I m + J n) r², to scale",
        )
        axis.set(title=panel.title, xlabel=panel.label, ylabel="ms a step")
        axis.set_xscale("log")
        axis.set_yscale("log")
        # Places by work, so that every panel has the same line; names by what grows.
        axis.set_xticks(work, [name for name, _ in panel.points])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path)


def write(sweeps: list[Panel], times: list[list[list[float]]], mode: str, path: Path) -> None:
    """One line a measurement."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        shape_names = ["pairs", "rows", "rank", "lefts", "rights"]
        writer.writerow(["panel", "geometry", "mode", "momentum", *shape_names, "work", "ms"])
        for panel, points in zip(sweeps, times, strict=True):
            for (_, sizes), found in zip(panel.points, points, strict=True):
                shape = [sizes.pairs, sizes.rows, sizes.rank, sizes.lefts, sizes.rights]
                for geometry, ms in zip(GEOMETRIES, found, strict=True):
                    start = [panel.label, geometry, mode, MOMENTUM]
                    writer.writerow([*start, *shape, sizes.work(), f"{ms:.6g}"])


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("scaling"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--threads", type=int, help="CPU threads")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    mode = "graph" if device.type == "cuda" else "eager"
    sweeps = panels(given.quick)
    total = len(GEOMETRIES) * sum(len(panel.points) for panel in sweeps)
    times: list[list[list[float]]] = []
    done = 0
    with progress_bar() as progress:
        for panel in sweeps:
            times.append([])
            for name, sizes in panel.points:
                found = []
                for ms in measure(sizes, device, mode, 3 if given.quick else 10):
                    found.append(ms)
                    done += 1
                    progress(f"{panel.label} {name}", done, total)
                times[-1].append(found)
    given.output.mkdir(parents=True, exist_ok=True)
    write(sweeps, times, mode, given.output / "scaling.csv")
    title = f"Cost of a step, {mode}, momentum {MOMENTUM}, float32, on {device_name(device)}"
    draw(sweeps, times, title, given.output / "scaling.png")


if __name__ == "__main__":
    main()
