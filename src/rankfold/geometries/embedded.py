"""What the two embedded geometries share: tangent vectors downstairs, as U K Vᵀ + X Vᵀ + U Yᵀ.

Coordinates     a tangent vector or momentum M is kept as (M B, Mᵀ A): the shape of the factors,
                free of any frame, and updated by the raw factor gradients.
Metric          ⟨Ξ, H⟩ Frobenius, ‖Ξ‖² = ‖K‖² + ‖X‖² + ‖Y‖².
Gradient        orthogonal projection of the gradient of W, in these coordinates (G_A, G_B).
Transport       orthogonal projection at the new point: (M B', Mᵀ A').
Schatten norms  of Ξ itself; p = 2 is the metric.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels, linalg, schatten, tall
from ..steepest import steepest_tangent
from ..together import both
from .base import Geometry, Landing, Pair, flatten_blocks

Two = tuple[Tensor, Tensor]


class Side(NamedTuple):
    """U and X of one side as combinations of two tall matrices (batch, m, r) that exist already.

    U = ``a to_u`` and X = ``t to_x`` − U ``inner``; None stands for the identity. ``own`` is UᵀU,
    of the numbers actually stored.
    """

    a: Tensor
    t: Tensor
    to_u: Tensor | None
    to_x: Tensor | None
    inner: Tensor
    own: Tensor

    def coefficients(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of U u + X x, in terms of ``a`` and ``t``."""
        u = tall.add_product(u, self.inner, x, alpha=-1.0)
        return (
            u if self.to_u is None else self.to_u @ u,
            x if self.to_x is None else self.to_x @ x,
        )

    def overlaps(self, of_a: Tensor, of_t: Tensor) -> tuple[Tensor, Tensor]:
        """UᵀN and XᵀN for a tall N, from ``aᵀ N`` and ``tᵀ N`` (batch, r, r)."""
        u = of_a if self.to_u is None else self.to_u.mT @ of_a
        x = of_t if self.to_x is None else self.to_x.mT @ of_t
        return u, tall.add_product(x, self.inner.mT, u, alpha=-1.0)


class TangentXKY(NamedTuple):
    """The sides with U, X and V, Y; K and the Gram matrices of X and Y, each (batch, r, r).

    And the square of the length, (batch,).
    """

    left: Side
    right: Side
    k: Tensor
    xx: Tensor
    yy: Tensor
    square: Tensor

    def combine(self, u: Two, x: Two) -> Pair:
        """U u + X x and V u + Y x with each side's own u and x (batch, r, r)."""
        return self.combined(*self._coefficients(u, x))

    def combined(self, c_a: Two, c_t: Two) -> Pair:
        """``a c_a + t c_t`` of either side, in terms of what U, X, V and Y are combinations of."""
        return Pair(*both(tall.combine, self._a, c_a, self._t, c_t))

    def move(self, u: Two, x: Two, alive: Tensor) -> Pair:
        """The same, added to what ``a`` is of either side, for members ``alive`` (batch,)."""
        return self.moved(*self._coefficients(u, x), alive)

    def moved(self, c_a: Two, c_t: Two, alive: Tensor) -> Pair:
        """``a + a c_a + t c_t`` of either side, or ``a`` for members that are not ``alive``."""
        return Pair(*both(tall.move, self._a, c_a, self._t, c_t, shared=(alive,)))

    def overlaps(self, new: Two) -> tuple[Two, Two]:
        """UᵀN and XᵀN of the left side's N (batch, m, r), and the right side's."""
        a, t = both(tall.overlap, self._a, new), both(tall.overlap, self._t, new)
        return self.left.overlaps(a[0], t[0]), self.right.overlaps(a[1], t[1])

    def _coefficients(self, u: Two, x: Two) -> tuple[Two, Two]:
        """Of both sides' ``a``, and of both sides' ``t``."""
        (a, t), (b, s) = self.left.coefficients(u[0], x[0]), self.right.coefficients(u[1], x[1])
        return (a, b), (t, s)

    @property
    def _a(self) -> Two:
        return self.left.a, self.right.a

    @property
    def _t(self) -> Two:
        return self.left.t, self.right.t


class NewCoefficients(NamedTuple):
    """The new factors A' = U u + X x, B' = V v + Y y, each coefficient (batch, r, r)."""

    u: Tensor
    v: Tensor
    x: Tensor
    y: Tensor


