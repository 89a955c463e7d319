"""The report's figures of final losses against learning rates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUP

from .figures import Drawn, in_order, label, rate, style
from .statistics import ADAMW, Setting, Study

# Final losses are told apart up to so many times the median's distance from the best, and in
# nats at least.
_WINDOW, _LEAST_WINDOW, _MARGIN = 3.0, 0.2, 0.08
_MOST_ACROSS = 12  # columns of a heat map
_DASHES = {"": "-", "metric": "-", "none": "--", "spectral": "-."}
_MARKERS = "osDP*X"  # and no triangles, which stand for losses beyond the scale
_Lines = dict[
    tuple[str, float, str], dict[float, Setting]
]  # by name, momentum, normalization; rate


def rate_figures(study: Study) -> Iterator[Drawn]:
    """Final loss against the learning rates, where several were run."""
    lines: _Lines = {}
    for setting in reversed(study.preferred):  # from the last: the best of a point stays
        if setting.losses and setting.options.get("optimizer.lr", 0) > 0:  # as logarithms are of
            options = setting.options
            normalize = options.get("optimizer.normalize", "")
            key = (setting.name, options["optimizer.momentum"], normalize)
            lines.setdefault(key, {})[options["optimizer.lr"]] = setting
    if any(len(points) > 1 for points in lines.values()):
        caption = f"{study.label}: final validation loss against the learning rate, mean over seeds"
        caption += " ± one standard deviation; at each point the best of all other options."
        if any(s.losses and s.options.get("optimizer.lr") == 0 for s in study.settings):
            caption += " A rate of 0 has no place on the axis."
        figure, cut_off = _rate_figure(lines)
        caption += " Triangles at the upper edge stand for losses beyond it." if cut_off else ""
        yield f"{study.name}_rates", caption, figure
    grid = [s for s in study.preferred if s.optimizer == ADAMW]
    if _is_grid(
        [(s.any_run.option("optimizer.lr"), s.any_run.option("optimizer.other_lr")) for s in grid]
    ):
        caption = f"{study.label}, AdamW: final validation loss on the grid of learning rates."
        yield f"{study.name}_adamw_grid", caption, _heat_map(grid)


def _is_grid(pairs: Iterable[tuple[float, float]]) -> bool:
    """Whether pairs of rates fill a table that can be read, as those of a random search do not."""
    pairs = set(pairs)
    down, across = ({pair[k] for pair in pairs} for k in (0, 1))
    readable = 1 < len(across) <= _MOST_ACROSS
    return readable and 2 * len(pairs) >= len(down) * len(across)


def rate_ticks(rates: Iterable[float]) -> list[float]:
    """The rates themselves where their labels have room, else powers of two among them."""
    shown = sorted(x for x in rates if x > 0)  # a logarithm shows no others
    places = [math.log2(x) for x in shown]
    if len(places) < 2:
        return shown
    room = (places[-1] - places[0]) / (20 if all(p == int(p) for p in places) else 9)
    if all(y - x >= room for x, y in itertools.pairwise(places)):
        return shown
    first, last = math.floor(places[0]), math.ceil(places[-1])
    return [2.0**k for k in range(first, last + 1, math.ceil((last - first) / 12))]


def _ceiling(losses: Iterable[float]) -> float:
    """How far up losses are told apart: a rate that is far too high shall not flatten the rest."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return math.inf
    best = min(finite)
    return best + max(_LEAST_WINDOW, _WINDOW * (statistics.median(finite) - best))


def _rate_figure(lines: _Lines) -> tuple[Figure, bool]:
    """The figure, and whether points are cut off."""
    losses = [setting.loss for points in lines.values() for setting in points.values()]
    ceiling = _ceiling(losses)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    momenta = sorted({momentum for _, momentum, _ in lines})
    for key in sorted(lines):
        name, momentum, normalize = key
        points, colour = sorted(lines[key].items()), style(name)[0]
        axis.errorbar(
            [x for x, _ in points],
            [s.loss for _, s in points],
            yerr=[_shown_spread(s, ceiling) for _, s in points],
            color=colour,
            linestyle=_DASHES.get(normalize, ":"),
            marker=_MARKERS[momenta.index(momentum) % len(_MARKERS)],
            markersize=5,
            lw=1.3,
            elinewidth=0.8,
            capsize=2,
        )
        above = [x for x, setting in points if setting.loss > ceiling]
        if above:  # marks that are whole, though at the edge
            at = [ceiling] * len(above)
            mark = axis.plot(above, at, ls="", marker=CARETUP, color=colour, ms=8, clip_on=False)
            mark[0].set_in_layout(False)
    cut_off = any(loss > ceiling for loss in losses)
    if cut_off:
        floor = min(loss for loss in losses if math.isfinite(loss))
        axis.set_ylim(floor - _MARGIN * (ceiling - floor), ceiling)
    ticks = rate_ticks({x for points in lines.values() for x in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [rate(x) for x in ticks])
    axis.minorticks_off()
    axis.set(xlabel="learning rate", ylabel="final validation loss")
    axis.grid(visible=True)
    handles = [
        Line2D([], [], color=style(n)[0], lw=2, label=label(n))
        for n in in_order(list({name for name, _, _ in lines}))
    ]
    handles += _keys_of_styles(momenta, sorted({n for _, _, n in lines if n}))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure, cut_off


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
            Line2D(
                [],
                [],
                color="#666666",
                ls="",
                marker=_MARKERS[k % len(_MARKERS)],
                label=f"momentum {m:g}",
            )
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
