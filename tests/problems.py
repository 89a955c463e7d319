"""Smooth problems on grids of every shape and conditioning, for runs against the reference."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import GEOMETRIES, ISOMETRIES, polar, retractions

Blocks = list[list[Tensor]]


@dataclass(frozen=True)
class Case:
    """One problem, one set of options. Equal cases draw equal numbers."""

    geometry: str
    retraction: str | None = None
    normalize: str | None = "metric"
    momentum: float = 0.875
    heights: tuple[int, ...] = (7,)
    widths: tuple[int, ...] = (5,)
    rank: int = 2
    condition: float = 3.0  # of every block of W; 1 repeats one singular value r times
    start: str = "balanced"  # balanced, left, right, orthonormal: who carries the spread
    norm_floor: float = 2**-23
    decay: float = 1.0  # of the learning rate, a step
    nesterov: bool = dataclasses.field(default=False, repr=False)  # the same problem with it

    def __str__(self) -> str:
        """The test id: the geometry, then whatever is not left at its default."""
        words = [self.geometry]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in ("heights", "widths"):
                words.append("+".join(map(str, value)))
            elif value != field.default:
                words.append(f"{field.name}={value}")
        return "-".join(words)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))


def random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A uniformly random orthonormal (rows, columns)."""
    return polar(torch.randn(rows, columns, generator=generator, dtype=torch.float64))


def starting_factors(case: Case, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Factors A_i (m_i, r), B_j (n_j, r) whose products have the condition number asked for.

    W_ij = U_i D_i diag(s) E_j V_jᵀ, with D_i and E_j diagonal and near I, to make the blocks of a
    grid unlike each other. How diag(s) is shared between the factors is the case's ``start``; a
    random gauge, of condition 2, then mixes the columns.

    The numbers are those of float32 factors, so that both precisions start at the same products;
    orthonormal factors are made orthonormal again after the rounding.
    """

    def draw(rows: int) -> Tensor:
        return random_orthonormal(rows, case.rank, generator)

    lefts, rights = [draw(m) for m in case.heights], [draw(n) for n in case.widths]
    if case.geometry in ISOMETRIES or case.start == "orthonormal":
        return (
            [polar(u.float().double()) for u in lefts],
            [polar(v.float().double()) for v in rights],
        )
    s = torch.logspace(0, -1, case.rank, base=case.condition, dtype=torch.float64)
    share = {"balanced": 0.5, "left": 1.0, "right": 0.0}[case.start]
    turn = random_orthonormal(case.rank, case.rank, generator)
    gauge = turn * torch.linspace(1, 2, case.rank, dtype=torch.float64)
    cogauge = turn / torch.linspace(1, 2, case.rank, dtype=torch.float64)
    vary = len(lefts) + len(rights) > 2 and case.condition > 1

    def factor(frame: Tensor, power: float, mix: Tensor) -> Tensor:
        near = 1 + 0.25 * torch.rand(case.rank, generator=generator, dtype=torch.float64) * vary
        return ((frame * near * s**power) @ mix).float().double()

    return (
        [factor(u, share, gauge) for u in lefts],
        [factor(v, 1 - share, cogauge) for v in rights],
    )


def smallest_singular_value(blocks: Blocks, rank: int) -> float:
    """The smallest σ_r over the blocks W_ij."""
    return min(float(torch.linalg.svdvals(w)[rank - 1]) for row in blocks for w in row)


class Loss:
    """A smooth nonlinear function of the blocks, whose gradient turns over the path's length.

    With x_ij = (W_ij − T_ij)/σ and σ the smallest σ_r at the start:
    σ (Σ_ij ½‖P_ij ∘ x_ij‖² + ⟨D_ij, sin x_ij⟩ + ½ (Σ_ij ⟨C_ij, x_ij⟩)²). The last term couples
    the blocks.
    """

    def __init__(self, blocks: Blocks, rank: int, generator: torch.Generator) -> None:
        def draw(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        self.scale = smallest_singular_value(blocks, rank)
        size = sum(w.numel() for row in blocks for w in row)
        self.coefficients = [
            [(w + self.scale * draw(w), draw(w), draw(w), draw(w) / size**0.5) for w in row]
            for row in blocks
        ]

    def __call__(self, blocks: Blocks) -> Tensor:
        total = coupling = blocks[0][0].new_zeros(())
        for row, coefficients in zip(blocks, self.coefficients, strict=True):
            for w, quadruple in zip(row, coefficients, strict=True):
                t, p, d, c = (x.to(w.dtype) for x in quadruple)
                x = (w - t) / self.scale
                total = total + 0.5 * ((p * x) ** 2).sum() + (d * x.sin()).sum()
                coupling = coupling + (c * x).sum()
        return self.scale * (total + 0.5 * coupling**2)

    def gradient(self, blocks: Blocks) -> Blocks:
        """The dense Euclidean gradient with respect to every block."""
        leaves = [[w.detach().requires_grad_() for w in row] for row in blocks]
        flat = iter(torch.autograd.grad(self(leaves), [w for row in leaves for w in row]))
        return [[next(flat) for _ in row] for row in leaves]


def methods(heights: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Every geometry with every retraction it has on a grid."""
    for geometry in GEOMETRIES:
        for retraction in retractions(geometry, len(heights) == len(widths) == 1):
            yield geometry, retraction
