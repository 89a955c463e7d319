"""Partial isometries with the geometry they inherit from all matrices.

A single pair stays downstairs:
Point           W = U Vᵀ with orthonormal columns.
Tangent         Ξ = U K Vᵀ + X Vᵀ + U Yᵀ with UᵀX = VᵀY = 0 and K skew.
Retraction      svd: U_r V_rᵀ of the truncated SVD of W + Ξ.
Metric, gradient and transport: `embedded`, with the symmetric part of overlaps projected away.

A larger grid is a hybrid, because the nearest grid of isometries has no closed form: the gradient
and the norm are those of the Frobenius metric downstairs, while momentum, retractions and
transport are upstairs, as in `stiefel`, reached by the horizontal lift of `isometry_quotient`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import linalg
from ..linalg import skew
from .base import Landing, Pair, StepOptions, flatten_blocks, per_member
from .embedded import Bases, EmbeddedGeometry, NewCoefficients, TangentXKY, split_tangent
from .stiefel import StiefelFrame, StiefelGeometry, StiefelTangent, weighted_square


class IsometryEmbedded(EmbeddedGeometry):
    """The single pair; see the header of this file."""

    name = "isometry-embedded"
    isometry = True
    retractions = ("svd",)

    def frame(self, point: Pair, damping: float = 0.0) -> Bases:
        return Bases(flatten_blocks(point.left), flatten_blocks(point.right))

    def coordinates(self, frame: Bases, tangent: Pair) -> TangentXKY:
        c, d = flatten_blocks(tangent.left), flatten_blocks(tangent.right)
        x, y, overlap = split_tangent(frame.u, frame.v, c, d)
        return TangentXKY(x, skew(overlap.left - overlap.right) / 2, y, x.mT @ x, y.mT @ y)

    def step_limit(self, frame: Bases, coords: TangentXKY) -> Tensor:
        return 1 / self.spectral_norm(frame, coords)  # ‖Ξ‖₂ < 1

    def retract(
        self, frame: Bases, coords: TangentXKY, scale: Tensor, options: StepOptions
    ) -> Landing:
        g = per_member(scale, coords.k)
        core = linalg.identity_like(coords.k) + g * coords.k
        p, f, unconverged = linalg.best_rank_core(core, g * g * coords.xx, g * g * coords.yy)
        # The rank-r approximation is (U P + γX) N⁻¹ (V + γY F)ᵀ. Multiplying by orthonormal V'ᵀ
        # on the right does not change a polar factor, so two polar factors of tall matrices do.
        spread = _gram_spread(options.reach)
        right, v_scale = linalg.polar(frame.v + coords.y @ (g * f), spread)
        left, u_scale = linalg.polar(frame.u @ (p @ v_scale) + coords.x @ (g * v_scale), spread)
        total = v_scale @ u_scale
        new = NewCoefficients(u=p @ total, v=v_scale, x=g * total, y=g * (f @ v_scale))
        return Landing(Pair(left[:, None], right[:, None]), new, unconverged)

    def depart(self, frame: Bases, coords: TangentXKY, tangent: Pair, landing: Landing) -> Pair:
        kept = self.carry(frame, coords, landing.record, deskew=True)
        return Pair(kept.left[:, None], kept.right[:, None])


class IsometryEmbeddedGrid(StiefelGeometry):
    """The hybrid for grids larger than 1×1; see the header of this file."""

    name = "isometry-embedded"

    def corrections(self, frame: StiefelFrame, overlap: Pair) -> Pair:
        i, j = frame.i, frame.j
        alpha, beta = skew(overlap.left), -skew(overlap.right)
        sum_alpha, sum_beta = alpha.sum(1, keepdim=True), beta.sum(1, keepdim=True)
        # The two sums are one matrix for a loss of the products. Where they differ, the nearest
        # consistent blocks are found by spreading the difference evenly over all factors.
        excess = (sum_alpha - sum_beta) / (i + j)
        gamma = (j * sum_alpha + i * sum_beta) / (i + j)
        omega = (alpha - excess) / j - gamma / (2 * i * j)
        psi = gamma / (2 * i * j) - (beta + excess) / i
        return Pair(overlap.left / j - omega, overlap.right / i - psi)

    def metric_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        # ‖Ξ_ij‖² = ‖X_i‖² + ‖Y_j‖² + ‖Ω_i − Ψ_j‖², summed over the grid.
        crossed = (coords.overlap.left.sum(1) * coords.overlap.right.sum(1)).sum((-2, -1))
        square = weighted_square(frame, coords.vector) - 2 * crossed
        return torch.sqrt(square.clamp_min(0))


def _gram_spread(reach: float | None) -> float | None:
    """Bound on the distance from I of the two Gram matrices in `IsometryEmbedded.retract`.

    For a step of length t the inverses of I + γK have norm at most 1, and both matrices stay
    within 3t² of I up to t = ½, where the iteration still has room to spare.
    """
    return None if reach is None or reach > 0.5 else 3 * reach**2 + 0.05
