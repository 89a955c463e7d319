"""Dion on every head's factors: momentum orthonormalized by one power iteration a step.

K. Ahn, B. Xu, N. Abreu, J. Langford, "Dion: Distributed Orthonormalized Updates", 2025. Its QR is
made of products and Cholesky factors here, so that a CUDA graph can record a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tall
from ..factors import Grid
from ..linalg import cholesky
from ..stacks import Buffers
from .muon import Muon, as_pair, by_shape

# The first pass of Cholesky factors may be lifted, which leaves a condition number of about 1e2 in
# float32; of the two others each squares the defect.
_PASSES = 3


def orthonormal_columns(x: Tensor) -> Tensor:
    """Q of the QR of each (batch, m, k), k ≤ m, up to signs; columns of zeros stay zero."""
    x = _unit_columns(x, torch.zeros_like(x))
    for _ in range(_PASSES):
        gram = tall.gram(x)
        empty = (gram.diagonal(dim1=-2, dim2=-1) == 0).to(x.dtype)
        x = tall.turn(x, cholesky(gram + torch.diag_embed(empty)).inverse.mT)
    return x


def _unit_columns(x: Tensor, otherwise: Tensor) -> Tensor:
    """Columns of length one, and those of ``otherwise`` in place of zeros."""
    length = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return torch.where(length > 0, x / length.clamp_min(torch.finfo(x.dtype).tiny), otherwise)


class Dion(Muon):
    """Dion on each factor of ``grids`` by itself, all on one device.

    For every m×r block, a row of bias included, there are a momentum M and a basis Q of k columns,
    k being the ``rank`` share of r, rounded up. A step makes of the gradient G and the momentum μ

        B = M + G,  P = orthonormal columns of B Q,  R = BᵀP,  M = B − (1 − μ) P Rᵀ,
        Q = R with columns of length one,

    and subtracts √(m/r) P Qᵀ times the learning rate, Muon's factor. What P Rᵀ does not hold of B
    stays in M whole; at full rank nothing does. Masters, weight decay and ``lr`` are as with
    `Muon`.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        lr: float | Tensor,
        *,
        momentum: float,
        weight_decay: float,
        masters: bool,
        sides: tuple[float, float] = (1.0, 1.0),
        rank: float = 1.0,
    ) -> None:
        super().__init__(
            grids, lr, momentum=momentum, weight_decay=weight_decay, masters=masters, sides=sides
        )
        generator = torch.Generator().manual_seed(0)

        def draw(blocks: Sequence[Tensor]) -> Tensor:
            first, count = blocks[0], sum(map(len, blocks))
            columns = math.ceil(rank * first.shape[-1])
            noise = torch.randn(count, first.shape[-1], columns, generator=generator)
            return _unit_columns(noise, noise).to(first.device, first.dtype)

        blocks = self._blocks(self.momenta)
        self.bases = [draw([blocks[k] for k in alike]) for alike in by_shape(blocks)]

    def _blocks(self, buffers: Buffers) -> list[Tensor]:
        """(batch·I, m, r) and (batch·J, n, r) of the first stack, of the second and so on."""
        pairs = [stack.read(buffers) for stack in self.plan.stacks]
        return [side.flatten(0, 1) for pair in pairs for side in pair]

    def _take_in(self, moved: Buffers) -> None:
        for k, gradient in moved.items():
            gradient.add_(self.momenta[k])

    def _directions(self, moved: Buffers, weights: Buffers) -> list[Tensor]:
        blocks = self._blocks(moved)
        directions, momenta = list(blocks), list(blocks)
        for alike, basis in zip(by_shape(blocks), self.bases, strict=True):
            b = torch.cat([blocks[k] for k in alike])
            p = orthonormal_columns(b @ basis)
            r = b.mT @ p
            kept = tall.add_product(b, p, r.mT, alpha=self.momentum - 1)
            basis.copy_(_unit_columns(r, basis))  # a column of zeros would stay so for ever
            direction = math.sqrt(b.shape[-2] / b.shape[-1]) * (p @ basis.mT)
            for found, whole in ((directions, direction), (momenta, kept)):
                parts = torch.split(whole, [len(blocks[k]) for k in alike])
                for k, part in zip(alike, parts, strict=True):
                    found[k] = part
        for stack, left, right in zip(self.plan.stacks, momenta[::2], momenta[1::2], strict=True):
            stack.write(self.momenta, as_pair(stack, left, right))
        return directions

    def state_dict(self) -> dict[str, Any]:
        """Momenta, bases and masters."""
        return {**super().state_dict(), "bases": self.bases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in the tensors that a graph may have recorded."""
        super().load_state_dict(state)
        for mine, kept in zip(self.bases, state["bases"], strict=True):
            mine.copy_(kept)
