"""What a step costs as one size grows: rows, rank, number of pairs, and factors of a grid.

    python benchmarks/scaling_study.py --output docs/figures        # minutes, on a GPU
    python benchmarks/scaling_study.py --output quick --quick       # small sizes, under a minute

Times the five geometries with momentum by the means of ``rankfold bench``, as CUDA graphs where
there is a GPU and eagerly elsewhere, and draws beside them the line of O((I m + J n) r²) for each
pair or grid. A curve below the line's slope still pays for launching its operations; one along
it has reached the cost that counts. Writes scaling.csv and scaling.png. The table grows as it is
measured: cut off, and started again with the same folder, it goes on from there.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import astuple, dataclass, fields
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
    points: tuple[tuple[str, Sizes], ...]


# Milliseconds by the label of a panel, geometry and sizes.
Times = dict[tuple[str, str, Sizes], float]
_SHAPE = tuple(field.name for field in fields(Sizes))


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
            tuple((str(m), Sizes(pairs, m, rank)) for m in heights),
        ),
        Panel(
            f"rank: {pairs} pairs, {rows} rows",
            "r",
            tuple((str(r), Sizes(pairs, rows, r)) for r in ranks),
        ),
        Panel(
            f"pairs: {rows}×{rank}",
            "pairs",
            tuple((str(n), Sizes(n, rows, rank)) for n in counts),
        ),
        Panel(
            f"grids: {fewer} of {rows}×{rank} factors",
            "I×J",
            tuple((f"{i}×{j}", Sizes(fewer, rows, rank, i, j)) for i, j in grids),
        ),
    ]


def measure(sizes: Sizes, geometry: str, device: torch.device, mode: str, repeats: int) -> float:
    """Milliseconds of a step."""
    case = sizes.case()
    entered = enlist(
        case, geometries=[geometry], momenta=[MOMENTUM], modes=[mode], literal=False, rivals=False
    )
    timing, _, _ = time_contender(case, entered.contenders[-1], device, repeats, budget=1.0)
    return timing.ms


def draw(sweeps: list[Panel], times: Times, title: str, path: Path) -> None:
    """A panel of five curves for each sweep, as far as it was measured for all of them.

    With the line of the work through the dearest last point.
    """
    measured = {
        panel: [
            (name, sizes.work(), [times[panel.label, g, sizes] for g in GEOMETRIES])
            for name, sizes in panel.points
            if all((panel.label, g, sizes) in times for g in GEOMETRIES)
        ]
        for panel in sweeps
    }
    drawn = {panel: points for panel, points in measured.items() if len(points) > 1}
    high = -(-len(drawn) // 2)
    figure = Figure(figsize=(11, 4 * high), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(high, 2, squeeze=False).flat
    for axis, (panel, found) in zip(axes, drawn.items(), strict=False):
        names, work, points = zip(*found, strict=True)
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
        axis.set_xticks(work, names)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path)


class Table:
    """The measurements in a file, one line each, written as they are made."""

    def __init__(self, path: Path, mode: str) -> None:
        self.times: Times = {}
        self._path, self._mode = path, mode
        if not path.exists():
            self._add(["panel", "geometry", "mode", "momentum", *_SHAPE, "work", "ms"])
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["mode"] == mode:
                    sizes = Sizes(*(int(line[name]) for name in _SHAPE))
                    self.times[line["panel"], line["geometry"], sizes] = float(line["ms"])

    def add(self, label: str, geometry: str, sizes: Sizes, ms: float) -> None:
        """One more."""
        self.times[label, geometry, sizes] = ms
        start = [label, geometry, self._mode, MOMENTUM]
        self._add([*start, *astuple(sizes), sizes.work(), f"{ms:.6g}"])

    def _add(self, line: list[object]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(line)


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
    given.output.mkdir(parents=True, exist_ok=True)
    table = Table(given.output / "scaling.csv", mode)
    wanted = [
        (panel.label, name, geometry, sizes)
        for panel in sweeps
        for name, sizes in panel.points
        for geometry in GEOMETRIES
        if (panel.label, geometry, sizes) not in table.times
    ]
    with progress_bar() as progress:
        for done, (label, name, geometry, sizes) in enumerate(wanted, 1):
            ms = measure(sizes, geometry, device, mode, 3 if given.quick else 10)
            table.add(label, geometry, sizes, ms)
            progress(f"{label} {name}", done, len(wanted))
    title = f"Cost of a step, {mode}, momentum {MOMENTUM}, float32, on {device_name(device)}"
    draw(sweeps, table.times, title, given.output / "scaling.png")


if __name__ == "__main__":
    main()
