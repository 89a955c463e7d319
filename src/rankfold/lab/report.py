"""Runs as a page that opens offline, with figures and tables beside it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from . import figures
from .figures import Picture, label, rate, write_figures
from .rate_figures import rate_figures
from .records import Run, read_object, write_json
from .statistics import (
    LAST_VALIDATIONS,
    Setting,
    Study,
    studies_of,
)
from .tables import shown_options, write_tables

_TEMPLATE = Path(__file__).with_name("report.html")
_WRITTEN = ".report.json"
_STATUSES = ("finished", "running", "diverged", "failed")
# How settings were chosen, where no findings say otherwise.
_CHOSEN_HERE = (
    "Best settings were chosen by the losses shown here. Intervals and p-values do not account for "
    "that choice, nor for the number of comparisons."
)
_MANY_SETTINGS = 3  # of one optimizer, and the main table shows the best alone
_NOTHING = "–"
_MODEL_FACTS = ("layers", "heads", "kv_heads", "width", "head_width")
_DATA_FACTS = ("source", "tokenizer", "context", "batch")
_NUMBERS = {
    "loss": "loss",
    "deviation": "std",
    "seeds": "seeds",
    "difference": "− AdamW",
    "interval": "95% interval",
    "p": "p",
    "ms": "ms a step",
    "share": "opt. share",
    "tokens": "tokens/s",
}


@dataclass(frozen=True)
class Row:
    """A line of a summary table, in words."""

    optimizer: str
    options: list[str]
    numbers: list[str]
    status: str  # in place of numbers, "" if there are some
    best_of: int  # settings of its optimizer if it is the best of several, else 0
    baseline: bool


@dataclass(frozen=True)
class Table:
    """A study's settings: the main ones, and all of them where the main ones are fewer."""

    title: str
    options: list[str]
    main: list[Row]
    all: list[Row]


@dataclass(frozen=True)
class Findings:
    """What a page says before all else: sentences, tables with a sentence each, figures."""

    heading: str
    words: list[str]
    columns: list[str]
    tables: list[tuple[str, str, list[list[str]]]]  # title, sentence, rows
    pictures: list[Picture]
    files: list[Path]  # beside the pictures, all within the page's folders
    choice: str  # how settings were chosen that the page compares, and what that is to tests


