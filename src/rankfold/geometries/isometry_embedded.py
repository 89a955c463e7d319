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

from .. import kernels, linalg, polar, tall
from ..linalg import skew
from .base import Landing, Pair, StepOptions, flatten_blocks
from .embedded import EmbeddedGeometry, NewCoefficients, Side, TangentXKY, squared_length
from .stiefel import (
    Correction,
    StiefelFrame,
    StiefelGeometry,
    StiefelTangent,
    finish,
    orthonormal_scaling,
    weighted_square,
)


class IsometryEmbedded(EmbeddedGeometry):
    """The single pair; see the header of this file."""

    name = "isometry-embedded"
    isometry = True
    retractions = ("svd",)

    def frame(self, point: Pair, damping: float = 0.0) -> Pair:
        return Pair(flatten_blocks(point.left), flatten_blocks(point.right))

    def coordinates(self, frame: Pair, tangent: Pair) -> TangentXKY:
        c, d = flatten_blocks(tangent.left), flatten_blocks(tangent.right)
        left, k_left, xx = _split(frame.left, c)
        right, k_right, yy = _split(frame.right, d)
        k = skew(k_left - k_right) / 2
        return TangentXKY(left, right, k, xx, yy, squared_length(k, xx, yy))

    def triangles(self, frame: Pair) -> tuple[Tensor, Tensor]:
        one = linalg.identity_like(frame.left[..., : frame.left.shape[-1], :])
        return one, one

    def step_limit(self, frame: Pair, coords: TangentXKY) -> Tensor:
        return 1 / self.spectral_norm(frame, coords)  # ‖Ξ‖₂ < 1

    def retract(
        self, frame: Pair, coords: TangentXKY, scale: Tensor, options: StepOptions
    ) -> Landing:
        spread = _gram_spread(options.reach)
        if polar.is_small(spread) and kernels.serve_small(coords.k):
            return self._retract_in_one(coords, scale, options)
        g = tall.per_member(scale, coords.k)
        eye = linalg.identity_like(coords.k)
        xx, yy = g * g * coords.xx, g * g * coords.yy
        p, f, _, unconverged = linalg.best_rank_core(eye + g * coords.k, xx, yy, eye)
        # The rank-r approximation is (U P + γX) N⁻¹ (V + γY F)ᵀ. Multiplying by orthonormal V'ᵀ
        # on the right does not change a polar factor, so two polar factors of tall matrices do.
        gram = _moved_gram(coords.right, g, yy, None, f)
        v_scale, v_norm = orthonormal_scaling(gram, "polar", spread)
        gram = v_scale.mT @ _moved_gram(coords.left, g, xx, p, None) @ v_scale
        u_scale, u_norm = orthonormal_scaling(gram, "polar", spread)
        total = v_scale @ u_scale
        new = NewCoefficients(u=p @ total, v=v_scale, x=g * total, y=g * (f @ v_scale))
        alive = u_norm + v_norm <= options.largest
        point = Pair(
            coords.left.move(new.u - eye, new.x, alive),
            coords.right.move(new.v - eye, new.y, alive),
        )
        (left, right), alive = finish(point, frame, alive, "polar", spread)
        return Landing(Pair(left[:, None], right[:, None]), new, alive, unconverged)

    def _retract_in_one(self, coords: TangentXKY, scale: Tensor, options: StepOptions) -> Landing:
        """The retraction with all of its r×r work in one kernel."""
        new, to, distances, norm = kernels.retraction.isometry_embedded(
            coords.k,
            (coords.xx, coords.yy),
            (coords.left.own, coords.right.own),
            (coords.left.inner, coords.right.inner),
            scale,
            linalg.rank_iterations(scale.dtype),
        )
        alive = norm <= options.largest
        coefficients = NewCoefficients(*new)
        left = tall.move(coords.left.a, to[0], coords.left.t, coefficients.x, alive)
        right = tall.move(coords.right.a, to[1], coords.right.t, coefficients.y, alive)
        point = Pair(left[:, None], right[:, None])
        return Landing(point, coefficients, alive, linalg.still_moving(distances))

    def depart(self, frame: Pair, coords: TangentXKY, tangent: Pair, landing: Landing) -> Pair:
        kept = self.carry(coords, landing.record, deskew=True)
        return Pair(kept.left[:, None], kept.right[:, None])


def _split(u: Tensor, c: Tensor) -> tuple[Side, Tensor, Tensor]:
    """One side of a vector with M V = C: its `Side`, UᵀC and XᵀX.

    X is formed: as a difference of Gram matrices it would drown in the symmetric part of UᵀC,
    which is large near an optimum, and is not part of the step.
    """
    overlap = tall.overlap(u, c)
    x = tall.subtract(c, u, overlap)
    # Where the vector lies in the span all but for rounding, one pass leaves rounding. It is not
    # part of X, but stays in the Gram matrix: norms that count it keep such steps short.
    own, rest, square = tall.grams(u, x)
    return Side(u, x, None, None, rest, own), overlap, square


def _moved_gram(
    side: Side, g: Tensor, square: Tensor, u: Tensor | None, x: Tensor | None
) -> Tensor:
    """Gram matrix of U u + γX x, with ``square`` that of γX before U ``inner`` is taken from it.

    None stands for the identity. Exact whatever UᵀU is: factors reloaded from a lower precision
    are orthonormal to that alone.
    """
    inner = g * side.inner
    missing = inner - side.own @ inner  # what is left of Uᵀ(X − U inner)
    own, square = side.own, tall.add_product(square, inner.mT, inner + missing, alpha=-1.0)
    if u is not None:
        own, missing = u.mT @ own @ u, u.mT @ missing
    if x is not None:
        square, missing = x.mT @ square @ x, missing @ x
    return own + missing + missing.mT + square


class IsometryEmbeddedGrid(StiefelGeometry):
    """The hybrid for grids larger than 1×1; see the header of this file."""

    name = "isometry-embedded"

    def has_schatten(self, p: float) -> bool:
        return False  # the metric is downstairs, and no factor can find its direction alone

    def correction(self, i: int, j: int) -> Correction:
        # Σ skew U_iᵀG_Ui and −Σ skew V_jᵀG_Vj are one matrix for a loss of the products. Where they
        # differ, the nearest consistent blocks spread the difference evenly over all factors.
        half = 1 / (2 * j * (i + j))
        return Correction(1 / j, 0.0, 2 * half + 1 / (2 * i * (i + j)), half)

    def metric_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        # ‖Ξ_ij‖² = ‖X_i‖² + ‖Y_j‖² + ‖Ω_i − Ψ_j‖², summed over the grid.
        crossed = (coords.left.cross().sum(1) * coords.right.cross().sum(1)).sum((-2, -1))
        square = weighted_square(frame, coords) - 2 * crossed
        return torch.sqrt(square.clamp_min(0))


def _gram_spread(reach: float | None) -> float | None:
    """Bound on the distance from I of the two Gram matrices in `IsometryEmbedded.retract`.

    For a step of length t the inverses of I + γK have norm at most 1, and both matrices stay
    within 3t² of I up to t = ½, where the iteration still has room to spare.
    """
    return None if reach is None or reach > 0.5 else 3 * reach**2 + 0.05
