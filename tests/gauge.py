"""Moving factors along the gauge: A_i S and B_j S⁻ᵀ, the same S for all blocks of a member.

Every product A_i B_jᵀ stays as it was, so a function of the products alone does not notice, and
one that takes its factors from elsewhere does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import rankfold

# One factor: views whose rows, put below each other, are the matrix. The weight's, the bias's.
Block = list[Tensor]


class Member(NamedTuple):
    """The factors of one I×J product."""

    left: list[Block]
    right: list[Block]


def deal(left: list[Block], right: list[Block], groups: int) -> list[Member]:
    """Contiguous runs of equal length, one a member."""
    i, j = len(left) // groups, len(right) // groups
    return [Member(left[g * i :][:i], right[g * j :][:j]) for g in range(groups)]


def members_read(grid: rankfold.Grid) -> list[Member]:
    """The members of a grid as views, read by its own factors."""

    def blocks(factor: rankfold.Factor) -> Iterator[Block]:
        views = [factor.view_blocks(factor.param.detach()[None])[0]]
        if factor.bias is not None:
            views.append(factor.view_bias(factor.bias.detach()[None])[0])
        for index in itertools.product(*map(range, views[0].shape[:-2])):
            yield [view[index] for view in views]

    left, right = ([b for f in side for b in blocks(f)] for side in (grid.left, grid.right))
    return deal(left, right, grid.groups)


def random_gauge(rank: int, generator: torch.Generator) -> Tensor:
    """A random S of condition number 4."""
    noise = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(noise)
    gauge: Tensor = u * torch.logspace(-1, 1, rank, base=2.0, dtype=torch.float64) @ vh
    return gauge


def move(blocks: Sequence[Block], by: Tensor) -> None:
    """Multiply every factor by ``by`` on the right, in place."""
    for block in blocks:
        for rows in block:
            rows.copy_(rows @ by)


def move_along_gauge(members: Sequence[Member], generator: torch.Generator) -> None:
    """Move every member by a random S of its own."""
    for left, right in members:
        gauge = random_gauge(left[0][0].shape[-1], generator)
        move(left, gauge)
        move(right, torch.linalg.inv(gauge).T)
