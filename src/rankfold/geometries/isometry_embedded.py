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

import math

import torch
from torch import Tensor

from .. import kernels, linalg, polar, rank_core, schatten, tall
from ..linalg import skew
from ..polar import Spread
from ..steepest import steepest_tangent
from ..together import both
from .base import Landing, Pair, StepOptions, flatten_blocks
from .embedded import EmbeddedGeometry, NewCoefficients, Side, TangentXKY, squared_length
from .settling import MARGIN, finish, orthonormal_scaling
from .stiefel import (
    Correction,
    StiefelFrame,
    StiefelGeometry,
    StiefelTangent,
    steepest_factor,
    weighted_square,
)
from .stiefel import Side as StiefelSide


class IsometryEmbedded(EmbeddedGeometry):
    """The single pair; see the header of this file."""

    name = "isometry-embedded"
    isometry = True
    retractions = ("svd",)

    def frame(self, point: Pair, damping: float = 0.0) -> Pair:
        return Pair(flatten_blocks(point.left), flatten_blocks(point.right))

    def coordinates(self, frame: Pair, tangent: Pair) -> TangentXKY:
        c, d = flatten_blocks(tangent.left), flatten_blocks(tangent.right)
        # X is formed: as a difference of Gram matrices it would drown in the symmetric part of UᵀC,
        # which is large near an optimum, and is not part of the step.
        overlaps = both(tall.overlap, frame, (c, d))
        x, y = both(tall.subtract, (c, d), frame, overlaps)
        # Where the vector lies in the span all but for rounding, one pass leaves rounding. It is
        # not part of X, but stays in the Gram matrix: norms that count it keep such steps short.
        (own_u, rest_x, xx), (own_v, rest_y, yy) = both(tall.grams, frame, (x, y))
        left = Side(frame.left, x, None, None, rest_x, own_u)
        right = Side(frame.right, y, None, None, rest_y, own_v)
        if kernels.serve_small(xx):
            k, square = kernels.frames.skew_core(*overlaps, xx, yy)
        else:
            k = skew(overlaps[0] - overlaps[1]) / 2
            square = squared_length(k, xx, yy)
        return TangentXKY(left, right, k, xx, yy, square)

    def triangles(self, frame: Pair) -> tuple[Tensor, Tensor]:
        one = linalg.identity_like(frame.left[..., : frame.left.shape[-1], :])
        return one, one

    def whitened(self, frame: Pair, coords: TangentXKY, options: StepOptions) -> TangentXKY:
        floor, sides = options.norm_floor, options.sides
        x, y = (schatten.roots(gram, coords.square) for gram in (coords.xx, coords.yy))
        k, r = coords.k, coords.k.shape[-1]
        left = steepest_factor(k, x.root, math.inf, floor).direction
        right = steepest_factor(k.mT, y.root, math.inf, floor).direction
        if sides is not None:
            left, right = (
                side[:, None, None] * d for side, d in zip(sides, (left, right), strict=True)
            )
        inner = left[:, :r] + right[:, :r].mT
        return self.tangent(frame, coords, inner, x.inverse @ left[:, r:], y.inverse @ right[:, r:])

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
        p, f, _, unconverged = rank_core.best_rank_core(eye + g * coords.k, xx, yy, eye)
        # The rank-r approximation is (U P + γX) N⁻¹ (V + γY F)ᵀ. Multiplying by orthonormal V'ᵀ
        # on the right does not change a polar factor, so two polar factors of tall matrices do.
        # In short steps these matrices are near I, and are multiplied by what they have beside it:
        # in sums all that is added after the 1 of a diagonal would be rounded to it, which is most
        # of a step's error. In long ones a scaling is near 0, and is what would be rounded away.
        short = polar.is_small(spread)
        one = float(short)
        gram = _moved_gram(coords.right, g, yy, None, f)
        v_scale, v_norm = orthonormal_scaling(gram, "polar", spread)
        p, v = p - one * eye, v_scale - one * eye
        gram = _turned(_moved_gram(coords.left, g, xx, p, None, one), v, one)
        u_scale, u_norm = orthonormal_scaling(gram, "polar", spread)
        total = _product(v, u_scale - one * eye, one)
        u = _product(p, total, one)
        y = tall.add_product(f, f, v, beta=one)
        new = NewCoefficients(one * eye + u, v_scale, g * (one * eye + total), g * y)
        alive = u_norm + v_norm <= options.largest
        changes = (u, v) if short else (new.u - eye, new.v - eye)
        point = coords.move(changes, (new.x, new.y), alive)
        if not short:
            point, alive = finish(point, frame, alive, "polar")
        return Landing(Pair(*(x[:, None] for x in point)), new, alive, unconverged)

    def _retract_in_one(self, coords: TangentXKY, scale: Tensor, options: StepOptions) -> Landing:
        """The retraction with all of its r×r work in one kernel."""
        new, to, unconverged, norm = kernels.retraction.isometry_embedded(
            coords.k,
            (coords.xx, coords.yy),
            (coords.left.own, coords.right.own),
            (coords.left.inner, coords.right.inner),
            scale,
            rank_core.rank_iterations(scale.dtype),
            rank_core.left_to_move(scale.dtype),
        )
        alive = norm <= options.largest
        coefficients = NewCoefficients(*new)
        moved = coords.moved((to[0], to[1]), (coefficients.x, coefficients.y), alive)
        point = Pair(*(x[:, None] for x in moved))
        return Landing(point, coefficients, alive, unconverged)

    def depart(self, frame: Pair, coords: TangentXKY, tangent: Pair, landing: Landing) -> Pair:
        kept = self.carry(coords, landing.record, deskew=True)
        return Pair(kept.left[:, None], kept.right[:, None])


