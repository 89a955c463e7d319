"""What a contest tunes, and the lines of settings along which it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MOMENTA = (0.6, 0.8, 0.9, 0.95)
# By so many rates a line may grow. One that wants more is reported as not tuned to the end.
MOST_GROWTH = 4


class Setting(NamedTuple):
    """What is tuned: rates 2^qk of query·key products, 2^v of values, 2^o of outputs; momentum.

    Those of values and outputs are of the two factors of value·output products. A ``decay`` is one
    by which the products of the highest rate would shrink to e^(-2^decay) in a run at that rate.
    """

    qk: int
    v: int
    o: int
    momentum: float
    decay: int | None = None

    def options(self, steps: int) -> dict[str, float]:
        """Of a run of so many steps."""
        fastest = 2.0 ** max(self.qk, self.v, self.o)
        shrunk = 0.0 if self.decay is None else 2.0**self.decay
        return {
            "optimizer.lr": 2.0**self.qk,
            "optimizer.vo_rate": 2.0 ** (self.v - self.qk),
            "optimizer.output_rate": 2.0 ** (self.o - self.v),
            "optimizer.momentum": self.momentum,
            "optimizer.product_decay": shrunk / (steps * fastest),
        }


class Line(NamedTuple):
    """Settings ``k`` steps away from the best so far: the first ones, and which end may grow."""

    at: Callable[[Setting, int], Setting]
    start: tuple[int, ...] = (-1, 0, 1)
    down: bool = True
    up: bool = True

    def places(self, loss: Callable[[int], float | None]) -> list[int]:
        """All that it is known to want, by the losses there."""
        return grown(self.start, loss, self.down, self.up)

    def is_end(self, k: int, places: Sequence[int]) -> bool:
        """Whether better ones may lie beyond."""
        return (self.down and k == places[0]) or (self.up and k == places[-1])


def _faster(*rates: str) -> Callable[[Setting, int], Setting]:
    """Settings with these rates 2^k times as high."""

    def at(best: Setting, k: int) -> Setting:
        return best._replace(**{rate: getattr(best, rate) + k for rate in rates})

    return at


_ALL = _faster("qk", "v", "o")
_VALUE_OUTPUT = Line(_faster("v", "o"))
_SMOOTHER = Line(
    lambda best, k: best._replace(momentum=MOMENTA[k]),
    tuple(range(len(MOMENTA))),
    down=False,
    up=False,
)
# None at first, and then decays from e⁻⁴ on.
_DECAYING = Line(
    lambda best, k: best._replace(decay=k + 1 if k else None), (0, 1, 2, 3), down=False
)
# Tuned one after the other: products, and then the factors of value·output ones.
PRODUCT_LINES: tuple[Line, ...] = (
    Line(_ALL),
    _VALUE_OUTPUT,
    _SMOOTHER,
    Line(_faster("qk")),
    _VALUE_OUTPUT,
)
LINES: tuple[Line, ...] = (*PRODUCT_LINES, Line(_faster("o")), Line(_faster("v")))
# Longer runs want other rates, often lower ones, and another share of value·output products; and
# where nothing decays these grow by a factor of ten and more.
UNDECAYED_LINES: tuple[Line, ...] = (
    Line(_ALL, (-1, 0)),
    _VALUE_OUTPUT._replace(start=(-1, 0)),
    _SMOOTHER,
)
LONGER_LINES: tuple[Line, ...] = (*UNDECAYED_LINES, _DECAYING)


def grown(
    line: Sequence[int], loss: Callable[[int], float | None], down: bool = True, up: bool = True
) -> list[int]:
    """A line of exponents, longer by those it is known to want at the ends where it may grow."""
    line = sorted(line)
    for _ in range(MOST_GROWTH):
        losses = [loss(each) for each in line]
        known = [x for x in losses if x is not None]
        if len(known) < len(line):
            break
        best = known.index(min(known))  # the lowest rate, if all diverged
        if best == 0 and down:
            line = [line[0] - 1, *line]
        elif best == len(line) - 1 and up:
            line = [*line, line[-1] + 1]
        else:
            break
    return line
