"""Runs put together: seeds into settings, settings into studies, with means and paired tests.

A *setting* is a configuration without its seed. A *study* holds the settings that may be compared:
those of one model, data, number of steps and annealing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from types import MappingProxyType
from typing import Any

from ..defaults import RECOMMENDED_NAME
from .config import CHOSEN, OPTIONS_OF, WITHOUT_INFLUENCE, in_effect
from .records import Curve, Run

ADAMW = "adamw"
LAST_VALIDATIONS = 5
_CONFIDENCE = 0.95
_NO_METHODS: Mapping[str, str] = MappingProxyType({})
_NOT_OF_A_SETTING = {("training", "seed"), *WITHOUT_INFLUENCE}

# Numbers -----------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with n - 1, NaN of fewer than two."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function I_x(a, b)."""
    if not 0 < x < 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / (a * _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d₁x / (1 + d₂x / (1 + ...)), evaluated from the far end."""
    terms = 200 + 2 * math.isqrt(math.ceil(max(a, b)))
    value = 1.0
    for k in range(terms, 0, -1):
        m, odd = divmod(k, 2)
        if odd:
            term = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + term * x / value
    return value


def student_p(t: float, freedom: int) -> float:
    """Two-sided p-value: the chance that |T| exceeds |t|."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@cache
def student_quantile(freedom: int, confidence: float = _CONFIDENCE) -> float:
    """The t that |T| stays below with the given chance."""
    low, high = 0.0, 1.0
    while student_p(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_p(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Paired:
    """Differences over common seeds: mean, 95% interval, p-value. NaN where there are too few."""

    count: int
    mean: float
    low: float
    high: float
    p: float


def paired(differences: Sequence[float]) -> Paired:
    """Two-sided paired t test."""
    count, centre, spread = len(differences), mean(differences), deviation(differences)
    if count < 2:
        return Paired(count, centre, math.nan, math.nan, math.nan)
    if spread == 0:
        return Paired(count, centre, centre, centre, 1.0 if centre == 0 else 0.0)
    error = spread / math.sqrt(count)
    half = student_quantile(count - 1) * error
    return Paired(count, centre, centre - half, centre + half, student_p(centre / error, count - 1))


# Curves ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """A curve's mean over seeds and its deviation, NaN with one seed."""

    steps: list[int]
    means: list[float]
    deviations: list[float]


def band(curves: Sequence[Curve]) -> Band:
    """Over the steps that all curves have."""
    tables = [dict(zip(c.steps, c.values, strict=True)) for c in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    columns = [[table[step] for table in tables] for step in steps]
    return Band(steps, [mean(c) for c in columns], [deviation(c) for c in columns])


def thinned(curve: Curve, every: int) -> Curve:
    """The first value of each stretch of ``every`` steps."""
    kept = {step // every: k for k, step in reversed(list(enumerate(curve.steps)))}
    places = sorted(kept.values())
    return Curve([curve.steps[k] for k in places], [curve.values[k] for k in places])


def difference(curve: Curve, other: Curve) -> Curve:
    """Over the steps that both have."""
    values = dict(zip(other.steps, other.values, strict=True))
    pairs = zip(curve.steps, curve.values, strict=True)
    both = [(step, value - values[step]) for step, value in pairs if step in values]
    return Curve([step for step, _ in both], [value for _, value in both])


# Settings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed only, and the method they are of if they were given one."""

    runs: Mapping[int, Run]
    method: str = ""

    @property
    def any_run(self) -> Run:
        """One of them, for what they have in common."""
        return next(iter(self.runs.values()))

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return str(self.any_run.option("optimizer.name"))

    @property
    def name(self) -> str:
        """What it is compared under: its method, else its optimizer."""
        return self.method or self.optimizer

    @cached_property
    def options(self) -> dict[str, Any]:
        """The configuration as it took effect, flat, without the seed and what does not apply."""
        return {
            name: in_effect(name, value, self.optimizer)
            for name, value in flat_options(self.any_run).items()
            if _applies(name, self.optimizer)
        }

    @cached_property
    def finished(self) -> dict[int, Run]:
        """The runs that numbers are made of."""
        return {
            seed: run
            for seed, run in self.runs.items()
            if run.status == "finished" and math.isfinite(final_loss(run))
        }

    @cached_property
    def diverged(self) -> int:
        """How many runs diverged, those that finished without a finite loss among them."""
        ended = [r for r in self.runs.values() if r.status in ("finished", "diverged")]
        return len(ended) - len(self.finished)

    @cached_property
    def status(self) -> str:
        """ "finished" if it has a loss. A diverged seed spoils all: others alone would flatter."""
        if self.diverged:
            return "diverged"
        if self.finished:
            return "finished"
        return "running" if any(r.status == "running" for r in self.runs.values()) else "failed"

    @cached_property
    def losses(self) -> dict[int, float]:
        """Mean of the last validations, by seed."""
        if self.status != "finished":
            return {}
        return {seed: final_loss(run) for seed, run in self.finished.items()}

    @property
    def loss(self) -> float:
        """Mean over seeds, NaN if there is none."""
        return mean(list(self.losses.values()))

    @property
    def spread(self) -> float:
        """Deviation over seeds."""
        return deviation(list(self.losses.values()))

    @cached_property
    def step_seconds(self) -> float:
        """Median over the steps of all seeds."""
        return self._median_seconds(lambda run: run.step_seconds)

    @cached_property
    def optimizer_share(self) -> float:
        """The optimizer's part of the step, by medians."""
        seconds = self._median_seconds(lambda run: run.optimizer_seconds)
        return seconds / self.step_seconds if self.step_seconds else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Trained on, at the median step."""
        seconds = self.step_seconds
        return self.any_run.tokens_a_step / seconds if seconds else math.nan

    def curves(self, which: Callable[[Run], Curve]) -> dict[int, Curve]:
        """A curve of each finished run, by seed."""
        return {seed: which(run) for seed, run in self.finished.items()}

    def _median_seconds(self, which: Callable[[Run], Curve]) -> float:
        values = [v for run in self.finished.values() for v in which(run).values]
        return median(values) if values else math.nan


def final_loss(run: Run) -> float:
    """The mean of the last validations."""
    return run.validation.last_mean(LAST_VALIDATIONS)


def flat_options(run: Run) -> dict[str, Any]:
    """``{"optimizer.lr": ...}`` of all but the seed and what leaves the results as they are."""
    return {
        f"{group}.{name}": value
        for group, entries in run.config.items()
        for name, value in entries.items()
        if (group, name) not in _NOT_OF_A_SETTING
    }


def _applies(option: str, optimizer: str) -> bool:
    group, _, name = option.partition(".")
    if group != "optimizer":
        return True
    owned = OPTIONS_OF.get(optimizer)  # a later version may have others
    chosen = optimizer == RECOMMENDED_NAME and name in CHOSEN
    return owned is None or name in owned or chosen


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of options that are not the same wherever they apply, in the order of first mention."""
    names = dict.fromkeys(name for entries in options for name in entries)
    return [name for name in names if len({_text(e[name]) for e in options if name in e}) > 1]


def settings_of(runs: Iterable[Run], methods: Mapping[str, str] = _NO_METHODS) -> list[Setting]:
    """Seeds put together. Of a seed run twice the finished one counts, else the later.

    ``methods`` are names by keys of runs.
    """
    found: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        key = (_text(flat_options(run)), methods.get(run.key, ""))
        seeds = found.setdefault(key, {})
        seed = run.config["training"]["seed"]
        if seed not in seeds or seeds[seed].status != "finished" or run.status == "finished":
            seeds[seed] = run
    return [Setting(dict(sorted(found[key].items())), key[1]) for key in sorted(found)]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# Studies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """Settings that may be compared, sorted by loss, those without one last."""

    label: str
    name: str  # in file names
    settings: Sequence[Setting]

    @cached_property
    def preferred(self) -> list[Setting]:
        """The settings with the most seeds first, and of as many the lowest mean loss.

        A lucky seed alone would beat means over several, and leave nothing to pair them with.
        """
        return sorted(self.settings, key=lambda s: -len(s.losses))  # which leaves the rest in order

    @cached_property
    def best(self) -> dict[str, Setting]:
        """The preferred setting under each name that has one with a loss."""
        found: dict[str, Setting] = {}
        for setting in self.preferred:
            if setting.losses:
                found.setdefault(setting.name, setting)
        return found

    @property
    def baseline(self) -> Setting | None:
        """AdamW at its best."""
        return self.best.get(ADAMW)

    def against_baseline(self, setting: Setting) -> Paired | None:
        """The paired difference of losses, None without a baseline or a common seed."""
        if self.baseline is None or self.baseline is setting:
            return None
        common = [seed for seed in setting.losses if seed in self.baseline.losses]
        if not common:
            return None
        return paired([setting.losses[seed] - self.baseline.losses[seed] for seed in common])


def studies_of(runs: Iterable[Run], methods: Mapping[str, str] = _NO_METHODS) -> list[Study]:
    """MHA before GQA, many steps before few; ``methods`` as in `settings_of`."""
    groups: dict[tuple[bool, int, str], list[Setting]] = {}
    for setting in settings_of(runs, methods):
        config = setting.any_run.config
        model, training = config["model"], config["training"]
        rest = _text([model, config["data"], training["annealing"]])
        key = (model["heads"] != model["kv_heads"], -training["steps"], rest)
        groups.setdefault(key, []).append(setting)
    studies = []
    for kind, word in ((False, "MHA"), (True, "GQA")):
        alike = [groups[key] for key in sorted(groups) if key[0] is kind]
        for k, (settings, tail) in enumerate(zip(alike, _tails(alike), strict=True)):
            slug = re.sub(r"[^a-z0-9]+", "_", f"{word}{tail if k else ''}".lower()).strip("_")
            ranked = sorted(settings, key=lambda s: (not s.losses, s.loss if s.losses else 0.0))
            studies.append(Study(word + tail, slug, ranked))
    return studies


def _tails(groups: Sequence[Sequence[Setting]]) -> list[str]:
    """What tells groups apart: nothing if there is one."""
    shared = [
        {name: value for name, value in group[0].options.items() if _tells_apart(name)}
        for group in groups
    ]
    names = differing(shared)
    return ["".join(f", {n.split('.')[1]} {entry.get(n)}" for n in names) for entry in shared]


def _tells_apart(option: str) -> bool:
    whole = ("training.steps", "training.annealing")
    return option.startswith(("model.", "data.")) or option in whole
