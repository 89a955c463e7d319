"""What the two embedded geometries share: tangent vectors downstairs, as U K Vᵀ + X Vᵀ + U Yᵀ.

Coordinates     a tangent vector or momentum M is kept as (M B, Mᵀ A): the shape of the factors,
                free of any frame, and updated by the raw factor gradients.
Metric          ⟨Ξ, H⟩ Frobenius, ‖Ξ‖² = ‖K‖² + ‖X‖² + ‖Y‖².
Gradient        orthogonal projection of the gradient of W, in these coordinates (G_A, G_B).
Transport       orthogonal projection at the new point: (M B', Mᵀ A').
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import linalg
from .base import Geometry, Pair


class TangentXKY(NamedTuple):
    """X (batch, I·m, r), K (batch, r, r), Y (batch, J·n, r), and the Grams of X and Y."""

    x: Tensor
    k: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor


class Bases(NamedTuple):
    """Orthonormal U (batch, I·m, r) and V (batch, J·n, r)."""

    u: Tensor
    v: Tensor


class NewCoefficients(NamedTuple):
    """The new factors A' = U u + X x, B' = V v + Y y, each coefficient (batch, r, r)."""

    u: Tensor
    v: Tensor
    x: Tensor
    y: Tensor


class EmbeddedGeometry(Geometry):
    """Norms and transport of the header above; subclasses give frames and retractions."""

    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        # Coordinates average the two overlaps, which is already the cheaper repair.
        return grad

    def metric_norm(self, frame: object, coords: TangentXKY) -> Tensor:
        x, k, y = (linalg.squared_norm(part, 2) for part in (coords.x, coords.k, coords.y))
        return torch.sqrt(x + k + y)

    def spectral_norm(self, frame: object, coords: TangentXKY) -> Tensor:
        cc = coords.k.mT @ coords.k + coords.xx
        return linalg.spectral_norm(cc, coords.k, coords.yy, torch.zeros_like(coords.k), 1, 1)

    def carry(self, bases: Bases, coords: TangentXKY, new: NewCoefficients, deskew: bool) -> Pair:
        """(M B', Mᵀ A'), less the symmetric part of its overlap with the new point if asked."""
        left_u = coords.k @ new.v + coords.yy @ new.y
        left_x, right_y = new.v, new.u
        right_v = coords.k.mT @ new.u + coords.xx @ new.x
        if deskew:
            overlap = new.u.mT @ left_u + new.x.mT @ coords.xx @ new.v
            out = linalg.sym(overlap)
            left_u, left_x = left_u - new.u @ out, left_x - new.x @ out
            right_v, right_y = right_v - new.v @ out, right_y - new.y @ out
        return Pair(bases.u @ left_u + coords.x @ left_x, bases.v @ right_v + coords.y @ right_y)


def split_tangent(u: Tensor, v: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Pair]:
    """X, Y orthogonal to the bases, and the overlaps UᵀC, VᵀD, of a vector with M V = C, Mᵀ U = D.

    Each side removes its own overlap, so X and Y are orthogonal to the bases even when the two,
    transposes of each other for a loss of the product, differ.
    """
    overlap = Pair(u.mT @ c, v.mT @ d)
    x, y = c - u @ overlap.left, d - v @ overlap.right
    # Twice: where the vector lies in the span all but for rounding, the first pass leaves rounding.
    return x - u @ (u.mT @ x), y - v @ (v.mT @ y), overlap
