"""What the partial-isometry geometries share: factors with orthonormal columns, upstairs.

Point           U_i (m_i×r), V_j (n_j×r) with orthonormal columns, W_ij = U_i V_jᵀ, up to one common
                rotation (U_i Q, V_j Q).
Tangent         (Ξ_Ui, Ξ_Vj) with U_iᵀΞ_Ui and V_jᵀΞ_Vj skew, horizontal when
                J Σ U_iᵀΞ_Ui + I Σ V_jᵀΞ_Vj = 0.
Retractions     factor by factor. polar: (U + Ξ)((U + Ξ)ᵀ(U + Ξ))^(-1/2), independent of the gauge;
                qr: the Q factor with a positive diagonal of R.
Transport       projection at the new point, onto the tangent space and then the horizontal one.
Schatten norms  of the block-diagonal matrix of all √J (√w UᵀΞ_U; what is orthogonal to U), likewise
                for V, with w = 1 or, canonical, ½; the least over all lifts. p = 2 is the metric.
                whitened: every factor by itself, without √J, as it counts in one product.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels, linalg, polar, scalars, schatten, tall
from ..linalg import skew, sym
from ..steepest import Steepest, shares, steepest_tangent
from ..tall import Grams, Plus
from ..together import both
from .base import Geometry, Landing, Pair, Sides, StepOptions
from .settling import Moved, gram_spread


class StiefelFrame(NamedTuple):
    """The point, and the block counts I and J."""

    point: Pair
    i: int
    j: int


class Side(NamedTuple):
    """U and a tangent vector Ξ there, (batch, blocks, m, r).

    ``grams`` are all their overlaps where a kernel makes them at once, and None elsewhere, where
    each is made when it is wanted. ``known`` is UᵀΞ of every block as far as it follows from
    products made before, which is as far as columns are orthonormal, and ``sizes`` (batch, blocks)
    is ‖Ξ‖² if that is known.
    """

    u: Tensor
    xi: Tensor
    grams: Grams | None
    known: Tensor | None = None
    sizes: Tensor | None = None

    def cross(self) -> Tensor:
        """UᵀΞ of every block, (batch, blocks, r, r)."""
        return tall.overlap(self.u, self.xi) if self.grams is None else self.grams.cross

    def rotation(self) -> Tensor:
        """The same for a norm, in which what is not orthonormal in U may count or not."""
        return self.cross() if self.known is None else self.known

    def square(self) -> Tensor:
        """ΞᵀΞ of every block, (batch, blocks, r, r)."""
        return tall.gram(self.xi) if self.grams is None else self.grams.square

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """UᵀΞ, ΞᵀΞ, and XᵀX of X = Ξ − U UᵀΞ, of every block, (batch, blocks, r, r).

        XᵀX whatever UᵀU is, and be Ξ tangent or not: factors reloaded from a lower precision are
        orthonormal to that alone, and what is taken for zero there could leave eigenvalues below 0.
        """
        cross, square = self.cross(), self.square()
        own = tall.gram(self.u) if self.grams is None else self.grams.own
        twice = tall.add_product(cross, own, cross, 2.0, -1.0)
        return cross, square, tall.add_product(square, cross.mT, twice, alpha=-1.0)

    def squared_norm(self) -> Tensor:
        """‖Ξ‖² over all blocks, (batch,)."""
        if self.sizes is not None:
            return self.sizes.sum(1)
        if self.grams is None:
            return tall.square(self.xi).sum(1)
        return self.grams.square.diagonal(dim1=-2, dim2=-1).sum((-2, -1))


class StiefelTangent(NamedTuple):
    """A tangent vector, side by side."""

    left: Side
    right: Side


class Correction(NamedTuple):
    """κ of one block as a sum of parts of the overlaps Uᵀ G, each with a number in front of it.

    The symmetric and the skew part of the block's own overlap, and the sums of the skew parts over
    all blocks of its own side and over those of the other side.
    """

    symmetric: float
    skew: float
    own_side: float
    other_side: float


class Projection(NamedTuple):
    """A vector brought into a tangent space: itself, squares (batch, blocks) of it if asked for.

    And the overlaps UᵀG of the gradient in it, UᵀM of the momentum if there is one, and κ.
    """

    vector: Pair
    squares: Pair | None
    seen: Pair
    before: Pair | None
    kappa: Pair


class InnerCore(NamedTuple):
    """A tangent vector U K + X of every block as the core (√w K; X), X in an orthonormal frame.

    ``cross`` is UᵀΞ, of which K is the skew part and the rest is rounding; it and the ``roots`` of
    XᵀX are (batch, blocks, r, r). ``weight`` is √w, ``size`` (batch, 1) the norm of all blocks.
    """

    side: Side
    cross: Tensor
    roots: schatten.Roots
    weight: float
    size: Tensor

    @staticmethod
    def of(side: Side, weight: float) -> InnerCore:
        """The core of a vector."""
        cross, square, outer = side.split()
        squares = linalg.trace(square)
        roots = schatten.roots(outer, squares)
        return InnerCore(side, cross, roots, weight, squares.sum(1, keepdim=True).sqrt())

    def steepest(self, inner: Tensor, p: float, floor: float) -> Steepest:
        """The direction of every block by itself, (batch, blocks, 2r, r), with ``inner`` for K."""
        floors = (schatten.SMALLEST_PART * self.size).clamp_min(floor)
        return steepest_factor(self.weight * inner, self.roots.root, p, floors)

    def vector(self, core: Tensor) -> Tensor:
        """The vector (batch, blocks, m, r) that a core (batch, blocks, 2r, r) stands for."""
        r = self.cross.shape[-1]
        inner, to_x = core[..., :r, :] / self.weight, self.roots.inverse @ core[..., r:, :]
        return tall.combine(self.side.u, inner - self.cross @ to_x, self.side.xi, to_x)


def steepest_factor(inner: Tensor, outer: Tensor, p: float, floor: float | Tensor) -> Steepest:
    """The steepest direction for the moves (inner; outer) of one factor, (..., 2r, r).

    ``inner``, skew, is what it moves along itself, ``outer`` the rest, both (..., r, r).
    """
    r, zero = inner.shape[-1], torch.zeros_like(inner)

    def normal(core: Tensor) -> Tensor:
        return torch.cat([sym(core[..., :r, :]), zero], -2)

    return steepest_tangent(torch.cat([inner, outer], -2), normal, p, floor)


class StiefelGeometry(Geometry):
    """A metric on products of Stiefel factors; subclasses give the gradient and the norm.

    Every gradient here is the factors' gradients, weighted by how many blocks a factor is in,
    less the point times an r×r matrix: ``G_Ui / J − U_i κ_i``.
    """

    isometry = True
    retractions = ("polar", "qr")
    inner_weight = 1.0  # of UᵀΞ in the metric, beside what of Ξ is orthogonal to U

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
        return self.project(frame, grad, None, 0.0).vector

    def mix(self, frame: StiefelFrame, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        return self.project(frame, grad, momentum, nu).vector

    def project(
        self,
        frame: StiefelFrame,
        grad: Pair,
        momentum: Pair | None,
        nu: float,
        measured: bool = False,
    ) -> Projection:
        """The gradient, or its mix with a momentum, and what making it has shown."""
        seen = _overlaps(frame, grad)
        kappa, before, further = self.corrections(frame, seen), None, []
        if momentum is not None:
            before, further = _overlaps(frame, momentum), [momentum]
            carried = self.arrival(frame, before)
            kappa = Pair(*both(lambda m, g: torch.lerp(m, g, 1 - nu), carried, kappa))
        weight = 1.0 if momentum is None else 1 - nu

        def subtract(partners: int, g: Tensor, u: Tensor, c: Tensor, *m: Tensor) -> Any:
            plus = Plus(m[0], nu) if m else None
            subtracted = tall.measured_subtract if measured else tall.subtract
            return subtracted(g, u, c, weight / partners, plus)

        made: Any = by_partners(frame, subtract, grad, frame.point, kappa, *further)
        squares = Pair(made.left.square, made.right.square) if measured else None
        vector = Pair(made.left.rows, made.right.rows) if measured else made
        return Projection(vector, squares, seen, before, kappa)

    def descent(
        self,
        frame: StiefelFrame,
        grad: Pair,
        repair: str,
        momentum: Pair | None = None,
        nu: float = 0.0,
    ) -> tuple[Pair, StiefelTangent]:
        # Up to rank 64 one kernel makes all overlaps. Elsewhere squares may come with the vector,
        # and a metric that counts UᵀΞ apart need not make it again.
        small, served = kernels.serve_small(*frame.point), kernels.serve(*frame.point)
        apart = self.inner_weight != 1
        if small or not (apart or (served and momentum is None)):
            return super().descent(frame, grad, repair, momentum, nu)
        made = self.project(frame, grad, momentum, nu, measured=served)
        sides = list(self.coordinates(frame, made.vector))
        if made.squares is not None:
            sides = [x._replace(sizes=y) for x, y in zip(sides, made.squares, strict=True)]
        if apart:
            known = [made.seen.left / frame.j, made.seen.right / frame.i]
            if made.before is not None:
                pairs = zip(made.before, known, strict=True)
                known = [torch.lerp(old, new, 1 - nu) for old, new in pairs]
            turned = zip(sides, known, made.kappa, strict=True)
            sides = [side._replace(known=x - kappa) for side, x, kappa in turned]
        return made.vector, StiefelTangent(*sides)

    def arrive(self, frame: StiefelFrame, momentum: Pair, *, given: bool = False) -> Pair:
        subtract = partial(tall.subtract, given=given)
        out = self.arrival(frame, _overlaps(frame, momentum))
        return Pair(*both(subtract, momentum, frame.point, out))

    def arrival(self, frame: StiefelFrame, overlaps: Pair) -> Pair:
        """What times the point has to be taken from a momentum with these overlaps, Uᵀ M.

        To make it tangent and horizontal.
        """
        left, right = (
            Correction(1.0, 0.0, 1 / (2 * own), 1 / (2 * other))
            for own, other in ((frame.i, frame.j), (frame.j, frame.i))
        )
        return _apply(overlaps, left, right)

    def coordinates(self, frame: StiefelFrame, tangent: Pair) -> StiefelTangent:
        grams: tuple[Grams | None, Grams | None] = None, None
        if kernels.serve_small(*frame.point):
            grams = both(tall.grams, frame.point, tangent)
        sides = zip(frame.point, tangent, grams, strict=True)
        return StiefelTangent(*(Side(*parts) for parts in sides))

    def vector(self, frame: StiefelFrame, coords: StiefelTangent) -> Pair:
        return Pair(coords.left.xi, coords.right.xi)

    def steepest(
        self, frame: StiefelFrame, coords: StiefelTangent, p: float, floor: float
    ) -> StiefelTangent:
        # The loss does not change along common rotations, so each factor finds its own direction.
        return self._by_factors(frame, coords, p, floor, (frame.j**0.5, frame.i**0.5), None)

    def whitened(
        self, frame: StiefelFrame, coords: StiefelTangent, options: StepOptions
    ) -> StiefelTangent:
        # What a factor does to each of its products alone has the singular values of Ξ_U itself.
        floor, sides = options.norm_floor, options.sides
        return self._by_factors(frame, coords, math.inf, floor, (1.0, 1.0), sides)

    def inner_parts(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """UᵀΞ of each factor's own part of the vector, from that of all factors.

        Upstairs it is what it is; (batch, blocks, r, r) each.
        """
        return left, right

    def _by_factors(
        self,
        frame: StiefelFrame,
        coords: StiefelTangent,
        p: float,
        floor: float,
        weights: tuple[float, float],
        sides: Sides | None,
    ) -> StiefelTangent:
        """The steepest direction of every factor by itself, where sides are counted so much."""
        cores = [InnerCore.of(side, self.inner_weight**0.5) for side in coords]
        inners = self.inner_parts(*(skew(core.cross) for core in cores))
        found = [
            core.steepest(inner, p, floor / weight)
            for core, inner, weight in zip(cores, inners, weights, strict=True)
        ]
        lengths = shares([w * x.value for w, x in zip(weights, found, strict=True)], p)
        if sides is not None:
            lengths = [x * side[:, None] for x, side in zip(lengths, sides, strict=True)]
        made = (
            core.vector(x.direction * (length / weight)[..., None, None])
            for core, x, length, weight in zip(cores, found, lengths, weights, strict=True)
        )
        return self.coordinates(frame, Pair(*made))

    def spectral_norm(self, frame: StiefelFrame, coords: StiefelTangent) -> Tensor:
        return linalg.spectral_norm(
            coords.left.square().sum(1),
            coords.left.cross().sum(1),
            coords.right.square().sum(1),
            coords.right.cross().sum(1),
            frame.i,
            frame.j,
        )

    def retract(
        self, frame: StiefelFrame, coords: StiefelTangent, scale: Tensor, options: StepOptions
    ) -> Landing:
        retraction = options.retraction
        tangent = gram_spread(options.reach)
        fused = coords.left.grams is not None and retraction == "polar"
        if fused and polar.is_small(tangent):
            return _land_in_one(coords, scale, options)
        moved = Moved(frame.point, self.vector(frame, coords), scale, options.reach)
        new, alive = moved.orthonormal(retraction, options.largest)
        return Landing(new, None, alive, None)


def _overlaps(frame: StiefelFrame, vector: Pair) -> Pair:
    """UᵀX of every block."""
    return Pair(*both(tall.overlap, frame.point, vector))


def by_partners(frame: StiefelFrame, function: Callable[..., Any], *pairs: Pair) -> Pair:
    """``function`` of how many blocks a factor is in, and of each side of ``pairs``."""
    if frame.i == frame.j:
        return Pair(*both(partial(function, frame.i), *pairs))
    lefts, rights = zip(*pairs, strict=True)
    return Pair(function(frame.j, *lefts), function(frame.i, *rights))


def _land_in_one(coords: StiefelTangent, scale: Tensor, options: StepOptions) -> Landing:
    """A polar step with all of its r×r work in one kernel a side, from overlaps made before."""
    grams = [side.grams for side in coords if side.grams is not None]
    made = both(kernels.stiefel.landing, *zip(*grams, strict=True), shared=(scale,))
    change, share, norms = zip(*made, strict=True)
    alive = scalars.within(norms, options.largest)
    points, vectors = zip(*((side.u, side.xi) for side in coords), strict=True)
    new = both(tall.move, points, change, vectors, share, shared=(alive,))
    return Landing(Pair(*new), None, alive, None)


def _apply(overlap: Pair, left: Correction, right: Correction) -> Pair:
    if kernels.serve(overlap.left, overlap.right):
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


def weighted_square(frame: StiefelFrame, coords: StiefelTangent, less: float = 0.0) -> Tensor:
    """J Σ(‖Ξ_Ui‖² − ``less`` ‖U_iᵀΞ_Ui‖²) + I Σ(‖Ξ_Vj‖² − ``less`` ‖V_jᵀΞ_Vj‖²), (batch,)."""
    (left, right), (i, j) = coords, (frame.i, frame.j)
    if left.grams is not None and right.grams is not None:
        return kernels.stiefel.length(left.grams, right.grams, less)
    square = j * left.squared_norm() + i * right.squared_norm()
    if not less:
        return square
    inner = j * linalg.squared_norm(left.rotation(), 3)
    inner = inner + i * linalg.squared_norm(right.rotation(), 3)
    return (square - less * inner).clamp_min(0)