# Where ``one`` is 1, an r×r matrix is given and returned as what it has beside I, and as itself
# where it is 0.


def _product(a: Tensor, b: Tensor, one: float) -> Tensor:
    """The product of two matrices (..., r, r)."""
    return tall.add_product(a + b, a, b, beta=one)


def _turned(gram: Tensor, turn: Tensor, one: float) -> Tensor:
    """The Gram matrix (..., r, r), as itself, of columns times ``turn``."""
    half = gram @ turn
    return tall.add_product(gram + half + half.mT, turn.mT, half, beta=one)


def _moved_gram(
    side: Side, g: Tensor, square: Tensor, u: Tensor | None, x: Tensor | None, one: float = 0.0
) -> Tensor:
    """Gram matrix of U u + γX x, with ``square`` that of γX before U ``inner`` is taken from it.

    None stands for the identity, and ``x`` is given as itself. Exact whatever UᵀU is: factors
    reloaded from a lower precision are orthonormal to that alone.
    """
    inner = g * side.inner
    missing = inner - side.own @ inner  # what is left of Uᵀ(X − U inner)
    own, square = side.own, tall.add_product(square, inner.mT, inner + missing, alpha=-1.0)
    if u is not None:
        own, missing = _turned(own, u, one), tall.add_product(missing, u.mT, missing, beta=one)
    if x is not None:
        square, missing = x.mT @ square @ x, missing @ x
    return own + missing + missing.mT + square


