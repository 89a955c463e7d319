"""What a contest has shown, as numbers and a verdict for every cell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .contest import Cell, Choice, Contest, Losses, Method
from .report import p_value, signed
from .statistics import Paired, deviation, mean, paired

GOAL, LEVEL, SEEDS = 0.01, 0.01, 8  # nats below the best Muon, p-value, seeds at least


@dataclass(frozen=True)
class Entry:
    """A method in a cell: what was tuned, and the losses of the seeds that have ended."""

    method: Method
    choice: Choice | None
    losses: dict[int, float]
    tried: int = 0  # runs of its tuning so far

    @property
    def diverged(self) -> int:
        """How many seeds did; a single one spoils the mean, as others alone would flatter."""
        return sum(math.isinf(loss) for loss in self.losses.values())

    @property
    def loss(self) -> float:
        """Mean over seeds, NaN if there is none."""
        return math.nan if self.diverged else mean(list(self.losses.values()))

    @property
    def spread(self) -> float:
        """Deviation over seeds."""
        return math.nan if self.diverged else deviation(list(self.losses.values()))

    @property
    def note(self) -> str:
        """What stands in the way of a number, "" if nothing does."""
        if self.choice is None:
            return "not tuned yet"
        if math.isinf(self.choice.loss):
            return "diverged at every rate"
        return f"{self.diverged} diverged" if self.diverged else ""

    def against(self, other: Entry | None) -> Paired | None:
        """The difference of losses, paired by seed; None without a pair."""
        if other is None or other is self or self.diverged or other.diverged:
            return None
        common = [seed for seed in self.losses if seed in other.losses]
        return paired([self.losses[s] - other.losses[s] for s in common]) if common else None


@dataclass(frozen=True)
class Result:
    """A cell as it stands. ``planned`` are the seeds asked for."""

    cell: Cell
    planned: int
    entries: list[Entry]

    def of_kind(self, kind: str) -> list[Entry]:
        """Those with a loss, the best first."""
        found = [e for e in self.entries if e.method.kind == kind and math.isfinite(e.loss)]
        return sorted(found, key=lambda e: e.loss)

    def named(self, name: str) -> Entry | None:
        """One method's entry, None if it took no part."""
        return next((e for e in self.entries if e.method.name == name), None)

    @cached_property
    def rival(self) -> Entry | None:
        """The best of the Muon kinds on the seeds compared, which favours it."""
        return next(iter(self.of_kind("muon")), None)

    @property
    def measures(self) -> tuple[Entry | None, Entry | None, Entry | None]:
        """What every method is compared with: the best Muon, AdamW, Muon on pairs."""
        return self.rival, self.named("adamw"), self.named("whitened")

    @property
    def missing(self) -> int:
        """Final runs still to be made, of all methods."""
        return sum(map(self._missing_of, self.entries))

    @property
    def open(self) -> bool:
        """Whether runs are missing that decide: of our candidates and the Muon kinds."""
        shown = [e for e in self.entries if e.method.kind in ("muon", "ours")]
        return any(map(self._missing_of, shown))

    def _missing_of(self, entry: Entry) -> int:
        lost = entry.choice is not None and math.isinf(entry.choice.loss)
        return 0 if lost else self.planned - len(entry.losses)

    @property
    def candidates(self) -> int:
        """How many of ours took part: the best could have been any, those that diverged too."""
        return sum(e.method.kind == "ours" for e in self.entries)

    @property
    def left_out(self) -> list[str]:
        """Candidates and Muon kinds without a mean, as they diverged."""
        shown = (e for e in self.entries if e.method.kind in ("muon", "ours"))
        return [e.method.name for e in shown if e.note and e.choice is not None]

    @cached_property
    def best(self) -> tuple[Entry, Paired] | None:
        """The best of ours against the best Muon kind; p counts how many of ours there were."""
        ours = self.of_kind("ours")
        test = ours[0].against(self.rival) if ours else None
        if test is None:
            return None
        p = min(1.0, test.p * self.candidates) if math.isfinite(test.p) else math.nan
        return ours[0], Paired(test.count, test.mean, test.low, test.high, p)

    @property
    def met(self) -> bool | None:
        """Whether the goal is, None where that cannot be said."""
        if self.undecided or self.best is None:
            return None
        return self.best[1].mean <= -GOAL and self.best[1].p < LEVEL

    @property
    def undecided(self) -> str:
        """Why there is no verdict: "open", "preliminary", "no verdict"; else ""."""
        if self.open:
            return "open"
        if self.best is None:
            return "no verdict"
        return "preliminary" if self.planned < SEEDS else ""

    def _left(self, what: str) -> str:
        count = "1 run" if self.missing == 1 else f"{self.missing} runs"
        return f"{count} of {what} {'is' if self.missing == 1 else 'are'} still to be made"

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.open:
            return f"open, {self._left('the comparison')}."
        if self.best is None or self.rival is None:
            return "no verdict, it takes one of ours and Muon or Dion."
        entry, test = self.best
        size = f"{entry.method.name} − {self.rival.method.name} = {signed(test.mean)} nats"
        facts = (
            f"{size}, 95% interval {signed(test.low)} to {signed(test.high)}, p = "
            f"{p_value(test.p)} over {test.count} seeds, our candidates counted: "
            f"{self.candidates}"
        ).replace("= <", "< ")
        if self.left_out:
            facts += f"; without a mean, as seeds diverged: {', '.join(self.left_out)}"
        if self.missing:
            facts += f"; {self._left('other methods')}"
        if self.planned < SEEDS:
            return f"preliminary, of fewer than {SEEDS} seeds: {facts}."
        if self.met:
            return f"goal met: {facts}."
        if not test.p < LEVEL:
            return f"null, no difference can be told: {facts}."
        if test.mean > 0:
            return f"goal not met, the best Muon is better: {facts}."
        return f"goal not met, the difference is below {GOAL} nats: {facts}."


def results(contest: Contest, losses: Losses) -> list[Result]:
    """All cells as they stand."""
    return [_result(contest, cell, losses) for cell in contest.cells()]


def _result(contest: Contest, cell: Cell, losses: Losses) -> Result:
    entries = []
    for method in contest.entries():
        wanted, choice = contest.tuning(cell, method, losses)
        finals = contest.finals(cell, method, choice)
        ended = {c.training.seed: losses.of(c) for c in finals}
        tried = sum(losses.of(config) is not None for config in wanted)
        known = {seed: loss for seed, loss in ended.items() if loss is not None}
        entries.append(Entry(method, choice, known, tried))
    return Result(cell, contest.seeds, entries)
