"""Partial isometries as orthonormal factors, up to one rotation, with the canonical metric.

Metric          J Σ⟨Ξ_Ui, (I − ½ U_iU_iᵀ) H_Ui⟩ + I Σ⟨Ξ_Vj, (I − ½ V_jV_jᵀ) H_Vj⟩: a rotation within
                a factor's columns costs half of what it costs in the Frobenius metric.
Gradient        G_Ui/J − U_i (G_UiᵀU_i/J + Ω), likewise for V_j; Ω, the common rotation, is zero
                when the loss depends on the products alone.
Representation, retractions and transport: `stiefel`. The horizontal space is the same as in
`isometry_quotient`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels, linalg
from .base import Pair
from .stiefel import Correction, StiefelFrame, StiefelGeometry, StiefelTangent, weighted_square


class IsometryCanonical(StiefelGeometry):
    """See the header of this file."""

    name = "isometry-canonical"
    inner_weight = 0.5

    def correction(self, i: int, j: int) -> Correction:
        return Correction(1 / j, -1 / j, 1 / (i * j), 1 / (i * j))

    def descent(
        self,
        frame: StiefelFrame,
        grad: Pair,
        repair: str,
        momentum: Pair | None = None,
        nu: float = 0.0,
    ) -> tuple[Pair, StiefelTangent]:
        if kernels.serve_small(*frame.point):  # all overlaps in one launch
            return super().descent(frame, grad, repair, momentum, nu)
        # The norm counts UᵀΞ apart, and projecting has told what that is.
        tangent, (seen, before, kappa) = self.project(frame, grad, momentum, nu)
        known = [seen.left / frame.j, seen.right / frame.i]
        if before is not None:
            known = [torch.lerp(old, new, 1 - nu) for old, new in zip(before, known, strict=True)]
        sides = zip(self.coordinates(frame, tangent), known, kappa, strict=True)
        return tangent, StiefelTangent(*(side._replace(known=x - k) for side, x, k in sides))

    def metric_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        inner = frame.j * linalg.squared_norm(coords.left.rotation(), 3)
        inner = inner + frame.i * linalg.squared_norm(coords.right.rotation(), 3)
        return torch.sqrt((weighted_square(frame, coords) - inner / 2).clamp_min(0))
