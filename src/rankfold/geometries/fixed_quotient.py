"""Matrices of rank r as pairs of factors, up to the gauge (A S, B S⁻ᵀ).

Point           (A, B) upstairs, W = A Bᵀ downstairs; a grid is the one stacked pair.
Tangent         the horizontal lift (Ξ_A, Ξ_B) of Ξ = Ξ_A Bᵀ + A Ξ_Bᵀ.
Metric          ⟨Ξ_A, H_A⟩ weighted by BᵀB plus ⟨Ξ_B, H_B⟩ weighted by AᵀA, unchanged by the gauge.
Gradient        (G_A (BᵀB)⁻¹, G_B (AᵀA)⁻¹).
Retraction      additive: (A + Ξ_A, B + Ξ_B).
Transport       horizontal projection at the new point: (Ξ_A − A Λ, Ξ_B + B Λᵀ) with
                Λ = ½ (A⁺ Ξ_A − Ξ_Bᵀ B⁺ᵀ).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import linalg
from .base import Geometry, Landing, Pair, StepOptions, flatten_blocks, per_member


class GramFrame(NamedTuple):
    """The point, Cholesky factors of AᵀA and BᵀB, and the inverses of these factors."""

    point: Pair
    left: Tensor
    right: Tensor
    left_inverse: Tensor
    right_inverse: Tensor
    lifted: Tensor


class FixedQuotient(Geometry):
    """See the header of this file."""

    name = "fixed-quotient"
    isometry = False
    retractions = ("additive",)

    def frame(self, point: Pair, damping: float = 0.0) -> GramFrame:
        a, b = flatten_blocks(point.left), flatten_blocks(point.right)
        l_a, lifted_a = linalg.cholesky(a.mT @ a, damping)
        l_b, lifted_b = linalg.cholesky(b.mT @ b, damping)
        inverses = linalg.triangular_inverse(l_a), linalg.triangular_inverse(l_b)
        return GramFrame(point, l_a, l_b, *inverses, lifted_a | lifted_b)

    def lifted(self, frame: GramFrame) -> Tensor:
        return frame.lifted

    def gradient(self, frame: GramFrame, grad: Pair, repair: str = "average") -> Pair:
        lift = Pair(
            grad.left @ (frame.right_inverse.mT @ frame.right_inverse)[:, None],
            grad.right @ (frame.left_inverse.mT @ frame.left_inverse)[:, None],
        )
        # The horizontal projection is the nearest horizontal vector in the metric.
        return lift if repair == "none" else self.arrive(frame, lift)

    def arrive(self, frame: GramFrame, momentum: Pair) -> Pair:
        left, right = self._overlaps(frame, momentum)
        # A⁺M_A = L_A⁻ᵀ (L_A⁻¹ AᵀM_A), and likewise for B.
        towards_a = frame.left_inverse.mT @ (frame.left_inverse @ left)
        towards_b = frame.right_inverse.mT @ (frame.right_inverse @ right)
        shift = ((towards_a - towards_b.mT) / 2)[:, None]
        return Pair(
            momentum.left - frame.point.left @ shift,
            momentum.right + frame.point.right @ shift.mT,
        )

    def coordinates(self, frame: GramFrame, tangent: Pair) -> Pair:
        return tangent

    def metric_norm(self, frame: GramFrame, coords: Pair) -> Tensor:
        # The weights go in as Cholesky factors: through the Gram matrices themselves the sum
        # would cancel, and lose the square of their conditioning.
        return torch.sqrt(
            linalg.squared_norm(coords.left @ frame.right[:, None], 3)
            + linalg.squared_norm(coords.right @ frame.left[:, None], 3)
        )

    def spectral_norm(self, frame: GramFrame, coords: Pair) -> Tensor:
        # Ξ = C Vᵀ + U Dᵀ in the orthonormal frames U = A L_A⁻ᵀ, V = B L_B⁻ᵀ.
        c = flatten_blocks(coords.left) @ frame.right
        d = flatten_blocks(coords.right) @ frame.left
        left, right = self._overlaps(frame, coords)
        uc = frame.left_inverse @ left @ frame.right
        vd = frame.right_inverse @ right @ frame.left
        return linalg.spectral_norm(c.mT @ c, uc, d.mT @ d, vd, 1, 1)

    def step_limit(self, frame: GramFrame, coords: Pair) -> Tensor:
        # ‖A_i⁺Ξ_Ai‖₂ < 1 and ‖B_j⁺Ξ_Bj‖₂ < 1 for every factor.
        sizes = []
        for blocks, xi in zip(frame.point, coords, strict=True):
            lower = linalg.inverse_gram_factor(blocks)
            sizes.append(linalg.norm_bound(lower.mT @ (lower @ (blocks.mT @ xi))).amax(1))
        return 1 / torch.maximum(*sizes)

    def retract(
        self, frame: GramFrame, coords: Pair, scale: Tensor, options: StepOptions
    ) -> Landing:
        g = per_member(scale, coords.left)
        new = Pair(frame.point.left + g * coords.left, frame.point.right + g * coords.right)
        return Landing(new, None, None)

    def _overlaps(self, frame: GramFrame, tangent: Pair) -> tuple[Tensor, Tensor]:
        """AᵀΞ_A and BᵀΞ_B, (batch, r, r)."""
        return (
            flatten_blocks(frame.point.left).mT @ flatten_blocks(tangent.left),
            flatten_blocks(frame.point.right).mT @ flatten_blocks(tangent.right),
        )
