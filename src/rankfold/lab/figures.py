"""The report's figures, each as SVG and PNG. Colours and dashes of the curves are the paper's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .records import Curve, Run
from .statistics import ADAMW, Band, Setting, Study, band, difference, thinned

TRAINING_EVERY = 20
# How far the panel of differences reaches: all but so large a share of a curve's ends, from that
# share of the run on, up to so many times the median curve's reach.
_OUTSIDE, _SETTLED, _FARTHEST, _MARGIN = 0.05, 0.1, 3.0, 0.08
_LEAST_REACH = 0.001
_STYLES: dict[str, tuple[str, str]] = {
    ADAMW: ("#000000", "-"),
    "fixed-embedded": ("#0000ff", "-"),
    "fixed-quotient": ("#e67300", "-"),
    "isometry-embedded": ("#008c00", "--"),
    "isometry-quotient": ("#d90000", "--"),
    "isometry-canonical": ("#800080", "--"),
    "recommended": ("#d6008f", "-"),
    "frozen": ("#8c8c8c", ":"),
    "muon": ("#7a4a21", "-."),
    "whitened": ("#00a0e0", "-."),
    "dion": ("#b08d00", "-."),
    # Further methods of the contest: the colour's kin, and dashes of their own.
    "fixed-quotient-growing": ("#f2b500", "--"),
    "fixed-quotient-tilted": ("#a63c00", "-"),
    "fixed-quotient-tilted-vo": ("#00806b", "-"),
    "muon-tilted": ("#c79a6b", ":"),
    "fixed-embedded-metric": ("#7a7aff", ":"),
    "isometry-quotient-metric": ("#ff8080", ":"),
}
_LABELS = {ADAMW: "AdamW", "muon": "Muon", "dion": "Dion"}
_OTHER_STYLE = ("#00808c", "-.")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOOK: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linestyle": ":",
    "grid.color": "#bbbbbb",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # names come from outside
    "svg.fonttype": "none",  # text stays text: small files, and it can be found and read aloud
}


@dataclass(frozen=True)
class Picture:
    """A figure as written: its name is that of its files, without the ending."""

    name: str
    caption: str
    svg: str  # to put into a page
    paths: tuple[Path, Path]


Drawn = tuple[str, str, Figure]  # name, caption, figure


def label(optimizer: str) -> str:
    """The optimizer's name to readers."""
    return _LABELS.get(optimizer, optimizer)


def rate(value: Any) -> str:
    """A learning rate, as a power of two where it is one."""
    if not isinstance(value, float | int):
        return str(value)
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5:
        return f"{value:g}"
    return "2" + str(exponent - 1).translate(_SUPERSCRIPTS)


def style(optimizer: str) -> tuple[str, str]:
    """Its colour and dashes."""
    return _STYLES.get(optimizer, _OTHER_STYLE)


def in_order(optimizers: Sequence[str]) -> list[str]:
    """In the paper's order, others behind."""
    known = list(_STYLES)
    return sorted(optimizers, key=lambda n: (known.index(n) if n in known else len(known), n))


def training_curve(run: Run) -> Curve:
    """Training loss, sampled as in the paper."""
    return thinned(run.training, TRAINING_EVERY)


def validation_curve(run: Run) -> Curve:
    """Validation loss."""
    return run.validation


def write_figures(drawn: Iterator[Drawn], folder: Path) -> list[Picture]:
    """Every figure as SVG and PNG, the same bytes for the same data."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    with mpl.rc_context(_LOOK):
        for name, caption, figure in drawn:
            svg, png = folder / f"{name}.svg", folder / f"{name}.png"
            nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            with mpl.rc_context({"svg.hashsalt": name}):
                figure.savefig(svg, metadata=nameless)
            figure.set_layout_engine("none")  # it is laid out; once is slow enough
            figure.savefig(png, dpi=150, metadata={"Software": None})
            text = _for_a_page(svg.read_text(encoding="utf-8"), name, caption)
            pictures.append(Picture(name, caption, text, (svg, png)))
    return pictures


def _for_a_page(svg: str, name: str, caption: str) -> str:
    """Without the file's header; ids get the figure's name, as a page has many figures."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    alternative = re.sub(r'[<>&"]', " ", caption)
    return svg.replace("<svg", f'<svg role="img" aria-label="{alternative}"', 1)


# Losses over time --------------------------------------------------------------------------------


def loss_figures(study: Study) -> Iterator[Drawn]:
    """Training and validation loss of the best settings."""
    kinds = (("train", "training", training_curve), ("valid", "validation", validation_curve))
    for short, word, which in kinds:
        if any(c.steps for s in study.best.values() for c in s.curves(which).values()):
            yield f"{study.name}_{short}", *_loss_figure(study, f"{word} loss", which)


