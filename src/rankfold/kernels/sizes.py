"""Sizes of tiles and grids in plain integers: Triton's own functions take microseconds a call."""

from __future__ import annotations

from typing import NamedTuple

_PROGRAMS = 512  # enough to keep every multiprocessor of today's GPUs busy


def parts(total: int, size: int) -> int:
    """How many parts of a size make up a total."""
    return -(-total // size)


def padded(size: int, least: int = 16) -> int:
    """The power of two a tile has for ``size``: at least 16 where it is to be multiplied."""
    return max(least, 1 << (size - 1).bit_length())


class Shape(NamedTuple):
    """What a program takes at a time, and how it is launched."""

    rows: int
    columns: int
    warps: int
    stages: int

    def of(self, size: int) -> Shape:
        """The same with no more columns than matrices of this padded rank have."""
        return self._replace(columns=min(size, self.columns))


def schedule(factors: int, m: int, rows: int, programs: int = _PROGRAMS) -> tuple[int, int]:
    """Rows a program takes, and how many programs share a factor."""
    share = min(parts(m, rows), max(1, parts(programs, factors)))
    run = parts(parts(m, share), rows) * rows
    return run, parts(m, run)