def write_report(
    runs: list[Run],
    output: Path,
    title: str = "rankfold report",
    findings: Findings | None = None,
    methods: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write index.html, figures and tables into a folder; return what was written.

    Figures and tables that an earlier report wrote there, and this one did not, are removed.
    ``methods`` are names by keys of runs, under which they are compared in place of optimizers.
    """
    runs = sorted(runs, key=lambda run: (run.key, str(run.folder)))
    studies = studies_of(runs, methods or {})
    output.mkdir(parents=True, exist_ok=True)
    sections = _draw_sections(studies, output / "figures", _shared_times(runs))
    tables = write_tables(runs, studies, output / "tables")
    page = output / "index.html"
    page.write_text(_page(title, runs, studies, sections, findings), encoding="utf-8")
    drawn = [path for _, _, pictures in sections for p in pictures for path in p.paths]
    others = [path for p in findings.pictures for path in p.paths] if findings else []
    others += findings.files if findings else []
    kept = _remove_leftovers(output, [*drawn, *tables, *others])
    return [page, *drawn, *tables, kept]


def _remove_leftovers(output: Path, written: Sequence[Path]) -> Path:
    """Remove what the last report wrote besides, and leave a list for the next one.

    The list is how files of reports are told from others that somebody put beside them.
    """
    kept, names = output / _WRITTEN, sorted(p.relative_to(output).as_posix() for p in written)
    for name in read_object(kept).get("files", []):
        folder, _, file = str(name).partition("/")
        old = output / folder / file
        ours = folder in ("figures", "tables") and file == old.name and old.is_file()
        if ours and name not in names:
            old.unlink()
    write_json(kept, {"files": names})
    return kept


# The page ----------------------------------------------------------------------------------------


def _page(
    title: str,
    runs: Sequence[Run],
    studies: Sequence[Study],
    sections: Sequence[tuple[str, str, list[Picture]]],
    findings: Findings | None,
) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    counts = Counter(run.status for run in runs)
    return template.render(
        title=title,
        runs=len(runs),
        settings=sum(len(study.settings) for study in studies),
        seeds=len({run.option("training.seed") for run in runs}),
        statuses=[(status, counts[status]) for status in _STATUSES if counts[status]],
        studies=[_study_facts(study) for study in studies],
        study_columns=["model", "runs", *map(_plain, _MODEL_FACTS), *_DATA_FACTS, "steps"],
        machines=Counter(_machine(run) for run in runs if run.machine).most_common(),
        choice=findings.choice if findings else _CHOSEN_HERE,
        shared_times=_shared_times(runs),
        unfinished=_unfinished(runs),
        columns=list(_NUMBERS.values()),
        summaries=[_table(study) for study in studies],
        last=LAST_VALIDATIONS,
        sections=sections,
        findings=findings,
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _study_facts(study: Study) -> list[str]:
    config = study.settings[0].any_run.config
    count = sum(len(setting.runs) for setting in study.settings)
    facts = [config["model"].get(name, _NOTHING) for name in _MODEL_FACTS]
    facts += [config["data"].get(name, _NOTHING) for name in _DATA_FACTS]
    return [study.label, *map(str, (count, *facts, config["training"]["steps"]))]


def _machine(run: Run) -> str:
    known = dict(run.machine)
    words = [known.pop("device", ""), known.pop("platform", "")]
    return ", ".join(word for word in (*words, *(f"{k} {v}" for k, v in known.items())) if word)


def _shared_times(runs: Sequence[Run]) -> str:
    """What to know about the times of runs that were not alone, "" if all were."""
    most, count = max((r.workers for r in runs), default=1), sum(r.workers > 1 for r in runs)
    if most == 1:
        return ""
    return (
        f"{count} of {len(runs)} runs were made up to {most} at a time: their times are those of "
        "a shared device, longer than of a run alone."
    )


def _unfinished(runs: Sequence[Run]) -> list[list[str]]:
    """Status, message, run and how far it came."""
    lines = []
    for status in _STATUSES[1:]:
        for run in runs:
            if run.status == status:
                reached = max([0, *run.training.steps, *run.validation.steps])
                steps = f"{reached} of {run.option('training.steps')}"
                lines.append([status, run.key, steps, run.message])
    return lines


# The summary -------------------------------------------------------------------------------------


def _table(study: Study) -> Table:
    names = shown_options(study.settings)
    counts = Counter(setting.name for setting in study.settings)
    shown: dict[str, Setting] = {}
    for setting in study.preferred:
        shown.setdefault(setting.name, setting)
    main = [
        setting
        for setting in study.settings
        if counts[setting.name] <= _MANY_SETTINGS or setting is shown[setting.name]
    ]
    everything = study.settings if len(main) < len(study.settings) else []
    short = [name.split(".")[1] for name in names]
    titles = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]
    return Table(
        study.label,
        list(map(_plain, titles)),
        [_row(study, setting, names) for setting in main],
        [_row(study, setting, names) for setting in everything],
    )


def _row(study: Study, setting: Setting, names: Sequence[str]) -> Row:
    rivals = sum(other.name == setting.name for other in study.settings)
    return Row(
        label(setting.name),
        [_option(n, setting.options.get(n)) for n in names],
        _numbers(study, setting),
        _status(setting),
        rivals if rivals > 1 and study.best.get(setting.name) is setting else 0,
        study.baseline is setting,
    )


def _status(setting: Setting) -> str:
    if setting.losses:
        return ""
    if len(setting.runs) == 1:
        return setting.status
    counts = Counter(run.status for run in setting.runs.values())
    count = setting.diverged if setting.status == "diverged" else counts[setting.status]
    return f"{setting.status} ({count} of {len(setting.runs)} seeds)"


def _option(name: str, value: Any) -> str:
    if value is None or value == "":
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("lr"):
        return rate(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(study: Study, setting: Setting) -> list[str]:
    paired = study.against_baseline(setting)
    seeds = str(len(setting.losses))
    if len(setting.losses) < len(setting.runs):
        seeds += f" of {len(setting.runs)}"
    tested = [_NOTHING] * 3
    if paired is not None:
        interval = f"{signed(paired.low)} to {signed(paired.high)}"
        tested = [signed(paired.mean), interval, p_value(paired.p)]
        if paired.count < 2:
            tested[1] = _NOTHING
        if paired.count < len(setting.losses):
            tested[0] += f" ({paired.count} common)"
    return [
        fixed(setting.loss, 4),
        fixed(setting.spread, 4),
        seeds,
        *tested,
        fixed(1000 * setting.step_seconds, 1),
        f"{fixed(100 * setting.optimizer_share, 1)}%".replace(f"{_NOTHING}%", _NOTHING),
        _thousands(setting.tokens_per_second),
    ]


def fixed(value: float, digits: int) -> str:
    """A number, or a dash if there is none."""
    return f"{value:.{digits}f}" if math.isfinite(value) else _NOTHING


def signed(value: float) -> str:
    """A difference with its sign."""
    return f"{value:+.4f}".replace("-", "−") if math.isfinite(value) else _NOTHING


def p_value(value: float) -> str:
    """As it is reported."""
    return "<0.001" if value < 0.001 else fixed(value, 3)


def _thousands(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if math.isfinite(value) else _NOTHING


# Figures -----------------------------------------------------------------------------------------


def _draw_sections(
    studies: Sequence[Study], folder: Path, about_times: str
) -> list[tuple[str, str, list[Picture]]]:
    """Heading, a sentence, figures; only of what there is."""
    kinds = (
        (
            "Loss",
            "The best setting of each optimizer: the lowest mean loss of those with the most "
            f"seeds. Training loss is sampled every {figures.TRAINING_EVERY} steps.",
            figures.loss_figures,
        ),
        ("Learning rates", "Diverged settings have no point.", rate_figures),
        (
            "Time",
            f"Medians over the steps of all seeds. {about_times}".rstrip(),
            figures.time_figures,
        ),
        ("Diagnostics", "What the runs measured on the way.", figures.diagnostic_figures),
    )
    sections = []
    for heading, words, draw in kinds:
        drawn = itertools.chain.from_iterable(map(draw, studies))
        pictures = write_figures(drawn, folder)
        if pictures:
            sections.append((heading, words, pictures))
    return sections