def _loss_figure(study: Study, what: str, which: Callable[[Run], Curve]) -> tuple[str, Figure]:
    relative = _differences(study, which)
    figure = Figure(figsize=(8, 5.8 if relative else 3.6), layout="constrained")
    axes = figure.subplots(2 if relative else 1, 1, sharex=True, squeeze=False)[:, 0]
    bands = {name: band(list(study.best[name].curves(which).values())) for name in _names(study)}
    _draw_bands(axes[0], bands)
    axes[0].set_ylabel(what)
    caption = f"{study.label}, {what}, mean over seeds of the best setting of each optimizer"
    if any(len(setting.finished) > 1 for setting in study.best.values()):
        caption += ", ± one standard deviation"
    if relative:
        _draw_bands(axes[1], relative)
        axes[1].set_ylabel("loss − AdamW")
        caption += ". Below: the difference to AdamW, paired by seed"
        if beyond := _set_relative_limits(axes[1], relative):
            caption += f"; parts of {', '.join(map(label, beyond))} lie beyond the panel"
    axes[-1].set_xlabel("training step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(labels) > 6 else 3)
    return f"{caption}.", figure


def _names(study: Study) -> list[str]:
    return in_order(list(study.best))


def _differences(study: Study, which: Callable[[Run], Curve]) -> dict[str, Band]:
    """Bands of the differences to the baseline, nothing if none has a seed in common with it."""
    if study.baseline is None:
        return {}
    bands = {n: _relative(study.best[n], study.baseline, which) for n in _names(study)}
    found = {name: drawn for name, drawn in bands.items() if drawn.steps}
    return found if found.keys() - {ADAMW} else {}


def _relative(setting: Setting, baseline: Setting, which: Callable[[Run], Curve]) -> Band:
    ours, theirs = setting.curves(which), baseline.curves(which)
    return band([difference(ours[seed], theirs[seed]) for seed in ours if seed in theirs])


def _set_relative_limits(axis: Axes, bands: dict[str, Band]) -> list[str]:
    """What the settled part of the run wants; return whose lines leave the panel.

    A spike or a bad start shall not flatten the rest, nor those who learn nothing.
    """
    extents = [_extent(b) for name, b in bands.items() if name not in (ADAMW, "frozen")]
    extents = extents or [_extent(b) for b in bands.values()]
    farthest = _FARTHEST * median(max(-low, high) for low, high in extents)
    low = max(min(low for low, _ in extents), -farthest)
    high = min(max(high for _, high in extents), farthest)
    margin = _MARGIN * max(high - low, _LEAST_REACH)
    low, high = low - margin, high + margin
    axis.set_ylim(low, high)
    return [name for name, b in bands.items() if any(not low <= v <= high for v in b.means)]


def _extent(drawn: Band) -> tuple[float, float]:
    """From where to where the settled part of a band goes, with its deviations and 0."""
    settled = [
        (value, spread if math.isfinite(spread) else 0.0)
        for step, value, spread in zip(drawn.steps, drawn.means, drawn.deviations, strict=True)
        if step > _SETTLED * drawn.steps[-1] and math.isfinite(value)
    ]
    if not settled:
        return 0.0, 0.0
    left_out = int(_OUTSIDE * len(settled))
    low = sorted(value - spread for value, spread in settled)[left_out]
    high = sorted(value + spread for value, spread in settled)[-1 - left_out]
    return min(low, 0.0), max(high, 0.0)


def _draw_bands(axis: Axes, bands: dict[str, Band]) -> None:
    for name, drawn in bands.items():
        colour, dashes = style(name)
        (line,) = axis.plot(drawn.steps, drawn.means, dashes, color=colour, lw=1.3)
        line.set_label(label(name))
        if len(drawn.steps) == 1:  # of which a line shows nothing
            line.set(marker="o", markersize=4)
        pairs = list(zip(drawn.means, drawn.deviations, strict=True))
        if any(math.isfinite(d) and d > 0 for _, d in pairs):
            low, high = [m - d for m, d in pairs], [m + d for m, d in pairs]
            axis.fill_between(drawn.steps, low, high, color=colour, alpha=0.13, lw=0)
    axis.grid(visible=True)


# Time and diagnostics ----------------------------------------------------------------------------


def time_figures(study: Study) -> Iterator[Drawn]:
    """Bars of the step's time, the optimizer's part apart."""
    timed = [n for n in _names(study) if math.isfinite(study.best[n].step_seconds)]
    if not timed:
        return
    figure = Figure(figsize=(8, 1.4 + 0.36 * len(timed)), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(timed):
        setting = study.best[name]
        whole, share = 1000 * setting.step_seconds, setting.optimizer_share
        part = whole * share if math.isfinite(share) else 0.0
        axis.barh(place, part, color="#0072b2", label="optimizer" if place == 0 else "")
        rest = "forward, backward and the rest" if place == 0 else ""
        axis.barh(place, whole - part, left=part, color="#c9d3dc", label=rest)
        text = f"{whole:.3g} ms" + (f", {100 * share:.0f}%" if math.isfinite(share) else "")
        axis.annotate(text, (whole, place), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(timed)), [label(name) for name in timed])
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.set_xlabel("median ms a step, and the optimizer's share of it")
    axis.grid(visible=True, axis="x")
    figure.legend(loc="outside lower center", ncols=2)
    yield f"{study.name}_time", f"{study.label}: time of a training step, best settings.", figure


def diagnostic_figures(study: Study) -> Iterator[Drawn]:
    """Small multiples, one panel a diagnostic."""
    panels: dict[str, dict[str, Band]] = {}
    for optimizer in _names(study):
        runs = list(study.best[optimizer].finished.values())
        for name in dict.fromkeys(name for run in runs for name in run.diagnostics):
            curves = [run.diagnostics[name] for run in runs if name in run.diagnostics]
            panels.setdefault(name, {})[optimizer] = band(curves)
    if not panels:
        return
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8, 0.9 + 2.05 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for axis, name in zip(axes, sorted(panels), strict=False):
        _draw_bands(axis, panels[name])
        axis.set_title(name.replace("/", "/\n"), fontsize=9.5)  # side by side they have little room
        if not any(any(drawn.means) for drawn in panels[name].values()):
            axis.set_ylim(-0.04, 1)  # nothing was counted, seen above the axis
        handles |= {str(line.get_label()): line for line in axis.get_lines()}
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[max(0, len(panels) - columns) : len(panels)]:
        axis.set_xlabel("training step")
        axis.tick_params(labelbottom=True)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    caption = f"{study.label}: diagnostics over time, mean over seeds, best settings."
    yield f"{study.name}_diagnostics", caption, figure