def squared_length(k: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """‖K‖² + ‖X‖² + ‖Y‖², (batch,)."""
    return linalg.squared_norm(k, 2) + (linalg.trace(xx) + linalg.trace(yy)).clamp_min(0)


class EmbeddedGeometry(Geometry):
    """Norms and transport of the header above; subclasses give frames and retractions."""

    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        # Coordinates average the two overlaps, which is already the cheaper repair.
        return grad

    def metric_square(self, frame: object, coords: TangentXKY) -> Tensor:
        return coords.square

    def spectral_norm(self, frame: object, coords: TangentXKY) -> Tensor:
        cc = coords.k.mT @ coords.k + coords.xx
        return linalg.spectral_norm(cc, coords.k, coords.yy, torch.zeros_like(coords.k), 1, 1)

    @abstractmethod
    def triangles(self, frame: Any) -> tuple[Tensor, Tensor]:
        """R_A and R_B (batch, r, r) with A = U R_A, B = V R_B."""

    def steepest(self, frame: Any, coords: TangentXKY, p: float, floor: float) -> TangentXKY:
        # Ξ is the core [[K, Yᵀ], [X, 0]] between the frames (U, X) and (V, Y) made orthonormal.
        x, y = (schatten.roots(gram, coords.square) for gram in (coords.xx, coords.yy))
        r, zero = coords.k.shape[-1], torch.zeros_like(coords.k)
        top, bottom = torch.cat([coords.k, y.root], -1), torch.cat([x.root, zero], -1)

        def normal(core: Tensor) -> Tensor:
            inner = linalg.sym(core[..., :r, :r]) if self.isometry else zero
            outer = core[..., r:, r:]
            return torch.cat([torch.cat([inner, zero], -1), torch.cat([zero, outer], -1)], -2)

        found, _ = steepest_tangent(torch.cat([top, bottom], -2), normal, p, floor)
        k, to_x, to_y = found[..., :r, :r], found[..., r:, :r], found[..., :r, r:].mT
        return self.tangent(frame, coords, k, x.inverse @ to_x, y.inverse @ to_y)

    def tangent(
        self, frame: Any, coords: TangentXKY, k: Tensor, to_x: Tensor, to_y: Tensor
    ) -> TangentXKY:
        """U k Vᵀ + X to_x Vᵀ + U (Y to_y)ᵀ, each coefficient (batch, r, r)."""
        r_a, r_b = self.triangles(frame)
        made = coords.combine((k @ r_b, k.mT @ r_a), (to_x @ r_b, to_y @ r_a))
        vector: TangentXKY = self.coordinates(frame, Pair(*(x[:, None] for x in made)))
        return vector

    def vector(self, frame: Any, coords: TangentXKY) -> Pair:
        r_a, r_b = self.triangles(frame)
        r_a, r_b = r_a.expand_as(coords.k), r_b.expand_as(coords.k)
        return coords.combine((coords.k @ r_b, coords.k.mT @ r_a), (r_b, r_a))

    def matrix(self, coords: TangentXKY) -> Tensor:
        """The tangent vector as a matrix (batch, I·m, J·n): for checks, never in a step."""
        eye, zero = linalg.identity_like(coords.k).expand_as(coords.k), 0 * coords.k
        u, v = coords.combine((eye, eye), (zero, zero))
        x, y = coords.combine((zero, zero), (eye, eye))
        return (u @ coords.k + x) @ v.mT + u @ y.mT

    def carry(self, coords: TangentXKY, new: NewCoefficients, deskew: bool) -> Pair:
        """(M B', Mᵀ A'), less the symmetric part of its overlap with the new point if asked."""
        if kernels.serve_small(coords.k):
            left, right = coords.left, coords.right
            to = [x for x in (left.to_u, right.to_u, left.to_x, right.to_x) if x is not None]
            inner, grams = (left.inner, right.inner), (coords.xx, coords.yy)
            made = kernels.carrying.carry(coords.k, grams, new, inner, to, deskew)
            return coords.combined((made[0], made[1]), (made[2], made[3]))
        xx_x = coords.xx @ new.x
        left_u = tall.add_product(coords.yy @ new.y, coords.k, new.v)
        left_x, right_y = new.v, new.u
        right_v = tall.add_product(xx_x, coords.k.mT, new.u)
        if deskew:
            overlap = tall.add_product(new.u.mT @ left_u, xx_x.mT, new.v)
            subtract = partial(tall.add_product, c=overlap + overlap.mT, alpha=-0.5)
            left_u, left_x = subtract(left_u, new.u), subtract(left_x, new.x)
            right_v, right_y = subtract(right_v, new.v), subtract(right_y, new.y)
        return coords.combine((left_u, right_v), (left_x, right_y))

    def follow(self, frame: Any, tangent: Pair, landing: Landing) -> Pair:
        # What `carry` does, but the new factors are no combinations of this vector's parts.
        coords = self.coordinates(frame, tangent)
        new = Pair(*map(flatten_blocks, landing.point))
        (u, x), (v, y) = coords.overlaps(new)
        inner = coords.k @ v + y
        left, right = coords.combine((inner, coords.k.mT @ u + x), (v, u))
        if self.isometry:
            out = linalg.sym(u.mT @ inner + x.mT @ v)
            left, right = both(tall.subtract, (left, right), new, (out, out))
        return Pair(left.view_as(tangent.left), right.view_as(tangent.right))
