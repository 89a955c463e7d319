"""Partial isometries as orthonormal factors, up to one rotation, with the Frobenius metric.

Metric          J Σ⟨Ξ_Ui, H_Ui⟩ + I Σ⟨Ξ_Vj, H_Vj⟩: each factor counts once for every block it is in.
Gradient        G_Ui/J − U_i (sym(U_iᵀG_Ui)/J + Ω), likewise for V_j; Ω, the common rotation, is
                zero when the loss depends on the products alone.
Representation, retractions and transport: `stiefel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Pair
from .stiefel import (
    Correction,
    StiefelFrame,
    StiefelGeometry,
    StiefelTangent,
    by_partners,
    weighted_square,
)


class IsometryQuotient(StiefelGeometry):
    """See the header of this file."""

    name = "isometry-quotient"

    def correction(self, i: int, j: int) -> Correction:
        return Correction(1 / j, 0.0, 1 / (2 * i * j), 1 / (2 * i * j))

    def mix(self, frame: StiefelFrame, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        # In this metric G_Ui/J is projected as momentum is, so that one projection serves both.
        def mixed(partners: int, g: Tensor, m: Tensor) -> Tensor:
            return torch.lerp(m, g if partners == 1 else g / partners, 1 - nu)

        return self.arrive(frame, by_partners(frame, mixed, grad, momentum), given=True)

    def metric_square(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        return weighted_square(frame, coords)
