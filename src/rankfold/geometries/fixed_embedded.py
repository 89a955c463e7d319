"""Matrices of rank r with the geometry they inherit from all matrices.

Point           W = A Bᵀ; a grid is the one stacked pair. Frames A = U R_A, B = V R_B, and the
                core S = R_A R_Bᵀ, so W = U S Vᵀ.
Tangent         Ξ = U K Vᵀ + X Vᵀ + U Yᵀ with UᵀX = VᵀY = 0.
Retractions     svd: best rank-r approximation of W + Ξ; orthographic: the point whose difference
                to W + Ξ is normal at W.
Metric, gradient and transport: `embedded`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import linalg
from ..linalg import Frame
from .base import Landing, Pair, StepOptions, flatten_blocks, per_member
from .embedded import Bases, EmbeddedGeometry, NewCoefficients, TangentXKY, split_tangent


class PairFrame(NamedTuple):
    """The point and the orthonormal frames of its stacked factors."""

    point: Pair
    left: Frame
    right: Frame


class FixedEmbedded(EmbeddedGeometry):
    """See the header of this file."""

    name = "fixed-embedded"
    isometry = False
    retractions = ("svd", "orthographic")

    def frame(self, point: Pair, damping: float = 0.0) -> PairFrame:
        return PairFrame(
            point,
            linalg.orthonormal_frame(flatten_blocks(point.left), damping),
            linalg.orthonormal_frame(flatten_blocks(point.right), damping),
        )

    def lifted(self, frame: PairFrame) -> Tensor:
        return frame.left.lifted | frame.right.lifted

    def gradient(self, frame: PairFrame, grad: Pair, repair: str = "average") -> Pair:
        if repair != "exact":
            return grad
        # Least squares of ‖ΞB − G_A‖² + ‖ΞᵀA − G_B‖² over tangent Ξ: only K is in dispute.
        left, right = frame.left, frame.right
        k_c = left.basis.mT @ flatten_blocks(grad.left) @ right.inverse
        k_d = (right.basis.mT @ flatten_blocks(grad.right) @ left.inverse).mT
        s_a, s_b = left.triangle @ left.triangle.mT, right.triangle @ right.triangle.mT
        k = linalg.sylvester(s_a, s_b, s_a @ k_d + k_c @ s_b)
        over_a, over_b = (k_c - k) @ right.triangle, (k_d - k).mT @ left.triangle
        return Pair(
            grad.left - (left.basis @ over_a).view_as(grad.left),
            grad.right - (right.basis @ over_b).view_as(grad.right),
        )

    def coordinates(self, frame: PairFrame, tangent: Pair) -> TangentXKY:
        c = flatten_blocks(tangent.left) @ frame.right.inverse
        d = flatten_blocks(tangent.right) @ frame.left.inverse
        x, y, overlap = split_tangent(frame.left.basis, frame.right.basis, c, d)
        return TangentXKY(x, (overlap.left + overlap.right.mT) / 2, y, x.mT @ x, y.mT @ y)

    def step_limit(self, frame: PairFrame, coords: TangentXKY) -> Tensor:
        # ‖Ξ‖₂ < sS/(s + S), with s the smallest σ_r of a block and S that of the stacked matrix.
        left, right = (linalg.triangular_inverse(_block_lower(x)) for x in frame.point)
        blocks = linalg.norm_bound(right[:, None] @ left[:, :, None].mT)
        whole = linalg.norm_bound(frame.right.inverse.mT @ frame.left.inverse)
        return 1 / (blocks.amax((1, 2)) + whole) / self.spectral_norm(frame, coords)

    def retract(
        self, frame: PairFrame, coords: TangentXKY, scale: Tensor, options: StepOptions
    ) -> Landing:
        g = per_member(scale, coords.k)
        r_a, r_b = frame.left.triangle, frame.right.triangle
        eye = linalg.identity_like(r_a)
        core = r_a @ r_b.mT + g * coords.k
        unconverged = None
        # Both retractions are W' = (U P + γX) N⁻¹ (V + γY F)ᵀ. The change of the core, P N⁻¹ − S,
        # is built from its small terms: as a difference, rounding would swallow a small step.
        if options.retraction == "svd":
            yy = g * g * coords.yy
            p, f, unconverged = linalg.best_rank_core(core, g * g * coords.xx, yy)
            grown = f.mT @ yy @ f
            n_inverse = linalg.inverse(eye + grown)
            change = g * coords.k + yy @ f - p @ n_inverse @ grown
        else:
            f = linalg.inverse(core).mT
            n_inverse = eye
            change = g * coords.k
        delta = frame.left.inverse @ change @ frame.right.inverse.mT
        # Gauge: half of the core's relative change Δ goes to each factor, less where Δ is large,
        # so that I + τΔ is always well conditioned. The product does not depend on τ.
        size = linalg.squared_norm(delta, 2).sqrt()
        tau = per_member(0.25 / size.clamp_min(0.5), delta)
        split = linalg.inverse(eye + tau * delta)
        left_change, right_change = (1 - tau) * (delta @ split), tau * delta.mT
        v_new = r_b + r_b @ right_change
        new = NewCoefficients(
            u=r_a + r_a @ left_change,
            v=v_new,
            x=g * (n_inverse @ frame.right.inverse.mT @ split),
            y=g * (f @ v_new),
        )
        a, b = flatten_blocks(frame.point.left), flatten_blocks(frame.point.right)
        left = a + (a @ left_change + coords.x @ new.x)
        right = b + (b @ right_change + coords.y @ new.y)
        point = Pair(left.view_as(frame.point.left), right.view_as(frame.point.right))
        return Landing(point, new, unconverged)

    def depart(self, frame: PairFrame, coords: TangentXKY, tangent: Pair, landing: Landing) -> Pair:
        bases = Bases(frame.left.basis, frame.right.basis)
        kept = self.carry(bases, coords, landing.record, deskew=False)
        return Pair(kept.left.view_as(tangent.left), kept.right.view_as(tangent.right))


def _block_lower(blocks: Tensor) -> Tensor:
    """Cholesky factor of each block's Gram matrix, (batch, blocks, r, r)."""
    return linalg.cholesky(blocks.mT @ blocks).lower
