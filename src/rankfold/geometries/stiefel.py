"""What the partial-isometry geometries share: factors with orthonormal columns, upstairs.

Point           U_i (m_i×r), V_j (n_j×r) with orthonormal columns, W_ij = U_i V_jᵀ, up to one common
                rotation (U_i Q, V_j Q).
Tangent         (Ξ_Ui, Ξ_Vj) with U_iᵀΞ_Ui and V_jᵀΞ_Vj skew, horizontal when
                J Σ U_iᵀΞ_Ui + I Σ V_jᵀΞ_Vj = 0.
Retractions     factor by factor. polar: (U + Ξ)((U + Ξ)ᵀ(U + Ξ))^(-1/2), independent of the gauge;
                qr: the Q factor with a positive diagonal of R.
Transport       projection at the new point, onto the tangent space and then the horizontal one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels, linalg, tall
from ..linalg import skew, sym
from ..tall import Grams, Plus
from .base import Geometry, Landing, Pair, StepOptions


class StiefelFrame(NamedTuple):
    """The point, and the block counts I and J."""

    point: Pair
    i: int
    j: int


class StiefelTangent(NamedTuple):
    """A tangent vector and, for each block, UᵀU, UᵀΞ_U and Ξ_UᵀΞ_U (batch, blocks, r, r)."""

    vector: Pair
    left: Grams
    right: Grams


class Correction(NamedTuple):
    """κ of one block as a sum of parts of the overlaps Uᵀ G, each with a number in front of it.

    The symmetric and the skew part of the block's own overlap, and the sums of the skew parts over
    all blocks of its own side and over those of the other side.
    """

    symmetric: float
    skew: float
    own_side: float
    other_side: float


class StiefelGeometry(Geometry):
    """A metric on products of Stiefel factors; subclasses give the gradient and the norm.

    Every gradient here is the factors' gradients, weighted by how many blocks a factor is in,
    less the point times an r×r matrix: ``G_Ui / J − U_i κ_i``.
    """

    isometry = True
    retractions = ("polar", "qr")

    @abstractmethod
    def correction(self, i: int, j: int) -> Correction:
        """κ_i for a factor among i on its own side and j on the other one."""

    def corrections(self, frame: StiefelFrame, overlap: Pair) -> Pair:
        """κ_i and κ_j (batch, blocks, r, r) from U_iᵀG_Ui and V_jᵀG_Vj."""
        i, j = frame.i, frame.j
        return _apply(overlap, self.correction(i, j), self.correction(j, i))

    def frame(self, point: Pair, damping: float = 0.0) -> StiefelFrame:
        return StiefelFrame(point, point.left.shape[1], point.right.shape[1])

    def gradient(self, frame: StiefelFrame, grad: Pair, repair: str = "average") -> Pair:
        u, v = frame.point
        overlaps = Pair(tall.overlap(u, grad.left), tall.overlap(v, grad.right))
        kappa = self.corrections(frame, overlaps)
        return Pair(
            tall.subtract(grad.left, u, kappa.left, 1 / frame.j),
            tall.subtract(grad.right, v, kappa.right, 1 / frame.i),
        )

    def arrive(self, frame: StiefelFrame, momentum: Pair) -> Pair:
        u, v = frame.point
        kappa = self._arrival(frame, momentum)
        return Pair(
            tall.subtract(momentum.left, u, kappa.left),
            tall.subtract(momentum.right, v, kappa.right),
        )

    def _arrival(self, frame: StiefelFrame, momentum: Pair) -> Pair:
        """What times the point has to be taken from a momentum to make it tangent, horizontal."""
        u, v = frame.point
        overlaps = Pair(tall.overlap(u, momentum.left), tall.overlap(v, momentum.right))
        left, right = (
            Correction(1.0, 0.0, 1 / (2 * own), 1 / (2 * other))
            for own, other in ((frame.i, frame.j), (frame.j, frame.i))
        )
        return _apply(overlaps, left, right)

    def mix(self, frame: StiefelFrame, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        u, v = frame.point
        overlaps = Pair(tall.overlap(u, grad.left), tall.overlap(v, grad.right))
        fresh, carried = self.corrections(frame, overlaps), self._arrival(frame, momentum)
        left, right = (torch.lerp(m, g, 1 - nu) for m, g in zip(carried, fresh, strict=True))
        share = 1 - nu
        return Pair(
            tall.subtract(grad.left, u, left, share / frame.j, Plus(momentum.left, nu)),
            tall.subtract(grad.right, v, right, share / frame.i, Plus(momentum.right, nu)),
        )

    def coordinates(self, frame: StiefelFrame, tangent: Pair) -> StiefelTangent:
        u, v = frame.point
        left, right = tall.grams(u, tangent.left), tall.grams(v, tangent.right)
        return StiefelTangent(tangent, left, right)

    def spectral_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        return linalg.spectral_norm(
            coords.left.square.sum(1),
            coords.left.cross.sum(1),
            coords.right.square.sum(1),
            coords.right.cross.sum(1),
            frame.i,
            frame.j,
        )

    def retract(
        self, frame: StiefelFrame, coords: StiefelTangent, scale: Tensor, options: StepOptions
    ) -> Landing:
        spread = gram_spread(options.reach)
        left, right = (
            _landing(grams, scale, options.retraction, spread)
            for grams in (coords.left, coords.right)
        )
        alive = left.norm.amax(1) + right.norm.amax(1) <= options.largest
        (u, v), (x, y) = frame.point, coords.vector
        new = Pair(
            tall.move(u, left.change, x, left.share, alive),
            tall.move(v, right.change, y, right.share, alive),
        )
        new, alive = finish(new, frame.point, alive, options.retraction, spread)
        return Landing(new, None, alive, None)


class Columns(NamedTuple):
    """Orthonormal columns U + U ``change`` + Ξ ``share``, (..., r, r), and their norm (...)."""

    change: Tensor
    share: Tensor
    norm: Tensor


def _apply(overlap: Pair, left: Correction, right: Correction) -> Pair:
    if kernels.serve_small(overlap.left, overlap.right):
        return Pair(*kernels.stiefel.corrections(*overlap, left, right))
    skews = [skew(x) for x in overlap]
    totals = [x.sum(1, keepdim=True) for x in skews]
    made = (
        c.symmetric * sym(x) + c.skew * s + (c.own_side * own + c.other_side * other)
        for c, x, s, own, other in zip(
            (left, right), overlap, skews, totals, reversed(totals), strict=True
        )
    )
    return Pair(*made)


def _landing(grams: Grams, scale: Tensor, retraction: str, spread: float | None) -> Columns:
    if retraction == "polar" and linalg.is_small(spread) and kernels.serve_small(grams.own):
        steps = linalg.newton_schulz_steps(spread, scale.dtype)
        return Columns(*kernels.stiefel.landing(*grams, scale, steps))
    g = tall.per_member(scale, grams.own)
    # What is left of a gradient that is all but normal is rounding, and not tangent; scaled to
    # a full step it would break the bound on the Gram matrix below.
    off = g * sym(grams.cross)
    across = g * (grams.cross - off @ grams.cross)  # (U − U off)ᵀ γΞ
    turned = grams.own - off @ grams.own
    gram = turned - turned @ off + across + across.mT + g * g * grams.square
    scaling, norm = orthonormal_scaling(gram, retraction, spread)
    eye = linalg.identity_like(scaling)
    return Columns(scaling - eye - off @ scaling, g * scaling, norm)


def orthonormal_scaling(
    gram: Tensor, retraction: str, spread: float | None
) -> tuple[Tensor, Tensor]:
    """What r×r makes columns with this Gram matrix (..., r, r) orthonormal, and their norm then.

    Exactly so where ``spread``, a bound on its eigenvalues' distance from 1, is small, roughly
    otherwise: see `finish`. The Gram matrix is that of the numbers actually stored, so errors of
    the past are repaired here and orthonormality does not drift.
    """
    if retraction == "qr":
        scaling = linalg.cholesky(gram).inverse.mT
    else:
        scaling = linalg.polar_scaling(gram, spread)
    return scaling, linalg.squared_norm_weighted(scaling, gram).sqrt()


def finish(
    new: Pair, old: Pair, alive: Tensor, retraction: str, spread: float | None
) -> tuple[Pair, Tensor]:
    """A second pass over columns that `orthonormal_scaling` has brought near orthonormality.

    Members (batch,) that are not ``alive``, or cannot be made orthonormal, stay where they were;
    returned with the members that did move.
    """
    if linalg.is_small(spread):
        return new, alive
    scalings = []
    for x in new:
        gram = tall.gram(x)
        polar = retraction != "qr"
        scaling = linalg.polish_scaling(gram) if polar else linalg.cholesky(gram).inverse.mT
        alive = alive & scaling.isfinite().flatten(1).all(1)
        scalings.append(scaling)
    moved = (
        torch.where(tall.per_member(alive, x), x @ scaling, before)
        for x, scaling, before in zip(new, scalings, old, strict=True)
    )
    return Pair(*moved), alive


def weighted_square(frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
    """J Σ‖Ξ_Ui‖² + I Σ‖Ξ_Vj‖², (batch,)."""
    left, right = (
        grams.square.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
        for grams in (coords.left, coords.right)
    )
    return frame.j * left + frame.i * right


def gram_spread(reach: float | None) -> float | None:
    """How far (U + Ξ)ᵀ(U + Ξ) = I + ΞᵀΞ can be from I for a step of length ``reach``.

    No metric here lets a factor move by more than √2 of the step's length. The margin is for
    factors that were reloaded from bfloat16 and are not yet orthonormal to working precision.
    """
    return None if reach is None else 2 * reach**2 + 0.05
