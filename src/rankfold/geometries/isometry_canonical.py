"""Partial isometries as orthonormal factors, up to one rotation, with the canonical metric.

Metric          J Σ⟨Ξ_Ui, (I − ½ U_iU_iᵀ) H_Ui⟩ + I Σ⟨Ξ_Vj, (I − ½ V_jV_jᵀ) H_Vj⟩: a rotation within
                a factor's columns costs half of what it costs in the Frobenius metric.
Gradient        G_Ui/J − U_i (G_UiᵀU_i/J + Ω), likewise for V_j; Ω, the common rotation, is zero
                when the loss depends on the products alone.
Representation, retractions and transport: `stiefel`. The horizontal space is the same as in
`isometry_quotient`.
"""

from __future__ import annotations

from torch import Tensor

from .stiefel import Correction, StiefelFrame, StiefelGeometry, StiefelTangent, weighted_square


class IsometryCanonical(StiefelGeometry):
    """See the header of this file."""

    name = "isometry-canonical"
    inner_weight = 0.5

    def correction(self, i: int, j: int) -> Correction:
        return Correction(1 / j, -1 / j, 1 / (i * j), 1 / (i * j))

    def metric_square(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        return weighted_square(frame, coords, 1 - self.inner_weight)
