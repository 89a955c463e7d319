"""What each numerical defect does to 5,000 steps of training, with its safeguard off and on.

    python benchmarks/safeguards_study.py --output docs/figures              # several minutes
    python benchmarks/safeguards_study.py --output quick --steps 200        # a minute
    python benchmarks/safeguards_study.py --output docs/figures --only masters

Writes one figure for each experiment and the numbers at the end of every run to safeguards.csv.
docs/safeguards.md discusses them. Where a safeguard has no switch, "off" is a patch of the library
made by this study (safeguards_kit.py). Everything is seeded; variants see the same data.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import safeguards_kit as kit
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, NullFormatter
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from safeguards_kit import Attention, Regression, Trace, train

from rankfold.geometries import EVENTS
from rankfold.geometries.fixed_embedded import FixedEmbedded
from rankfold.geometries.fixed_quotient import FixedQuotient
from rankfold.geometries.isometry_quotient import IsometryQuotient

BLUE, ORANGE, GREEN, PINK, SKY, BLACK = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#000000",
)
ON = {"color": BLUE, "linestyle": "-", "linewidth": 2.8}
OFF = {"color": ORANGE, "linestyle": "--", "linewidth": 1.5}
REFERENCE = {"color": BLACK, "linestyle": ":", "linewidth": 1.3, "zorder": 5}
Row = dict[str, object]
Style = dict[str, object]
Tick = Callable[[], None]


class Sheet:
    """A row of panels about 1200 pixels wide, and the table rows of one experiment."""

    def __init__(
        self, name: str, titles: list[str], labels: list[str], shared_legend: bool = True
    ) -> None:
        self.name, self.shared_legend = name, shared_legend
        self.figure = Figure(figsize=(12, 4.8), dpi=100, layout="constrained")
        self.axes: list[Axes] = list(self.figure.subplots(1, len(titles), squeeze=False)[0])
        self.rows: list[Row] = []
        for axis, title, label in zip(self.axes, titles, labels, strict=True):
            axis.set(title=title, xlabel="step", ylabel=label, yscale="log")
            axis.grid(alpha=0.3)

    def line(self, panel: int, trace: Trace, what: str, label: str, style: Style) -> None:
        """Draw one series, with a cross where it stops being finite."""
        values = trace.series[what]
        axis = self.axes[panel]
        axis.plot(trace.steps[-len(values) :], values, label=label, **style)  # type: ignore[arg-type]
        finite = [math.isfinite(v) for v in values]
        if not all(finite):
            stop = max(finite.index(False) - 1, 0)
            axis.plot(trace.steps[stop], values[stop], "X", color=style["color"], markersize=10)

    def row(self, setting: str, trace: Trace, *, error: str = "error", **extra: object) -> None:
        """One line of the table: settled error and what happened."""
        # Counts are over all members, so rows about one member leave them out.
        whole = error == "error"
        events = {name: int(trace.last(name)) if whole else "" for name in EVENTS}
        died = "" if trace.died is None else trace.died
        shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in extra.items()}
        self.rows.append(
            {
                "experiment": self.name,
                "setting": setting,
                "error": f"{trace.settled(error):.4g}",
                **events,
                "died_at_step": died,
                "also": "; ".join(f"{k} {v}" for k, v in shown.items()),
            }
        )

    def save(self, folder: Path) -> None:
        """Write the figure, in few colours so that the file stays small."""
        legends = [axis.get_legend_handles_labels() for axis in self.axes]
        if self.shared_legend:
            drawn = dict(pair for hs, names in legends for pair in zip(names, hs, strict=True))
            self.figure.legend(
                list(drawn.values()),
                list(drawn),
                loc="outside lower center",
                ncols=3 if len(drawn) % 3 == 0 else 2,
            )
        for axis in self.axes:
            if not self.shared_legend:
                axis.legend(fontsize=8.5)
            low, high = axis.get_ylim()
            if axis.get_yscale() == "log":
                close = high / low < 12
                axis.yaxis.set_major_formatter(
                    _plain if high < 1e4 and low > 1e-4 else LogFormatterMathtext()
                )
                axis.yaxis.set_minor_formatter(_plain if close else NullFormatter())
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png")
        small = Image.open(buffer).convert("RGB").quantize(255, dither=Image.Dither.NONE)
        small.save(folder / f"safeguards-{self.name}.png", optimize=True)


@FuncFormatter
def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def orthogonality(steps: int, tick: Tick) -> Sheet:
    """Polar factors from the Gram of the stored numbers against trusting I + ΞᵀΞ."""
    titles = ["Orthonormality of the factors", "Fit"]
    sheet = Sheet("orthogonality", titles, ["‖UᵀU − I‖₂, worst factor", "relative error of W"])
    for start, defect, marker in (("exact", 0.0, "-"), ("defect 5e-4", 5e-4, ":")):
        for on in (True, False):
            problem = Regression(isometry=True)
            with torch.no_grad():
                problem.a.mul_(math.sqrt(1 + defect))
            patches = [] if on else [kit.trust_the_formula()]
            options = {"lr": 0.1, "geometry": "isometry-quotient"}
            trace = train(problem, steps, options, patches=patches)
            label = f"{'stored Gram (library)' if on else 'trust I + ΞᵀΞ (off)'}, {start} start"
            style: Style = {**(ON if on else OFF), "linestyle": marker}
            sheet.line(0, trace, "defect", label, style)
            sheet.line(1, trace, "error", label, style)
            sheet.row(label, trace, defect=trace.last("defect"))
            tick()
    return sheet


def momentum(steps: int, tick: Tick) -> Sheet:
    """Momentum transported to each new point against momentum left as it was."""
    titles = ["Momentum off the tangent space", "Fit, momentum 0.9", "Fit, momentum 0.99"]
    labels = ["incoherent share of the momentum", *["relative error of W"] * 2]
    sheet = Sheet("momentum", titles, labels)
    kinds = ((FixedEmbedded, BLUE), (FixedQuotient, ORANGE), (IsometryQuotient, GREEN))
    for geometry, color in kinds:
        for panel, beta in ((1, 0.9), (2, 0.99)):
            for on in (True, False):
                watching, probe = kit.watch_momentum(geometry)
                patches = [watching, *([] if on else kit.no_transport())]
                options = {"lr": 0.1, "geometry": geometry.name, "momentum": beta}
                problem = Regression(isometry=geometry.isometry)
                trace = train(problem, steps, options, patches=patches, probe=probe)
                label = f"{geometry.name}, {'on' if on else 'off'}"
                style: Style = {"color": color, "linestyle": "-" if on else ":", "linewidth": 1.3}
                if panel == 1:
                    sheet.line(0, trace, "incoherent", label, style)
                sheet.line(panel, trace, "error", label, style)
                off, worst = trace.settled("incoherent"), trace.settled("condition")
                sheet.row(f"{label}, momentum {beta}", trace, incoherent=off, condition=worst)
                tick()
    return sheet


def inconsistency(steps: int, tick: Tick) -> Sheet:
    """gradient_repair, on attention with RoPE and QK-norm and on a twist of known size."""
    titles = [
        "RoPE + QK-norm: fit",
        "RoPE + QK-norm: gauge",
        "Synthetic twist, 10%: gauge",
        "Synthetic twist, 10%: fit",
    ]
    worst = "worst condition number"
    sheet = Sheet("inconsistency", titles, ["held-out error", worst, worst, "relative error of W"])
    sizes = (0.0, 0.01, 0.1, 1.0)
    colors = {"fixed-embedded": BLUE, "fixed-quotient": ORANGE}
    lines: dict[str, Style] = {
        "none": {"linestyle": "-", "linewidth": 4.5, "alpha": 0.35},
        "average": {"linestyle": "--", "linewidth": 2},
        "exact": {"linestyle": ":", "linewidth": 2},
    }
    for geometry, color in colors.items():
        for repair, line in lines.items():
            style: Style = {"color": color, **line}
            label = f"{geometry}, {repair}"
            options = {"lr": 0.02, "geometry": geometry, "gradient_repair": repair}
            trace = train(Attention(), steps, options)
            sheet.line(0, trace, "error", label, style)
            sheet.line(1, trace, "condition", label, style)
            sheet.row(f"attention, {label}", trace, condition=trace.last("condition"))
            tick()
            trace = train(Regression(twist=sizes), steps, {**options, "lr": 0.05})
            sheet.line(2, trace, "condition2", label, style)
            sheet.line(3, trace, "error2", label, style)
            for k, size in enumerate(sizes):
                extra = {"condition": trace.last(f"condition{k}")}
                sheet.row(f"twist {size:g}, {label}", trace, error=f"error{k}", **extra)
            tick()
    return sheet


def rank(steps: int, tick: Tick) -> Sheet:
    """A target of rank 2 fitted with rank 4, so that two singular values decay for ever."""
    titles = [
        "fixed-embedded, rank 2 of 4",
        "fixed-quotient, rank 2 of 4",
        "LoRA start (B = 0), first 300 steps",
    ]
    sheet = Sheet("rank", titles, ["relative error of W"] * 3, shared_legend=False)
    sheet.axes[2].set(xlim=(-5, kit.EARLY))
    plain = kit.plain_cholesky, kit.no_skip
    variants: list[tuple[str, float, tuple[Callable[[], kit.Patch], ...], Style]] = [
        ("lifting (library)", 0.0, (), ON),
        ("no lifting, skip on", 0.0, plain[:1], {**OFF, "color": PINK}),
        ("no lifting, no skip", 0.0, plain, OFF),
        ("lifting + damping 1e-4", 1e-4, (), {**ON, "color": GREEN, "linestyle": "-."}),
        ("lifting + damping 1e-2", 1e-2, (), {**ON, "color": BLACK, "linestyle": ":"}),
    ]
    for panel, geometry in enumerate(("fixed-embedded", "fixed-quotient")):
        for label, damping, off, style in variants:
            problem = Regression(noise=0.0, target_rank=2)
            options = {"lr": 0.02, "geometry": geometry, "normalize": None, "damping": damping}
            trace = train(problem, steps, options, patches=[make() for make in off])
            sheet.line(panel, trace, "error", label, style)
            sheet.row(f"{geometry}, {label}", trace, smallest=trace.last("smallest"))
            tick()
    starts = ((0.0, 1e-6, SKY), (0.0, 1e-4, GREEN), (0.0, 1e-2, BLACK), (1e-3, 0.0, BLUE))
    for geometry, line in (("fixed-embedded", "-"), ("fixed-quotient", "--")):
        for scale, damping, color in starts:
            problem = Regression(left_scale=scale)
            options = {"lr": 0.05, "geometry": geometry, "damping": damping}
            trace = train(problem, steps, options)
            start = f"damping {damping:g}" if damping else f"B of size {scale:g} instead"
            label = f"{geometry.removeprefix('fixed-')}, {start}"
            sheet.line(2, trace, "error", label, {"color": color, "linestyle": line})
            sheet.row(f"LoRA start, {label}", trace, at_step_50=trace.at(50, "error"))
            tick()
    return sheet


def step_length(steps: int, tick: Tick) -> Sheet:
    """A learning rate as long as the target, with trust_region None and 0.5."""
    titles = ["Fit at lr 2", "Conditioning of the factors", "Steps clipped", "SVD unconverged"]
    labels = ["relative error of W", "worst condition number", *["share of steps so far"] * 2]
    sheet = Sheet("step-length", titles, labels)
    for axis in sheet.axes[2:]:
        axis.set(yscale="linear", ylim=(-0.03, 1.03))
    colors = {"fixed-embedded": BLUE, "fixed-quotient": ORANGE, "isometry-embedded": GREEN}
    for geometry, color in colors.items():
        for trust in (None, 0.5):
            problem = Regression(isometry=geometry.startswith("iso"))
            options = {"lr": 2.0, "geometry": geometry, "trust_region": trust}
            trace = train(problem, steps, options)
            for event in ("clipped", "unconverged"):
                shares = zip(trace.steps, trace.series[event], strict=True)
                trace.series[f"{event} share"] = [
                    n / max(1, s) / problem.members for s, n in shares
                ]
            label = f"{geometry}, trust_region {trust}"
            style: Style = {"color": color, "linestyle": "--" if trust is None else "-"}
            sheet.line(0, trace, "error", label, style)
            sheet.line(1, trace, "condition", label, style)
            if trust is not None:
                sheet.line(2, trace, "clipped share", label, style)
            if geometry != "fixed-quotient":
                sheet.line(3, trace, "unconverged share", label, style)
            sheet.row(label, trace, condition=trace.last("condition"))
            tick()
    return sheet


def masters(steps: int, tick: Tick) -> Sheet:
    """bfloat16 weights with and without the float32 master, against float32 weights."""
    rates = [(g, rate) for g in ("fixed-quotient", "isometry-quotient") for rate in (1e-3, 0.1)]
    titles = [f"{geometry}, lr {rate:g}" for geometry, rate in rates]
    sheet = Sheet("masters", titles, ["relative error of W"] * 4)
    for panel, (geometry, rate) in enumerate(rates):
        for label, dtype, after, style in (
            ("float32", torch.float32, None, REFERENCE),
            ("bf16 with master", torch.bfloat16, None, ON),
            ("bf16 without (off)", torch.bfloat16, kit.drop_masters, OFF),
        ):
            problem = Regression(isometry=geometry.startswith("iso"), dtype=dtype, noise=0.1)
            trace = train(problem, steps, {"lr": rate, "geometry": geometry}, after=after)
            sheet.line(panel, trace, "error", label, style)
            sheet.row(f"{geometry}, lr {rate:g}, {label}", trace, defect=trace.last("defect"))
            tick()
    return sheet


def nonfinite(steps: int, tick: Tick) -> Sheet:
    """One step in a hundred brings a NaN in the first of four members."""
    titles = ["The member with NaN gradients", "The other three members"]
    sheet = Sheet("nonfinite", titles, ["relative error of W"] * 2)
    for label, share, off, style in (
        ("no NaN at all", 0.0, False, REFERENCE),
        ("1% NaN, skip (library)", 0.01, False, ON),
        ("1% NaN, unprotected (off)", 0.01, True, OFF),
    ):
        problem = Regression(nan_share=share)
        options = {"lr": 0.05, "geometry": "fixed-embedded"}
        trace = train(problem, steps, options, patches=[kit.no_skip()] if off else [])
        sheet.line(0, trace, "first", label, style)
        sheet.line(1, trace, "others", label, style)
        sheet.row(label, trace, member=trace.settled("first"), others=trace.settled("others"))
        tick()
    return sheet


EXPERIMENTS: dict[str, tuple[Callable[[int, Tick], Sheet], int]] = {
    "orthogonality": (orthogonality, 4),
    "momentum": (momentum, 12),
    "inconsistency": (inconsistency, 12),
    "rank": (rank, 18),
    "step-length": (step_length, 6),
    "masters": (masters, 12),
    "nonfinite": (nonfinite, 3),
}


def _kept_rows(path: Path, redone: list[str]) -> Iterator[Row]:
    if path.exists():
        with path.open(newline="") as file:
            yield from (dict(r) for r in csv.DictReader(file) if r["experiment"] not in redone)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for figures and table")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="may be repeated")
    args = parser.parse_args()
    names = args.only or list(EXPERIMENTS)
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    table = args.output / "safeguards.csv"
    rows = list(_kept_rows(table, names))
    described = "[progress.description]{task.description:>14}"
    with Progress(described, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        for name in names:
            experiment, runs = EXPERIMENTS[name]
            task = progress.add_task(name, total=runs)
            sheet = experiment(args.steps, lambda task=task: progress.advance(task))  # type: ignore[misc]
            sheet.save(args.output)
            rows += sheet.rows
    order = list(EXPERIMENTS)
    rows.sort(key=lambda row: order.index(str(row["experiment"])))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
