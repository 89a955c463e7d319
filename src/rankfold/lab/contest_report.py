"""A contest as a page, CSV and a figure, and what it has left to run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import records
from .config import RunConfig
from .contest import TUNING_SEED, Contest, Losses
from .contest_results import GOAL, LEVEL, SEEDS, Entry, Result, results
from .figures import Drawn, rate, write_figures
from .report import Findings, fixed, p_value, signed, write_report
from .statistics import Paired
from .tables import write_csv
from .tuning import MOMENTA, MOST_GROWTH

_TIMED_RUNS = 8
_CHOICE = (
    "Settings were tuned on another seed, and each method has one. Intervals and p-values do not "
    "account for the number of comparisons."
)
_COLUMNS = ["method", "lr of QK", "of V", "of O", "momentum", "decay", "tried"]
_COLUMNS += ["loss", "std", "seeds"]
_COLUMNS += ["− best Muon", "p", "− AdamW", "p", "− pair", "p"]
_COLOURS = {"adamw": "#000000", "muon": "#7a4a21", "pair": "#c47f3a"}
_COLOURS |= {"ours": "#0000ff", "reference": "#8c8c8c"}
_KINDS = {"ours": "ours", "muon": "Muon", "pair": "Muon with a part of what ours have"}
_KINDS |= {"adamw": "AdamW", "reference": "ours for reference"}
_GOAL_COLOUR = "#008c00"


def write_contest(contest: Contest, root: Path, output: Path) -> list[Result]:
    """Write the page, contest.csv, the figure, and a page of the tuning runs beside it."""
    losses = Losses(root)
    found = results(contest, losses)
    tuning, finals = _method_runs(contest, losses)
    methods = {config.key: name for config, name in (*tuning, *finals)}

    def read(made: Sequence[tuple[RunConfig, str]]) -> list[records.Run]:
        return records.read_runs_of((config for config, _ in made), root)

    title = f"rankfold contest: {contest.preset}"
    write_report(read(tuning), output / "tuning", f"{title}, tuning", methods=methods)
    pictures = write_figures(dot_plot(found), output / "figures")
    tables = [(r.cell.label, _sentence(r), [_line(r, e) for e in _ranked(r)]) for r in found]
    table = output / "tables" / "contest.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    write_csv(table, _csv_lines(found))
    words = _words(contest, found)
    findings = Findings("The contest", words, _COLUMNS, tables, pictures, [table], _CHOICE)
    write_report(read(finals), output, title, findings, methods)
    return found


def _method_runs(
    contest: Contest, losses: Losses
) -> tuple[list[tuple[RunConfig, str]], list[tuple[RunConfig, str]]]:
    """The runs of tuning and of the comparison, each with the name of its method."""
    tuning, finals = [], []
    for cell in contest.cells():
        for method in contest.entries():
            wanted, choice = contest.tuning(cell, method, losses)
            tuning += [(config, method.name) for config in wanted]
            finals += [(c, method.name) for c in contest.finals(cell, method, choice)]
    return tuning, finals


def _words(contest: Contest, found: Sequence[Result]) -> list[str]:
    centres = (f"{m.name} {rate(2.0 ** m.centres[contest.preset])}" for m in contest.entries())
    return [
        f"The goal is a loss at least {GOAL} nats below the best Muon (muon, dion: each factor by "
        f"itself) with p < {LEVEL} over {SEEDS} seeds or more. {_counts(found)} The pair is Muon "
        "as seen by products, without transport of its momentum: near to ours, and so compared "
        "but not counted as Muon.",
        "Every method was tuned by the same rule, one line of settings after the other: learning "
        "rates in powers of two, half of its centre to twice it; that of value·output products "
        f"alone; momenta {', '.join(f'{m:g}' for m in MOMENTA)}; that of query·key products alone, "
        "and once more that of value·output products; and, but for metric steps, that of output "
        "weights alone and that of value weights. Where the best rate is at the end of its "
        f"line, the line grows there, by {MOST_GROWTH} rates at most. That was at "
        f"{contest.shortest:,} steps on seed {TUNING_SEED}; at longer horizons the common rate, "
        "that of value·output products, the momentum and then, but for isometries, the decay of "
        "all products, none or from e^−4 on, by which those of the highest rate would shrink to "
        f"that in a run at this rate. Centres: {', '.join(centres)}. “Tried” counts the runs of "
        "a tuning, those of the shortest horizon among them; all are on the page "
        "tuning/index.html.",
        "Rates marked * come from a tuning in which the best of a line was its last, so better "
        "ones may lie beyond, or stronger decays; a momentum marked * is the first or the last of "
        "those tried.",
        f"The losses below are of fresh seeds from {contest.first_seed} on. p-values of the tables "
        "are of two-sided paired t tests as they are; that of a verdict is multiplied by the "
        "number of our candidates, as the best of them is picked on the same seeds. Its interval "
        "is not widened for that choice, and no p-value for the number of comparisons on this "
        "page. A null is a null, not a tie.",
    ]


def _counts(found: Sequence[Result]) -> str:
    """In how many comparisons the goal is met, and how many have no verdict for what reason."""
    met, whole = sum(r.met is True for r in found), len(found)
    words = [f"It is met in {met} of {whole} comparison{'' if whole == 1 else 's'}"]
    reasons = {
        "open": "open, with runs still to be made",
        "preliminary": f"preliminary, of fewer than {SEEDS} seeds",
        "no verdict": "without a verdict",
    }
    for reason, words_of in reasons.items():
        if count := sum(r.undecided == reason for r in found):
            words.append(f"{count} {'is' if count == 1 else 'are'} {words_of}")
    return "; ".join(words) + "."


def _sentence(result: Result) -> str:
    return result.verdict[0].upper() + result.verdict[1:]


def _ranked(result: Result) -> list[Entry]:
    return sorted(result.entries, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf)


def _line(result: Result, entry: Entry) -> list[str]:
    tuned = ["–"] * 5
    if entry.choice is not None:
        setting, mark = entry.choice.setting, "" if entry.choice.interior else "*"
        tuned = [rate(2.0**k) + mark for k in (setting.qk, setting.v, setting.o)]
        end = setting.momentum in (MOMENTA[0], MOMENTA[-1])
        tuned.append(f"{setting.momentum:g}" + ("*" if end else ""))
        tuned.append(_decay(setting.decay))
    seeds = (
        f"{len(entry.losses)}"
        if len(entry.losses) == result.planned
        else (f"{len(entry.losses)} of {result.planned}")
    )
    numbers = [entry.note or fixed(entry.loss, 4), fixed(entry.spread, 4), seeds]
    for other in result.measures:
        test = entry.against(other)
        numbers += [signed(test.mean), p_value(test.p)] if test else ["–", "–"]
    return [entry.method.name, *tuned, str(entry.tried), *numbers]


def _decay(decay: int | None) -> str:
    """To what the fastest products would shrink in a run at the full rate."""
    return "none" if decay is None else f"e^−{2**decay}"


def _csv_lines(found: Sequence[Result]) -> Iterator[list[Any]]:
    yield [
        *("model", "steps", "annealing", "method", "kind", "lr_qk", "lr_v", "lr_o"),
        *("momentum", "decay"),
        *("interior", "tuning_loss", "tuning_runs", "seeds", "diverged", "loss", "std"),
        *(
            f"{what}_{n}"
            for what in ("rival", "adamw", "pair")
            for n in ("mean", "low", "high", "p")
        ),
        *("rival", "goal_met", "verdict"),
    ]
    for result in found:
        cell, rival = result.cell, result.rival
        for entry in _ranked(result):
            chosen = entry.choice
            tuned: list[Any] = [""] * 7
            if chosen is not None:
                *rates, momentum, decay = chosen.setting
                tuned = [2.0**k for k in rates]
                tuned += [momentum, "" if decay is None else 2**decay]
                tuned += [int(chosen.interior), chosen.loss]
            numbers = [entry.loss, entry.spread]
            for other in result.measures:
                test = entry.against(other)
                numbers += [test.mean, test.low, test.high, test.p] if test else [math.nan] * 4
            yield [
                *(cell.model, cell.steps, cell.annealing, entry.method.name, entry.method.kind),
                *(*tuned, entry.tried, len(entry.losses), entry.diverged),
                *(x if math.isfinite(x) else "" for x in numbers),
                rival.method.name if rival else "",
                "" if result.met is None else int(result.met),
                result.verdict,
            ]


def dot_plot(found: Sequence[Result]) -> Iterator[Drawn]:
    """A panel a cell: every method's difference to the best Muon with its interval."""
    shown = [(r, [(e, t) for e in _ranked(r) if (t := e.against(r.rival))]) for r in found]
    shown = [(result, tests) for result, tests in shown if tests]
    if not shown:
        return
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    height = 1.25 + 0.24 * max(len(tests) for _, tests in shown)
    figure = Figure(figsize=(8, 0.9 + height * rows), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.12)  # type: ignore[call-arg]
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (result, tests) in zip(panels, shown, strict=False):
        _draw_differences(axis, result, tests)
        # The model, and below it the rest: in one line it is wider than a panel of two.
        axis.set_title(result.cell.label.replace(", ", "\n", 1), fontsize=8.5)
    for axis in panels[len(shown) :]:
        axis.set_axis_off()
    kinds = {entry.method.kind for _, tests in shown for entry, _ in tests}
    handles = [
        Line2D([], [], color=_COLOURS[kind], ls="", marker="o", ms=4, label=words)
        for kind, words in _KINDS.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], color=_GOAL_COLOUR, lw=0.8, ls="--", label=f"goal, −{GOAL} nats"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = (
        "Differences to the best Muon, paired by seed, with 95% intervals. The dashed line is the "
        f"goal, {GOAL} nats below it."
    )
    yield "contest", caption, figure


