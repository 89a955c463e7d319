"""Partial isometries as orthonormal factors, up to one rotation, with the Frobenius metric.

Metric          J Σ⟨Ξ_Ui, H_Ui⟩ + I Σ⟨Ξ_Vj, H_Vj⟩: each factor counts once for every block it is in.
Gradient        G_Ui/J − U_i (sym(U_iᵀG_Ui)/J + Ω), likewise for V_j; Ω, the common rotation, is
                zero when the loss depends on the products alone.
Representation, retractions and transport: `stiefel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import skew, sym
from .base import Pair
from .stiefel import StiefelFrame, StiefelGeometry, StiefelTangent, vertical_part, weighted_square


class IsometryQuotient(StiefelGeometry):
    """See the header of this file."""

    name = "isometry-quotient"

    def corrections(self, frame: StiefelFrame, overlap: Pair) -> Pair:
        left, right = overlap.left / frame.j, overlap.right / frame.i
        vertical = vertical_part(frame, skew(left), skew(right))
        return Pair(sym(left) + vertical, sym(right) + vertical)

    def metric_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        return torch.sqrt(weighted_square(frame, coords))
