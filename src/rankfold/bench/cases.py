"""What is optimized: weights of known shapes, the grids on them, and gradients to step along."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..factors import Factor, Grid
from ..geometries import Pair

# The gradient of each product is a matrix of this rank, so that no m×n matrix is ever formed.
_GRADIENT_RANK = 4
_SEED = 20260


@dataclass(frozen=True)
class Problem:
    """Parameters with gradients, and the grids on them: one contender's own copy."""

    params: list[nn.Parameter]
    grids: list[Grid]

    def weights(self) -> Pair:
        """Copies of all factors, (members, I, m, r) and (members, J, n, r)."""
        return _stack(self.grids, lambda p: p.detach())

    def gradients(self) -> Pair:
        """Copies of the gradients of all factors, in the shapes of `weights`."""
        return _stack(self.grids, _grad_of)

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        return sum(p.numel() * p.element_size() for p in self.params)


@dataclass(frozen=True)
class Case(ABC):
    """Shapes to time: members of lefts × rights factors, of ``rows`` × ``rank`` on the left."""

    name: str
    members: int
    lefts: int
    rights: int
    rows: int
    columns: int
    rank: int

    @abstractmethod
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters, in the order `grids` wants them."""

    @abstractmethod
    def grids(self, params: list[nn.Parameter]) -> list[Grid]:
        """The grids on these parameters."""

    def describe(self) -> str:
        """The case in words, for titles."""
        what = "pairs" if self.lefts == self.rights == 1 else f"grids {self.lefts}×{self.rights}"
        sizes = [f"{self.rows}×{self.rank}"]
        if self.columns != self.rows:
            sizes.append(f"{self.columns}×{self.rank}")
        return f"{self.members} {what}, factors {' and '.join(sizes)}, float32"

    def problem(self, device: torch.device, orthonormal: bool = False) -> Problem:
        """A fresh copy of the same weights and gradients, whoever asks and however often.

        The isometry geometries need ``orthonormal`` factors; the others get plain random ones.
        """
        generator = torch.Generator(device).manual_seed(_SEED)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        scale = min(self.rows, self.columns) ** -0.5
        params = [nn.Parameter(scale * draw(*shape)) for shape in self.shapes()]
        grids = self.grids(params)
        if orthonormal:
            orthonormalize_quickly(grids)
        left = draw(self.members, self.lefts, self.rows, _GRADIENT_RANK)
        right = draw(self.members, self.rights, self.columns, _GRADIENT_RANK)
        # The loss Σ_ij ⟨P_i Q_jᵀ, A_i B_jᵀ⟩ of the products: gradients that fit together, as the
        # first step of the library wants them.
        weights = _stack(grids, lambda p: p)
        seen = [(w.mT @ x).sum(1) for w, x in zip(weights, (left, right), strict=True)]
        (seen[0] * seen[1]).sum().backward()  # type: ignore[no-untyped-call]
        return Problem(params, grids)


@dataclass(frozen=True)
class AttentionCase(Case):
    """Query, key, value and output projections of a model, as `nn.Linear` keeps them."""

    layers: int
    tokens: tuple[int, int]  # of a whole training step: sequences, and their length
    vocabulary: int

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return self.members // (2 * self.layers)

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.kv_heads * self.lefts

    def shapes(self) -> list[tuple[int, ...]]:
        """Query, key, value and output weight of each layer."""
        width, inner, outer = self.rows, self.heads * self.rank, self.kv_heads * self.rank
        return [(inner, width), (outer, width), (outer, width), (width, inner)] * self.layers

    def grids(self, params: list[nn.Parameter]) -> list[Grid]:
        """Query·key and output·value of each layer."""
        found = []
        heads, groups = self.heads, self.kv_heads
        for layer in range(self.layers):
            q, k, v, o = params[4 * layer : 4 * layer + 4]
            for name, left, right in (
                ("qk", Factor(q, axis=0, blocks=heads), Factor(k, axis=0, blocks=groups)),
                ("vo", Factor(o, axis=1, blocks=heads), Factor(v, axis=0, blocks=groups)),
            ):
                found.append(Grid(left, right, groups=groups, name=f"layer{layer}.{name}"))
        return found


@dataclass(frozen=True)
class StackedCase(Case):
    """Sizes given by hand: all left factors in one parameter, all right ones in another."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Stacks (members · I, m, r) and (members · J, n, r)."""
        return [
            (self.members * self.lefts, self.rows, self.rank),
            (self.members * self.rights, self.columns, self.rank),
        ]

    def grids(self, params: list[nn.Parameter]) -> list[Grid]:
        """One grid of as many groups as there are members."""
        return [Grid(params[0], params[1], groups=self.members, name="stack")]


def attention_case(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    rank: int,
    tokens: tuple[int, int] = (8, 512),
    vocabulary: int = 50257,
) -> AttentionCase:
    """A model whose width is heads · rank."""
    width = heads * rank
    members, lefts = 2 * layers * kv_heads, heads // kv_heads
    return AttentionCase(name, members, lefts, 1, width, width, rank, layers, tokens, vocabulary)


def stacked_case(
    pairs: int, rows: int, columns: int, rank: int, lefts: int = 1, rights: int = 1
) -> StackedCase:
    """Sizes by hand; ``pairs`` counts members, whatever their lefts × rights."""
    sizes = {"pairs": pairs, "rows": rows, "columns": columns, "rank": rank}
    sizes |= {"lefts": lefts, "rights": rights}
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} must be at least 1, got {value}")
    if rank > min(rows, columns):
        raise ValueError(f"rank {rank} is above the smaller of {rows} rows and {columns} columns")
    return StackedCase("by-hand", pairs, lefts, rights, rows, columns, rank)


PRESETS = {
    case.name: case
    for case in (
        attention_case("paper-mha", layers=6, heads=8, kv_heads=8, rank=64),
        attention_case("paper-gqa", layers=6, heads=8, kv_heads=1, rank=64),
        attention_case("large", layers=8, heads=32, kv_heads=32, rank=128),
        attention_case("tiny", 2, heads=4, kv_heads=4, rank=8, tokens=(2, 16), vocabulary=64),
    )
}


def orthonormalize_quickly(grids: list[Grid]) -> None:
    """Make the columns of every factor orthonormal, in place, by one Cholesky QR in float64.

    Good for random factors, which are well conditioned, at sizes where an SVD takes minutes.
    """
    with torch.no_grad():
        for grid in grids:
            for _, _, factor in grid.factors():
                blocks = factor.view_blocks(factor.param.detach()[None])
                wide = blocks.double()
                lower = torch.linalg.cholesky(wide.mT @ wide)
                blocks.copy_(torch.linalg.solve_triangular(lower.mT, wide, upper=True, left=False))


def _stack(grids: list[Grid], tensor_of: Callable[[Tensor], Tensor]) -> Pair:
    """Factors of equally shaped grids, (members, I, m, r) and (members, J, n, r)."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for grid in grids:
        for found, factors in zip(sides, (grid.left, grid.right), strict=True):
            for factor in factors:
                blocks = factor.view_blocks(tensor_of(factor.param)[None])
                found.append(blocks.reshape(grid.groups, -1, *blocks.shape[-2:]))
    return Pair(*(torch.cat(found) for found in sides))


def _grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None  # Case.problem
    return param.grad
