"""The contest: methods tuned alike, then compared on seeds that no tuning has seen.

A *cell* is one model, number of steps and annealing. In each, for every method by the same rule:

1. At the shortest horizon, one line of settings after the other, each through the best so far: the
   learning rate of all products, in powers of two from the method's centre; that of value·output
   products alone; the momentum; then, as another momentum wants other rates, that of query·key
   products and once more that of value·output ones; and in these that of output weights alone, and
   of value weights. Where the best rate is the first or the last of its line, the line grows by one
   rate at that end, until it is neither or has grown four times.
2. At a longer horizon the best rates and half of them are run, and that line grows by the same
   rule; likewise the rate of value·output products; then the momentum; and, but for isometries,
   the decay of products, none or one of a line that grows to stronger ones. All else stays.
3. The best setting is run on the seeds from 0 on, or from another that was chosen beforehand.

What to run next follows from the losses on disk alone, so that a contest cut off anywhere goes on
where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..geometries import GEOMETRIES, is_isometry
from . import records
from .config import RunConfig, preset
from .statistics import final_loss
from .sweep import More, Outcome
from .tuning import LINES, LONGER_LINES, PRODUCT_LINES, UNDECAYED_LINES, Line, Setting

TUNING_SEED = 100
_MOMENTUM = 0.9  # until it is tuned


@dataclass(frozen=True)
class Method:
    """An entry of the contest: learning rates, momentum and decay are all that is tuned.

    ``kind`` is "adamw", "muon" (what is to be beaten), "pair" (Muon with a part of what ours have,
    beside them), "ours" or "reference" (ours, but no candidate). ``centres`` are powers of two, by
    preset.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    centres: Mapping[str, int]

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is tuned at the shortest horizon.

        A metric step has one length for both factors of a product, so that they have one rate.
        """
        return PRODUCT_LINES if self.options.get("optimizer.normalize") == "metric" else LINES

    @property
    def longer_lines(self) -> tuple[Line, ...]:
        """What is tuned at longer horizons."""
        name = self.options["optimizer.name"]
        isometry = name in GEOMETRIES and is_isometry(name)
        return UNDECAYED_LINES if isometry else LONGER_LINES


def _rival(name: str, kind: str, paper: int, tiny: int) -> Method:
    return Method(name, kind, {"optimizer.name": name}, {"paper": paper, "tiny": tiny})


def _whitened(geometry: str) -> Method:
    options = {
        "optimizer.name": geometry,
        "optimizer.normalize": "whitened",
        "optimizer.nesterov": True,
    }
    return Method(geometry, "ours", options, {"paper": -7, "tiny": -5})


def _changed(method: Method, suffix: str, kind: str, **options: Any) -> Method:
    """Another entry, with these options of the optimizer besides."""
    named = {f"optimizer.{name}": value for name, value in options.items()}
    return replace(
        method, name=f"{method.name}-{suffix}", kind=kind, options={**method.options, **named}
    )


def _metric(geometry: str) -> Method:
    options = {"optimizer.name": geometry, "optimizer.normalize": "metric"}
    return Method(f"{geometry}-metric", "reference", options, {"paper": -6, "tiny": -4})


# Steps that grow with the root of a product's size, as Muon's on factors do, and that go past
# singular values and rows of one size.
_GROWTH = 0.5
_TILTED = {"tilt": 0.25, "row_balance": 0.5}
_TILTED_QUOTIENT = _changed(
    _whitened("fixed-quotient"),
    "tilted",
    "ours",
    growth=_GROWTH,
    momentum_form="unit-smoothing",
    **_TILTED,
)

# In the order in which they are run.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            _rival("muon", "muon", paper=-8, tiny=-5),
            _whitened("fixed-quotient"),
            _changed(_whitened("fixed-quotient"), "growing", "ours", growth=_GROWTH),
            _TILTED_QUOTIENT,
            _changed(_TILTED_QUOTIENT, "vo", "ours", tilted_products="vo"),
            _changed(_rival("muon", "muon", paper=-8, tiny=-5), "tilted", "pair", **_TILTED),
            _rival("adamw", "adamw", paper=-13, tiny=-8),
            _rival("whitened", "pair", paper=-7, tiny=-5),
            _rival("dion", "muon", paper=-8, tiny=-5),
            _whitened("fixed-embedded"),
            _whitened("isometry-quotient"),
            _whitened("isometry-embedded"),
            _metric("fixed-embedded"),
            _metric("isometry-quotient"),
        )
    }
)

# What a model adds to the preset's name, and its options.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "mha": ("", {}),
        "gqa": ("-gqa", {}),
        "rope": ("", {"model.rope": True, "model.qk_norm": True}),
    }
)


@dataclass(frozen=True)
class Setup:
    """What a preset brings along: options of every run, and what is run where nothing is said."""

    options: Mapping[str, Any]
    methods: tuple[str, ...]
    models: tuple[str, ...]
    steps: tuple[int, ...]
    seeds: int
    annealings: tuple[str, ...]


_ALIKE = {"model.final_norm": True, "optimizer.masters": True, "optimizer.weight_decay": 0.0}
SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "paper": Setup(
            {
                **_ALIKE,
                "optimizer.other_lr": 2.0**-10,
                # More text in the last validations than the paper takes, for less noise.
                "training.validate_every": 20,
                "training.validation_batches": 4,
                "training.compile": True,
                "training.graph": True,
                # A checkpoint is written for two seconds, and a long run takes fifty.
                "training.checkpoint_every": 5000,
            },
            methods=tuple(METHODS),
            models=tuple(MODELS),
            steps=(1000, 10000),
            seeds=8,
            annealings=("none", "linear"),
        ),
        "tiny": Setup(
            {**_ALIKE, "training.validation_batches": 2},
            methods=("muon", "fixed-quotient", "adamw", "dion"),
            models=("mha", "gqa"),
            steps=(40,),
            seeds=3,
            annealings=("none",),
        ),
    }
)


@dataclass(frozen=True)
class Cell:
    """What is compared with nothing outside of it."""

    model: str
    steps: int
    annealing: str

    @property
    def label(self) -> str:
        """To readers."""
        words = {"mha": "MHA", "gqa": "GQA", "rope": "MHA with RoPE and QK-norm"}
        annealing = "no annealing" if self.annealing == "none" else f"{self.annealing} annealing"
        return f"{words[self.model]}, {self.steps:,} steps, {annealing}"


@dataclass(frozen=True)
class Choice:
    """A tuned setting and its loss on the tuning seed.

    ``interior`` says whether worse rates were seen on both sides of it, line by line, those of the
    shortest horizon among them.
    """

    setting: Setting
    loss: float
    interior: bool


class Losses:
    """Final losses of the runs in a folder: infinite where one diverged, None where none ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, float] = {}

    def of(self, config: RunConfig) -> float | None:
        """Of one run."""
        key = config.key
        if key not in self._known:
            status = records.status_of(self.root / key)
            if status not in ("finished", "diverged"):
                return None
            loss = (
                final_loss(records.read_run(self.root / key)) if status == "finished" else math.inf
            )
            self._known[key] = loss if math.isfinite(loss) else math.inf
        return self._known[key]


