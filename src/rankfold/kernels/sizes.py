"""Sizes of tiles and grids in plain integers: Triton's own functions take microseconds a call."""

from __future__ import annotations


def parts(total: int, size: int) -> int:
    """How many parts of a size make up a total."""
    return -(-total // size)


def padded(size: int, least: int = 16) -> int:
    """The power of two a tile has for ``size``: at least 16 where it is to be multiplied."""
    return max(least, 1 << (size - 1).bit_length())