def _draw_differences(axis: Axes, result: Result, tests: Sequence[tuple[Entry, Paired]]) -> None:
    for place, (entry, test) in enumerate(tests):
        low, high = (test.mean - test.low, test.high - test.mean)
        interval = [[low], [high]] if test.count > 1 else None
        colour = _COLOURS[entry.method.kind]
        axis.errorbar(test.mean, place, xerr=interval, fmt="o", color=colour, ms=4, capsize=2)
    axis.axvline(0, color="#666666", lw=0.8)
    axis.axvline(-GOAL, color=_GOAL_COLOUR, lw=0.8, ls="--")
    axis.set_yticks(range(len(tests)), [entry.method.name for entry, _ in tests])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(tests) - 0.4, -0.6)  # the first above, and room beside first and last
    rival = result.rival.method.name if result.rival else ""
    axis.set_xlabel(f"loss − {rival}, nats")
    axis.grid(visible=True, axis="x")


# Before it is run --------------------------------------------------------------------------------


def standing(contest: Contest, root: Path) -> str:
    """What there is to run, cell by cell, and about how long it takes."""
    losses = Losses(root)
    lines, whole = [], 0.0
    for cell in contest.cells():
        choices = [contest.tuning(cell, method, losses)[1] for method in contest.entries()]
        lost = sum(choice is not None and math.isinf(choice.loss) for choice in choices)
        known = [c for c in contest.tuning_runs(cell, losses) if c.training.steps == cell.steps]
        tuned = sum(losses.of(c) is not None for c in known)
        finals = contest.final_runs(cell, losses)
        ended = sum(losses.of(c) is not None for c in finals)
        planned = contest.seeds * (len(choices) - lost)
        left = len(known) - tuned + planned - ended
        words = [f"tuning {tuned} of {len(known)} runs known so far"]
        words.append(f"comparison {ended} of {planned}")
        seconds = _seconds_a_step([*known, *finals], root, losses)
        if seconds is None:
            words.append(f"{left * cell.steps:,} steps left")
        else:
            whole += left * cell.steps * seconds
            time = f"about {left * cell.steps * seconds / 60:.0f} min left"
            words.append(f"{time} at {1000 * seconds:.1f} ms a step")
        lines.append(f"{cell.label}: {', '.join(words)}")
        lines += [f"  {records.status_of(root / c.key):>9}  {c.key}" for c in (*known, *finals)]
    if whole:
        lines.append(f"about {whole / 60:.0f} min in all, of cells that have been timed")
    return "\n".join(lines)


def _seconds_a_step(configs: Sequence[RunConfig], root: Path, losses: Losses) -> float | None:
    """The median of a few runs that have ended; a step alone, without start and validation."""
    ended = [config for config in configs if losses.of(config) is not None][:_TIMED_RUNS]
    values = [v for r in records.read_runs_of(ended, root) for v in r.step_seconds.values]
    return median(values) if values else None
