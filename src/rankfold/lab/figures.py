"""The report's figures, each as SVG and PNG. Colours and dashes of the curves are the paper's."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUP

from .records import Curve, Run
from .statistics import ADAMW, Band, Setting, Study, band, difference, thinned

TRAINING_EVERY = 20
_RELATIVE_LIMIT = 0.4
_OUTSIDE = 0.05  # the share of a curve that may lie beyond it
# Final losses are told apart up to so many times the median's distance from the best, and in
# nats at least.
_WINDOW, _LEAST_WINDOW, _MARGIN = 3.0, 0.2, 0.08
_STYLES: dict[str, tuple[str, str]] = {
    ADAMW: ("#000000", "-"),
    "fixed-embedded": ("#0000ff", "-"),
    "fixed-quotient": ("#e67300", "-"),
    "isometry-embedded": ("#008c00", "--"),
    "isometry-quotient": ("#d90000", "--"),
    "isometry-canonical": ("#800080", "--"),
    "frozen": ("#8c8c8c", ":"),
    "muon": ("#7a4a21", "-."),
    "whitened": ("#00a0e0", "-."),
    "dion": ("#b08d00", "-."),
}
_LABELS = {ADAMW: "AdamW", "muon": "Muon", "dion": "Dion"}
_OTHER_STYLE = ("#00808c", "-.")
_DASHES = {"metric": "-", "none": "--", "spectral": "-."}
_MARKERS = "os^Dv*"
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
    baseline = study.baseline
    relative = baseline is not None and len(study.best) > 1
    figure = Figure(figsize=(8, 5.8 if relative else 3.6), layout="constrained")
    axes = figure.subplots(2 if relative else 1, 1, sharex=True, squeeze=False)[:, 0]
    bands = {name: band(list(study.best[name].curves(which).values())) for name in _names(study)}
    _draw_bands(axes[0], bands)
    axes[0].set_ylabel(what)
    caption = f"{study.label}, {what}, mean over seeds of the best setting of each optimizer"
    if any(len(setting.finished) > 1 for setting in study.best.values()):
        caption += ", ± one standard deviation"
    if relative and baseline is not None:
        bands = {n: _relative(study.best[n], baseline, which) for n in _names(study)}
        _draw_bands(axes[1], bands)
        axes[1].set_ylabel("loss − AdamW")
        caption += ". Below: the difference to AdamW, paired by seed"
        if _set_relative_limits(axes[1], bands):
            caption += "; some points lie beyond the panel"
    axes[-1].set_xlabel("training step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(labels) > 6 else 3)
    return f"{caption}.", figure


def _names(study: Study) -> list[str]:
    return in_order(list(study.best))


def _relative(setting: Setting, baseline: Setting, which: Callable[[Run], Curve]) -> Band:
    ours, theirs = setting.curves(which), baseline.curves(which)
    return band([difference(ours[seed], theirs[seed]) for seed in ours if seed in theirs])


def _set_relative_limits(axis: Axes, bands: dict[str, Band]) -> bool:
    """The paper's, but for many points beyond them; return whether points are cut off.

    A spike or a bad start shall not flatten the rest, nor those who learn nothing.
    """
    values = {name: [v for v in b.means if math.isfinite(v)] for name, b in bands.items()}
    outside = {n: sum(abs(v) > _RELATIVE_LIMIT for v in vs) for n, vs in values.items()}
    if any(n > _OUTSIDE * len(values[name]) for name, n in outside.items() if name != "frozen"):
        return False
    axis.set_ylim(-_RELATIVE_LIMIT, _RELATIVE_LIMIT)
    return any(outside.values())


def _draw_bands(axis: Axes, bands: dict[str, Band]) -> None:
    for name, drawn in bands.items():
        colour, dashes = _STYLES.get(name, _OTHER_STYLE)
        (line,) = axis.plot(drawn.steps, drawn.means, dashes, color=colour, lw=1.3)
        line.set_label(label(name))
        if len(drawn.steps) == 1:  # of which a line shows nothing
            line.set(marker="o", markersize=4)
        pairs = list(zip(drawn.means, drawn.deviations, strict=True))
        if any(math.isfinite(d) and d > 0 for _, d in pairs):
            low, high = [m - d for m, d in pairs], [m + d for m, d in pairs]
            axis.fill_between(drawn.steps, low, high, color=colour, alpha=0.13, lw=0)
    axis.grid(visible=True)


# Learning rates ----------------------------------------------------------------------------------


def rate_figures(study: Study) -> Iterator[Drawn]:
    """Final loss against the learning rates, where several were run."""
    lines: dict[tuple[str, float, str], dict[float, Setting]] = {}
    for setting in reversed(study.settings):  # from the worst: the best of a point stays
        options = setting.any_run.config["optimizer"]
        key = (setting.optimizer, options["momentum"], options["normalize"])
        if setting.losses and setting.optimizer != "frozen":
            lines.setdefault(key, {})[options["lr"]] = setting
    if any(len(points) > 1 for points in lines.values()):
        caption = f"{study.label}: final validation loss against the learning rate, mean over seeds"
        caption += " ± one standard deviation; at each point the best of all other options."
        figure, cut_off = _rate_figure(lines)
        caption += " Triangles at the upper edge stand for losses beyond it." if cut_off else ""
        yield f"{study.name}_rates", caption, figure
    grid = [s for s in study.settings if s.optimizer == ADAMW]
    if len({s.any_run.option("optimizer.other_lr") for s in grid}) > 1:
        caption = f"{study.label}, AdamW: final validation loss on the grid of learning rates."
        yield f"{study.name}_adamw_grid", caption, _heat_map(grid)


def _ceiling(losses: Iterable[float]) -> float:
    """How far up losses are told apart: a rate that is far too high shall not flatten the rest."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return math.inf
    best = min(finite)
    return best + max(_LEAST_WINDOW, _WINDOW * (statistics.median(finite) - best))


