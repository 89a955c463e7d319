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

from torch import Tensor

from .. import linalg
from ..linalg import skew, sym
from .base import Geometry, Landing, Pair, StepOptions, per_member


class StiefelFrame(NamedTuple):
    """The point, and the block counts I and J."""

    point: Pair
    i: int
    j: int


class StiefelTangent(NamedTuple):
    """A tangent vector and its overlaps U_iᵀΞ_Ui (batch, I, r, r), V_jᵀΞ_Vj (batch, J, r, r)."""

    vector: Pair
    overlap: Pair


class StiefelGeometry(Geometry):
    """A metric on products of Stiefel factors; subclasses give the gradient and the norm.

    Every gradient here is the factors' gradients, weighted by how many blocks a factor is in,
    less the point times an r×r matrix: ``G_Ui / J − U_i κ_i``.
    """

    isometry = True
    retractions = ("polar", "qr")

    @abstractmethod
    def corrections(self, frame: StiefelFrame, overlap: Pair) -> Pair:
        """κ_i and κ_j (batch, blocks, r, r) from U_iᵀG_Ui and V_jᵀG_Vj."""

    def frame(self, point: Pair, damping: float = 0.0) -> StiefelFrame:
        return StiefelFrame(point, point.left.shape[1], point.right.shape[1])

    def gradient(self, frame: StiefelFrame, grad: Pair, repair: str = "average") -> Pair:
        u, v = frame.point
        kappa = self.corrections(frame, Pair(u.mT @ grad.left, v.mT @ grad.right))
        return Pair(grad.left / frame.j - u @ kappa.left, grad.right / frame.i - v @ kappa.right)

    def arrive(self, frame: StiefelFrame, momentum: Pair) -> Pair:
        u, v = frame.point
        left, right = u.mT @ momentum.left, v.mT @ momentum.right
        vertical = vertical_part(frame, skew(left), skew(right))
        return Pair(
            momentum.left - u @ (sym(left) + vertical),
            momentum.right - v @ (sym(right) + vertical),
        )

    def coordinates(self, frame: StiefelFrame, tangent: Pair) -> StiefelTangent:
        u, v = frame.point
        return StiefelTangent(tangent, Pair(u.mT @ tangent.left, v.mT @ tangent.right))

    def spectral_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        left, right = coords.vector
        return linalg.spectral_norm(
            (left.mT @ left).sum(1),
            coords.overlap.left.sum(1),
            (right.mT @ right).sum(1),
            coords.overlap.right.sum(1),
            frame.i,
            frame.j,
        )

    def retract(
        self, frame: StiefelFrame, coords: StiefelTangent, scale: Tensor, options: StepOptions
    ) -> Landing:
        g = per_member(scale, coords.vector.left)
        # What is left of a gradient that is all but normal is rounding, and not tangent; scaled to
        # a full step it would break the bound on the Gram matrix below.
        moved = Pair(
            *(
                u + g * (xi - u @ sym(overlap))
                for u, xi, overlap in zip(frame.point, coords.vector, coords.overlap, strict=True)
            )
        )
        spread = gram_spread(options.reach)
        if options.retraction == "qr":
            new = Pair(*(linalg.positive_qr(x, spread) for x in moved))
        else:
            new = Pair(*(linalg.polar(x, spread)[0] for x in moved))
        return Landing(new, None, None)


def weighted_square(frame: StiefelFrame, vector: Pair) -> Tensor:
    """J Σ‖Ξ_Ui‖² + I Σ‖Ξ_Vj‖², (batch,)."""
    return frame.j * linalg.squared_norm(vector.left, 3) + frame.i * linalg.squared_norm(
        vector.right, 3
    )


def vertical_part(frame: StiefelFrame, left: Tensor, right: Tensor) -> Tensor:
    """The rotation all factors share, (batch, 1, r, r), from their skew overlaps."""
    i, j = frame.i, frame.j
    total = j * left.sum(1, keepdim=True) + i * right.sum(1, keepdim=True)
    return total / (2 * i * j)


def gram_spread(reach: float | None) -> float | None:
    """How far (U + Ξ)ᵀ(U + Ξ) = I + ΞᵀΞ can be from I for a step of length ``reach``.

    No metric here lets a factor move by more than √2 of the step's length. The margin is for
    factors that were reloaded from bfloat16 and are not yet orthonormal to working precision.
    """
    return None if reach is None else 2 * reach**2 + 0.05
