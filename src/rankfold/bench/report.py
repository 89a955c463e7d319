"""Results as a table, CSV, JSON and plot. rich and matplotlib are used where they are installed."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..defaults import RECOMMENDED, RECOMMENDED_NAME
from . import ADAMW, Results, Row, WholeStep
from .contenders import LR
from .whole_step import BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Progress = Callable[[str, int, int], None]
Cells = list[str]

_MIB = 2**20
# Okabe and Ito's colours, which the colour-blind can tell apart and print keeps apart.
_COLOURS = {
    "graph": "#0072b2",
    "compiled": "#009e73",
    "eager": "#56b4e9",
    "literal form, eager": "#d55e00",
    "other optimizers": "#8c8c8c",
}
# Of a table that is too wide for a terminal, these are left out, one after the other.
_LEAST_FIRST = (
    *("normalization, retraction", "floor MiB", "of copy", "state MiB", "GB/s", "mode"),
    *("peak MiB", "× AdamW, graph", "momentum"),
)
_PACKAGES = ("rankfold", "torch", "numpy", "geoopt", "peft", "triton")


# Tables ------------------------------------------------------------------------------------------


def rows_as_cells(results: Results) -> tuple[Cells, list[Cells]]:
    """The header and the lines of a case's table."""
    graphs = any(row.graph_ratio is not None for row in results.rows)
    header = ["optimizer", "mode", "momentum", "normalization, retraction", "ms", "× AdamW"]
    header += ["× AdamW, graph"] if graphs else []
    header += ["peak MiB", "state MiB", "floor MiB", "GB/s", "of copy"]
    lines = []
    for row in results.rows:
        cells = [row.contender, row.mode, _momentum(row.momentum), _method(row)]
        cells += [_number(row.ms), _number(row.ratio)]
        if graphs:
            cells.append("" if row.graph_ratio is None else _number(row.graph_ratio))
        sizes = (row.peak_bytes, row.state_bytes, row.floor_bytes)
        cells += [f"{size / _MIB:.1f}" for size in sizes]
        cells += [_number(row.bytes_per_second / 1e9), f"{100 * row.copy_share:.1f}%"]
        lines.append(cells)
    return header, lines


def whole_steps_as_cells(rows: Sequence[WholeStep]) -> tuple[Cells, list[Cells]]:
    """The header and the lines of the table of whole training steps."""
    header = ["attention optimizer", "mode", "momentum", "ms a step", "against AdamW", "peak MiB"]
    lines = []
    for row in rows:
        against = "" if row.optimizer == BASE else f"{row.percent:+.1f}%"
        cells = [row.optimizer, row.mode, _momentum(row.momentum), _number(row.ms), against]
        lines.append([*cells, f"{row.peak_bytes / _MIB:.1f}"])
    return header, lines


def show(results: Results, whole_steps: Sequence[WholeStep] = ()) -> None:
    """Print a case's tables and notes."""
    title = f"{results.case.name}: {results.case.describe()}, on {device_name(results.device)}"
    caption = (
        f"lr {LR}. × AdamW: time over that of eager fused AdamW. Floor: bytes a step cannot avoid "
        "moving; GB/s: floor over time;\n"
        f"of copy: share of the {results.copy_bandwidth / 1e9:.0f} GB/s a plain copy reaches."
    )
    _print_table(title, *rows_as_cells(results), caption, left=4)
    if whole_steps:
        title = f"{results.case.name}: whole training step, bfloat16"
        _print_table(title, *whole_steps_as_cells(whole_steps), "", left=3)
    for note in results.notes:
        sys.stdout.write(f"Note: {note}.\n")