def _rate_figure(
    lines: dict[tuple[str, float, str], dict[float, Setting]],
) -> tuple[Figure, bool]:
    """The figure, and whether points are cut off."""
    losses = [setting.loss for points in lines.values() for setting in points.values()]
    ceiling = _ceiling(losses)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    # AdamW knows no normalization, and has its own momentum where none is given.
    free = [key for key in lines if key[0] != ADAMW or key[1]]
    momenta = sorted({momentum for _, momentum, _ in free})
    for key in sorted(lines):
        name, momentum, normalize = key
        points, colour = sorted(lines[key].items()), _STYLES.get(name, _OTHER_STYLE)[0]
        axis.errorbar(
            [x for x, _ in points],
            [s.loss for _, s in points],
            yerr=[_shown_spread(s, ceiling) for _, s in points],
            color=colour,
            linestyle=_DASHES.get(normalize, ":") if key in free else "-",
            marker=_MARKERS[momenta.index(momentum) % len(_MARKERS)] if key in free else ".",
            markersize=5,
            lw=1.3,
            elinewidth=0.8,
            capsize=2,
        )
        above = [x for x, setting in points if setting.loss > ceiling]
        axis.plot(above, [ceiling] * len(above), ls="", marker=CARETUP, color=colour, ms=8)
    if any(loss > ceiling for loss in losses):
        floor = min(loss for loss in losses if math.isfinite(loss))
        axis.set_ylim(floor - _MARGIN * (ceiling - floor), ceiling)
    rates = sorted({x for points in lines.values() for x in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(rates, [rate(x) for x in rates])
    axis.minorticks_off()
    axis.set(xlabel="learning rate", ylabel="final validation loss")
    axis.grid(visible=True)
    handles = [
        Line2D([], [], color=_STYLES.get(n, _OTHER_STYLE)[0], lw=2, label=label(n))
        for n in in_order(list({name for name, _, _ in lines}))
    ]
    handles += _keys_of_styles(momenta, sorted({normalize for _, _, normalize in free}))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure, any(loss > ceiling for loss in losses)


def _shown_spread(setting: Setting, ceiling: float) -> float:
    shown = math.isfinite(setting.spread) and setting.loss <= ceiling
    return setting.spread if shown else 0.0


def _keys_of_styles(momenta: Sequence[float], normalizations: Sequence[str]) -> list[Line2D]:
    """What dashes and markers mean, where there is a choice."""
    handles = []
    if len(normalizations) > 1:
        handles += [
            Line2D([], [], color="#666666", ls=_DASHES.get(n, ":"), label=f"normalize {n}")
            for n in normalizations
        ]
    if len(momenta) > 1:
        handles += [
            Line2D([], [], color="#666666", ls="", marker=_MARKERS[k % 6], label=f"momentum {m:g}")
            for k, m in enumerate(momenta)
        ]
    return handles


def _heat_map(settings: Sequence[Setting]) -> Figure:
    cells: dict[tuple[float, float], Setting] = {}
    for setting in reversed(settings):
        options = setting.any_run.config["optimizer"]
        cells[options["lr"], options["other_lr"]] = setting
    down, across = sorted({y for y, _ in cells}), sorted({x for _, x in cells})
    losses = [[cells[y, x].loss if (y, x) in cells else math.nan for x in across] for y in down]
    finite = [v for row in losses for v in row if math.isfinite(v)]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(down)), layout="constrained")
    axis = figure.subplots()
    low, high = min(finite, default=0.0), min(max(finite, default=1.0), _ceiling(finite))
    mesh = axis.pcolormesh(losses, cmap="viridis_r", vmin=low, vmax=high, ec="white", lw=1)
    for (y, x), setting in cells.items():
        value = setting.loss
        text = f"{value:.3f}" if math.isfinite(value) else setting.status
        dark = math.isfinite(value) and value > (low + high) / 2
        place = (across.index(x) + 0.5, down.index(y) + 0.5)
        colour = "white" if dark else "black"
        weight = "bold" if value == low else "normal"
        axis.text(*place, text, ha="center", va="center", color=colour, weight=weight)
    axis.set_xticks([k + 0.5 for k in range(len(across))], [rate(x) for x in across])
    axis.set_yticks([k + 0.5 for k in range(len(down))], [rate(y) for y in down])
    axis.set(xlabel="other_lr", ylabel="lr")
    axis.tick_params(length=0)
    figure.colorbar(mesh, ax=axis, label="loss")
    return figure


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
    figure = Figure(figsize=(8, 0.9 + 1.9 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for axis, name in zip(axes, sorted(panels), strict=False):
        _draw_bands(axis, panels[name])
        axis.set_title(name)
        handles |= {str(line.get_label()): line for line in axis.get_lines()}
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[max(0, len(panels) - columns) : len(panels)]:
        axis.set_xlabel("training step")
        axis.tick_params(labelbottom=True)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
    caption = f"{study.label}: diagnostics over time, mean over seeds, best settings."
    yield f"{study.name}_diagnostics", caption, figure