class IsometryEmbeddedGrid(StiefelGeometry):
    """The hybrid for grids larger than 1×1; see the header of this file."""

    name = "isometry-embedded"

    def steepest(
        self, frame: StiefelFrame, coords: StiefelTangent, p: float, floor: float
    ) -> StiefelTangent:
        # The stacked Ξ is a core of (I + 1)×(J + 1) blocks, K_ij = Ω_i − Ψ_j with X̂ below every
        # column and Ŷᵀ beside every row, between all U_i and X, all V_j and Y in frames.
        (cross_u, x), (cross_v, y) = (_stacked_core(side) for side in coords)
        (i, j), r = (frame.i, frame.j), cross_u.shape[-1]
        inner = skew(cross_u)[:, :, None] - skew(cross_v)[:, None]
        below = x.root[:, None].expand(-1, j, r, r)
        beside = y.root[:, None].expand(-1, i, r, r)
        core = _assemble(inner, below, beside)

        def normal(core: Tensor) -> Tensor:
            rows, columns, below, beside = _tangent_means(core, i, j, r)
            inner = rows[:, :, None] - columns[:, None]
            sides = below[:, None].expand(-1, j, r, r), beside[:, None].expand(-1, i, r, r)
            return core - _assemble(inner, *sides)

        found, _ = steepest_tangent(core, normal, p, floor)
        rows, columns, below, beside = _tangent_means(found, i, j, r)
        # U_i Ω_i + X_i to_x and V_j Ψ_j + Y_j to_y.
        to = (x.inverse @ below)[:, None], (y.inverse @ beside)[:, None]
        made = (
            tall.combine(side.u, inner - cross @ to, side.xi, to)
            for side, inner, cross, to in zip(
                coords, (rows, columns), (cross_u, cross_v), to, strict=True
            )
        )
        return self.coordinates(frame, Pair(*made))

    def inner_parts(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        # Downstairs a factor's moves along itself are those of its partners too: the part of U_i
        # is the mean over its row of Ω_i − Ψ_j.
        return left - right.mean(1, keepdim=True), right - left.mean(1, keepdim=True)

    def correction(self, i: int, j: int) -> Correction:
        # Σ skew U_iᵀG_Ui and −Σ skew V_jᵀG_Vj are one matrix for a loss of the products. Where they
        # differ, the nearest consistent blocks spread the difference evenly over all factors.
        half = 1 / (2 * j * (i + j))
        return Correction(1 / j, 0.0, 2 * half + 1 / (2 * i * (i + j)), half)

    def metric_square(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        # ‖Ξ_ij‖² = ‖X_i‖² + ‖Y_j‖² + ‖Ω_i − Ψ_j‖², summed over the grid.
        crossed = (coords.left.cross().sum(1) * coords.right.cross().sum(1)).sum((-2, -1))
        return (weighted_square(frame, coords) - 2 * crossed).clamp_min(0)


def _stacked_core(side: StiefelSide) -> tuple[Tensor, schatten.Roots]:
    """U_iᵀΞ_i = Ω_i (batch, I, r, r) of U_i Ω_i + X_i, and the roots of ΣX_iᵀX_i."""
    cross, square, outer = side.split()
    return cross, schatten.roots(outer.sum(1), linalg.trace(square).sum(1))


def _assemble(inner: Tensor, below: Tensor, beside: Tensor) -> Tensor:
    """Blocks (batch, I, J, r, r), (batch, J, r, r) and, transposed, (batch, I, r, r) in one matrix.

    Its last block is zero.
    """
    top = torch.cat([inner, beside.mT[:, :, None]], 2)
    corner = torch.zeros_like(below[:, :1])
    whole = torch.cat([top, torch.cat([below, corner], 1)[:, None]], 1)
    return whole.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _tangent_means(core: Tensor, i: int, j: int, r: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ω_i, Ψ_j, X̂ and Ŷ of the tangent vector nearest to a core ((I + 1)·r rows).

    K_ij = Ω_i − Ψ_j is fitted to the skew parts by their means over rows and columns, with
    J ΣΩ_i + I ΣΨ_j = 0.
    """
    blocks = core.reshape(-1, i + 1, r, j + 1, r).transpose(2, 3)
    inner = skew(blocks[:, :i, :j])
    half = inner.mean((1, 2))[:, None] / 2
    below, beside = blocks[:, i, :j].mean(1), blocks[:, :i, j].mean(1).mT
    return inner.mean(2) - half, half - inner.mean(1), below, beside


def _gram_spread(reach: float | None) -> Spread | None:
    """Bound on the distance from I of the two Gram matrices in `IsometryEmbedded.retract`.

    For a step of length t the inverses of I + γK have norm at most 1, and both matrices stay
    within 3t² of I up to t = ½, where the iteration still has room to spare.
    """
    return None if reach is None or reach > 0.5 else Spread(3 * reach**2 + MARGIN)