def _print_table(title: str, header: Cells, lines: list[Cells], caption: str, left: int) -> None:
    """The first ``left`` columns hold words, the others numbers."""
    if importlib.util.find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        text = [title, ""]
        for line in [header, *lines]:
            cells = [
                cell.ljust(width) if k < left else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(cells).rstrip())
        sys.stdout.write("\n".join([*text, "", caption, ""]) + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a file has no edge to wrap at

    def table(shown: Sequence[str]) -> Table:
        made = Table(
            title=title,
            caption=caption,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        for k, name in enumerate(header):
            if name in shown:
                made.add_column(name, justify="left" if k < left else "right", no_wrap=True)
        before = lines[0][0]
        for line in lines:
            if line[0].removeprefix("literal ") != before.removeprefix("literal "):
                made.add_section()
            before = line[0]
            made.add_row(*(x for name, x in zip(header, line, strict=True) if name in shown))
        return made

    shown, wide = list(header), console.options.update(max_width=1000)
    dropped = []
    for name in _LEAST_FIRST:
        if Measurement.get(console, wide, table(shown)).maximum <= console.width:
            break
        if name in shown:
            shown.remove(name)
            dropped.append(name)
    console.print(table(shown))
    if dropped:
        console.print(f"Left out for want of room: {', '.join(dropped)}; --output has them.")


def _number(value: float) -> str:
    """Three significant digits, without exponents."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}"


def _momentum(momentum: float | None) -> str:
    return "its own" if momentum is None else f"{momentum:g}"


def _method(row: Row) -> str:
    return ", ".join(word for word in (row.normalization, row.retraction) if word)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar that hears who is next, how many are done, and of how many."""
    if importlib.util.find_spec("rich") is None:
        yield lambda what, done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn())
    console = Console(stderr=True)
    with progress.Progress(
        *columns, progress.TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


# Files -------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """The folder of the files; raises OSError if it cannot be made, or written into."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(
    folder: Path,
    finished: Sequence[tuple[Results, Sequence[WholeStep]]],
    options: dict[str, Any],
) -> list[str]:
    """Write CSV and plot of each case, and machine.json; return what was written, in words."""
    make_folder(folder)
    said = []
    drawing = importlib.util.find_spec("matplotlib") is not None
    for results, whole_steps in finished:
        name = results.case.name
        write_csv(folder / f"{name}.csv", results.rows)
        said.append(f"wrote {folder / name}.csv")
        if whole_steps:
            write_csv(folder / f"{name}-whole-step.csv", whole_steps)
            said.append(f"wrote {folder / name}-whole-step.csv")
        if drawing:
            draw(results, folder / f"{name}.png")
            said.append(f"wrote {folder / name}.png")
    if not drawing:
        said.append("no plot: matplotlib is not installed (pip install 'rankfold[bench]')")
    about = machine(finished[0][0].device) | {"options": options}
    about["cases"] = {
        results.case.name: {
            "description": results.case.describe(),
            "copy_bytes_per_second": results.copy_bandwidth,
            "notes": results.notes,
        }
        for results, _ in finished
    }
    text = json.dumps(about, indent=2, ensure_ascii=False)
    (folder / "machine.json").write_text(text + "\n", encoding="utf-8")
    return [*said, f"wrote {folder / 'machine.json'}"]


def write_csv(path: Path, rows: Sequence[Row | WholeStep]) -> None:
    """One line a row, full precision, empty where there is no value."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    """What a reader needs to know about where numbers come from."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "device_name": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


# Plot --------------------------------------------------------------------------------------------


def draw(results: Results, path: Path) -> None:
    """Bars of time by contender, a panel for each momentum, with AdamW as a line through all."""
    from matplotlib.figure import Figure

    momenta: list[float | None] = []
    momenta += sorted({row.momentum for row in results.rows if row.momentum is not None})
    momenta = momenta or [None]  # one panel, where all have their own
    bars: dict[str, list[Row]] = {}
    for row in results.rows:
        bars.setdefault(row.contender.removeprefix("literal "), []).append(row)
    panels = [
        {name: [r for r in rows if r.momentum in (None, nu)] for name, rows in bars.items()}
        for nu in momenta
    ]
    height = 1.6 + max(sum(0.22 * len(rows) + 0.14 for rows in panel.values()) for panel in panels)
    figure = Figure(figsize=(1.8 + 4.6 * len(panels), height), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    figure.suptitle(
        f"{results.case.name}: {results.case.describe()}\n{device_name(results.device)}",
        fontsize=10,
    )
    for axis, panel, nu in zip(axes, panels, momenta, strict=True):
        _draw_panel(axis, panel)
        if nu is not None:
            axis.set_title(f"momentum {nu:g}", fontsize=10)
    adamw = next(r.ms for r in results.rows if r.contender == ADAMW and r.mode == "eager")
    times = [row.ms for row in results.rows]
    for axis in axes:
        axis.axvline(adamw, color="black", linewidth=0.9, linestyle="--", zorder=3)
        # Room for the numbers beside the bars, however long the axis is.
        axis.set_xlim(min(times) / 1.6, max(times) * (1.6 * max(times) / min(times)) ** 0.42)
    kinds = dict.fromkeys(map(_kind, results.rows))
    drawn: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    shown = [kind for kind in _COLOURS if kind in kinds]
    figure.legend(
        [drawn[kind] for kind in shown],
        shown,
        loc="outside lower center",
        ncols=len(shown),
        fontsize=8.5,
        frameon=False,
    )
    figure.savefig(path)


def _kind(row: Row) -> str:
    if row.contender.startswith("literal "):
        return "literal form, eager"
    return row.mode if row.normalization else "other optimizers"


def _draw_panel(axis: Axes, panel: dict[str, list[Row]]) -> None:
    """One bar a row, those of one contender side by side, from the top."""
    order = list(_COLOURS)
    place, ticks = 0.0, []
    for name, rows in panel.items():
        ranked = sorted(rows, key=lambda row: order.index(_kind(row)))
        places = [place + k for k in range(len(ranked))]
        for y, row in zip(places, ranked, strict=True):
            kind = _kind(row)
            axis.barh(y, row.ms, height=0.86, color=_COLOURS[kind], label=kind)
            mode = f" {row.mode}" if kind == "other optimizers" and row.mode != "eager" else ""
            text = f"{_number(row.ms)} ms, {_number(row.ratio)}×{mode}"
            # White behind the numbers, where AdamW's line would cross them.
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            axis.annotate(
                text,
                (row.ms, y),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                bbox=back,
                zorder=4,
            )
        if places:
            method = _method(ranked[0])
            if name == RECOMMENDED_NAME:  # in every panel, and at none of their momenta
                method = f"momentum {RECOMMENDED['momentum']:g}, {method}"
            label = f"{name}\n{method}" if method else name
            ticks.append(((places[0] + places[-1]) / 2, label))
        place += len(ranked) + 0.6
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(place - 0.2, -1)
    axis.set_xlabel("ms a step (dashed: eager fused AdamW)", fontsize=8.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