@dataclass(frozen=True)
class Contest:
    """Who takes part in what; ``extra`` options are those of every run."""

    preset: str
    methods: tuple[str, ...]
    models: tuple[str, ...]
    steps: tuple[int, ...]
    seeds: int
    annealings: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    first_seed: int = 0
    # Looked up thousands of times, for the losses on disk.
    _made: dict[tuple[Any, ...], RunConfig] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.preset not in SETUPS:
            raise ValueError(f"a contest has preset {' or '.join(SETUPS)}, not {self.preset!r}")
        for what, given, known in (
            ("method", self.methods, METHODS),
            ("model", self.models, MODELS),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
        decided = {"training.steps", "training.annealing", "training.seed"}
        decided |= Setting(0, 0, 0, 0.0).options(1).keys() | MODELS["rope"][1].keys()
        decided |= {name for method in METHODS.values() for name in method.options}
        for name in sorted(decided & self.extra.keys()):
            raise ValueError(f"{name} is the contest's to choose, and cannot be set")
        if self.seeds < 1 or self.first_seed < 0 or self.final_seeds[-1] >= TUNING_SEED:
            raise ValueError(
                f"a contest has seeds from 0 to {TUNING_SEED - 1}, one at least, not "
                f"{self.seeds} from {self.first_seed} on"
            )
        for cell in self.cells():
            self._base(cell)

    def cells(self) -> list[Cell]:
        """Short ones first, and the models in turn."""
        return [
            Cell(model, steps, annealing)
            for steps in sorted(self.steps)
            for annealing in self.annealings
            for model in self.models
        ]

    def entries(self) -> list[Method]:
        """The methods that take part, in the order of `METHODS`."""
        return [METHODS[name] for name in METHODS if name in self.methods]

    @property
    def final_seeds(self) -> range:
        """Those of the comparison."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def shortest(self) -> int:
        """The steps of the full tuning, the same whichever horizons are asked for."""
        return min(*self.steps, min(SETUPS[self.preset].steps))

    def _base(self, cell: Cell) -> RunConfig:
        suffix, options = MODELS[cell.model]
        common = {**SETUPS[self.preset].options, **options, **self.extra}
        schedule = {"training.steps": cell.steps, "training.annealing": cell.annealing}
        return preset(self.preset + suffix).with_options({**common, **schedule})

    def config(self, cell: Cell, method: Method, setting: Setting, seed: int) -> RunConfig:
        """One run."""
        asked = (cell, method.name, setting, seed)
        if asked not in self._made:
            tuned = setting.options(cell.steps)
            options = {**method.options, **tuned, "training.seed": seed}
            self._made[asked] = self._base(cell).with_options(options)
        return self._made[asked]

    def tuning(
        self, cell: Cell, method: Method, losses: Losses
    ) -> tuple[list[RunConfig], Choice | None]:
        """The runs that tuning is known to want, and what it chooses once all of them ended."""
        wanted: dict[str, RunConfig] = {}
        centre = method.centres[self.preset]
        start = Setting(centre, centre, centre, _MOMENTUM)
        choice, lines = Choice(start, math.inf, True), method.lines
        if cell.steps > self.shortest:
            runs, chosen = self.tuning(replace(cell, steps=self.shortest), method, losses)
            if chosen is None or math.isinf(chosen.loss):
                return runs, chosen
            wanted = {run.key: run for run in runs}
            choice, lines = chosen, method.longer_lines
        for line in lines:
            best = choice.setting

            def at(k: int, line: Line = line, best: Setting = best) -> RunConfig:
                return self.config(cell, method, line.at(best, k), TUNING_SEED)

            def loss(k: int, at: Callable[[int], RunConfig] = at) -> float | None:
                return losses.of(at(k))

            places = line.places(loss)
            wanted |= {run.key: run for run in map(at, places)}  # lines cross
            found = {k: value for k in places if (value := loss(k)) is not None}
            if len(found) < len(places):
                return list(wanted.values()), None
            k = min(found, key=found.__getitem__)
            inside = choice.interior and not line.is_end(k, places)
            choice = Choice(line.at(best, k), found[k], inside)
            if math.isinf(choice.loss):
                break
        return list(wanted.values()), choice

    def finals(self, cell: Cell, method: Method, choice: Choice | None) -> list[RunConfig]:
        """The runs of the comparison, none before a method is tuned or if it always diverged."""
        if choice is None or math.isinf(choice.loss):
            return []
        return [self.config(cell, method, choice.setting, seed) for seed in self.final_seeds]

    def tuning_runs(self, cell: Cell, losses: Losses) -> list[RunConfig]:
        """All runs that tuning is known to want."""
        return [r for method in self.entries() for r in self.tuning(cell, method, losses)[0]]

    def final_runs(self, cell: Cell, losses: Losses) -> list[RunConfig]:
        """All runs of the comparison that can be made: seed by seed, which is how they pair."""
        each = (
            self.finals(cell, method, self.tuning(cell, method, losses)[1])
            for method in self.entries()
        )
        by_method = [runs for runs in each if runs]
        return [run for runs in zip(*by_method, strict=True) for run in runs]

    def stages(self, losses: Losses, only: str | None = None) -> Iterator[More]:
        """Tuning and comparison of each cell: runs to make now, that were not told of before.

        To be asked again as runs end. ``only`` "tune" or "final" leaves the other ones out.
        """
        told: set[str] = set()

        def more(wanted: Callable[[Cell, Losses], list[RunConfig]], cell: Cell) -> list[RunConfig]:
            runs = (c for c in wanted(cell, losses) if c.key not in told)
            new = {c.key: c for c in runs if losses.of(c) is None}
            told.update(new)
            return list(new.values())

        for cell in self.cells():
            for stage, wanted in (("tune", self.tuning_runs), ("final", self.final_runs)):
                if only in (None, stage):
                    yield partial(more, wanted, cell)


def run_contest(
    contest: Contest,
    root: Path,
    make: Callable[[list[RunConfig], More], list[Outcome]],
    only: str | None = None,
) -> list[Outcome]:
    """Make all runs there are to make; returns what became of them.

    ``make`` makes some and, whenever one has ended, what there is more to make then.
    """
    stages = contest.stages(Losses(root), only)
    return [outcome for more in stages if (runs := more()) for outcome in make(runs, more)]
