"""Matrices of rank r as pairs of factors, up to the gauge (A S, B S⁻ᵀ).

Point           (A, B) upstairs, W = A Bᵀ downstairs; a grid is the one stacked pair.
Tangent         the horizontal lift (Ξ_A, Ξ_B) of Ξ = Ξ_A Bᵀ + A Ξ_Bᵀ.
Metric          ⟨Ξ_A, H_A⟩ weighted by BᵀB plus ⟨Ξ_B, H_B⟩ weighted by AᵀA, unchanged by the gauge.
Gradient        (G_A (BᵀB)⁻¹, G_B (AᵀA)⁻¹).
Schatten norms  of the block-diagonal matrix of Ξ_A L_B and Ξ_B L_A, the least over all lifts of Ξ;
                p = 2 is the metric. whitened: Ξ_Ai L_B of every factor by itself, with the mean
                of B_jᵀB_j in place of their sum.
Retraction      additive: (A + Ξ_A, B + Ξ_B).
Transport       horizontal projection at the new point: (Ξ_A − A Λ, Ξ_B + B Λᵀ) with
                Λ = ½ (A⁺ Ξ_A − Ξ_Bᵀ B⁺ᵀ).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels, linalg, scalars, schatten, tall
from ..linalg import Cholesky
from ..tall import Plus
from ..together import as_one, both
from ..whitening import Direction, Manner, whiten_both
from . import decay
from .base import Geometry, Landing, Pair, StepOptions, flatten_blocks
from .endings import Stepped

# A square norm below this share of what was taken away is not told from a difference.
_LITTLE = 2.0**-4
# Units of rounding that a vector may be off by without it being changed.
_ROUNDINGS = 4


class GramFrame(NamedTuple):
    """The stacked factors (batch, I·m, r) and (batch, J·n, r), and the factored AᵀA and BᵀB.

    ``damping`` is in these.
    """

    point: Pair
    left: Cholesky
    right: Cholesky
    damping: float


class WeighedTangent:
    """A tangent vector, and the square of its norm where that is asked for.

    The norm comes of a product over all rows, which not every step needs.
    """

    def __init__(self, vector: Pair, weights: tuple[Tensor, Tensor], square: Tensor | None) -> None:
        self.vector = vector
        self._weights, self._square = weights, square

    def square(self) -> Tensor:
        """‖Ξ_A L_B‖² + ‖Ξ_B L_A‖², (batch,)."""
        if self._square is None:
            self._square = _weighed_square(self.vector, self._weights)
        return self._square


class FixedQuotient(Geometry):
    """See the header of this file."""

    name = "fixed-quotient"
    isometry = False
    retractions = ("additive",)

    def frame(self, point: Pair, damping: float = 0.0) -> GramFrame:
        a, b = flatten_blocks(point.left), flatten_blocks(point.right)
        grams = both(tall.gram, (a, b))
        return GramFrame(Pair(a, b), *linalg.cholesky_pair(*grams, damping), damping)

    def lifted(self, frame: GramFrame) -> Tensor:
        return as_one(frame.left.lifted, frame.right.lifted)

    def product_square(self, frame: GramFrame) -> Tensor:
        left, right = frame.left.lower, frame.right.lower
        if kernels.serve_small(left):
            return kernels.quotient.product_square(left, right)
        return linalg.squared_norm(left.mT @ right, 2)

    def gradient(self, frame: GramFrame, grad: Pair, repair: str = "average") -> Pair:
        lift = self._lift(frame, grad)
        # The horizontal projection is the nearest horizontal vector in the metric.
        return lift if repair == "none" else self.arrive(frame, lift, given=True)

    def mix(self, frame: GramFrame, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        if repair == "none":
            return super().mix(frame, grad, momentum, nu, repair)
        return self.arrive(frame, self._lift(frame, grad, momentum, nu), given=True)

    def _lift(
        self, frame: GramFrame, grad: Pair, momentum: Pair | None = None, nu: float = 0.0
    ) -> Pair:
        """(1 − ν) (G_A (BᵀB)⁻¹, G_B (AᵀA)⁻¹) + ν M."""

        def lift(g: Tensor, turn: Tensor, *old: Tensor) -> Tensor:
            plus = Plus(flatten_blocks(old[0]), nu) if old else None
            return tall.turn(flatten_blocks(g), turn, plus).view_as(g)

        turns = self._turns(frame, 1 - nu)
        return Pair(*both(lift, grad, turns, *([] if momentum is None else [momentum])))

    def _turns(self, frame: GramFrame, weight: float) -> tuple[Tensor, Tensor]:
        """``weight`` (BᵀB)⁻¹ and ``weight`` (AᵀA)⁻¹, (batch, r, r)."""
        left, right = frame.left.inverse, frame.right.inverse
        if kernels.serve_small(left):
            return kernels.quotient.turns((left, right), weight)

        def turn(inverse: Tensor) -> Tensor:
            return tall.add_product(inverse, inverse.mT, inverse, beta=0.0, alpha=weight)

        return both(turn, (right, left))

    def arrive(self, frame: GramFrame, momentum: Pair, *, given: bool = False) -> Pair:
        flat = Pair(*map(flatten_blocks, momentum))
        shifts = self._shifts(frame, both(tall.overlap, frame.point, flat))
        subtract = partial(tall.subtract, given=given)
        made = both(subtract, flat, frame.point, shifts)
        return Pair(*(x.view_as(m) for x, m in zip(made, momentum, strict=True)))

    def _shifts(self, frame: GramFrame, overlaps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Λ and −Λᵀ (batch, r, r) from AᵀM_A and BᵀM_B, with A⁺M_A = L_A⁻ᵀ (L_A⁻¹ AᵀM_A)."""
        inverses = frame.left.inverse, frame.right.inverse
        if kernels.serve_small(*overlaps):
            return kernels.quotient.shifts(inverses, overlaps)

        def half(inverse: Tensor, overlap: Tensor) -> Tensor:
            return tall.add_product(overlap, inverse.mT, inverse @ overlap, beta=0.0, alpha=0.5)

        left, right = both(half, inverses, overlaps)
        return both(lambda own, other: own - other.mT, (left, right), (right, left))

    def descent(
        self,
        frame: GramFrame,
        grad: Pair,
        repair: str,
        momentum: Pair | None = None,
        nu: float = 0.0,
    ) -> tuple[Pair, WeighedTangent]:
        # A damped projection is not orthogonal, and up to rank 64 launches of small operations
        # would take as long as what is spared.
        plain = momentum is not None or repair == "none" or frame.damping
        if plain or kernels.serve_small(*frame.point):
            return super().descent(frame, grad, repair, momentum, nu)
        left, right = frame.left, frame.right
        flat = Pair(*map(flatten_blocks, grad))
        seen = both(tall.overlap, frame.point, flat)
        # AᵀG_A and (BᵀG_B)ᵀ are one matrix unless gradients are in dispute, and what of these the
        # projection takes away has L_Aᵀ Λ L_B for its coordinates on either side.
        over = left.inverse @ (seen[0] - seen[1].mT) @ right.inverse.mT / 2
        removed = 2 * linalg.squared_norm(over, 2)
        turns = self._turns(frame, 1.0)
        if tall.can_ask(removed):
            rows, square = self._lifted(frame, flat, turns, over, removed)
        else:
            shift = left.inverse.mT @ over @ right.inverse
            made = both(tall.lift, flat, turns, frame.point, (shift, -shift.mT))
            rows, square = Pair(made[0].rows, made[1].rows), made[0].inner + made[1].inner
        # An orthogonal projection P of a vector G has ⟨G, P G⟩ for its square, of which rounding
        # leaves nothing where P takes away nearly all.
        doubtful = ~(square > _LITTLE * removed) | left.lifted | right.lifted
        if not tall.can_ask(doubtful) or doubtful.any():
            exact = _weighed_square(rows, (right.lower, left.lower), doubtful)
            square = torch.where(doubtful, exact, square)
        tangent = Pair(*(x.view_as(g) for x, g in zip(rows, grad, strict=True)))
        return tangent, WeighedTangent(tangent, (right.lower, left.lower), square)

    def _lifted(
        self,
        frame: GramFrame,
        grad: Pair,
        turns: tuple[Tensor, Tensor],
        over: Tensor,
        removed: Tensor,
    ) -> tuple[Pair, Tensor]:
        """The lift less its vertical part, and the square of it, where values may be asked for."""
        rows = Pair(*both(tall.turn, grad, turns))
        whole = torch.add(*both(tall.inner, grad, rows))
        rounding = _ROUNDINGS * torch.finfo(whole.dtype).eps
        if (removed <= rounding**2 * whole).all():
            return rows, whole
        shift = frame.left.inverse.mT @ over @ frame.right.inverse
        subtract = partial(tall.subtract, given=True)
        return Pair(*both(subtract, rows, frame.point, (shift, -shift.mT))), whole - removed

    def coordinates(self, frame: GramFrame, tangent: Pair) -> WeighedTangent:
        return WeighedTangent(tangent, (frame.right.lower, frame.left.lower), None)

    def vector(self, frame: GramFrame, coords: WeighedTangent) -> Pair:
        return coords.vector

    def metric_square(self, frame: GramFrame, coords: WeighedTangent) -> Tensor:
        return coords.square()

    def spectral_norm(self, frame: GramFrame, coords: WeighedTangent) -> Tensor:
        # Ξ = C Vᵀ + U Dᵀ in the orthonormal frames U = A L_A⁻ᵀ, V = B L_B⁻ᵀ.
        a, b = frame.point
        left = tall.turned_grams(a, flatten_blocks(coords.vector.left), frame.right.lower)
        right = tall.turned_grams(b, flatten_blocks(coords.vector.right), frame.left.lower)
        uc, vd = frame.left.inverse @ left.cross, frame.right.inverse @ right.cross
        return linalg.spectral_norm(left.square, uc, right.square, vd, 1, 1)

    def steepest(
        self, frame: GramFrame, coords: WeighedTangent, p: float, floor: float
    ) -> WeighedTangent:
        # The loss does not change along the gauge, so the steepest of all lifts is a lift of the
        # steepest vector downstairs, and each side finds its own.
        whole = Pair(*(flatten_blocks(x)[:, None] for x in coords.vector))
        if p == math.inf:
            found = whiten_both(whole, _weights(frame), Manner(floor))
            return self._along(frame, coords, found)
        weights = _weights(frame)
        grams = both(tall.turned_gram, whole, weights)
        turns = schatten.directions(list(grams), p, floor)
        sides = zip(whole, weights, turns, grams, strict=True)
        left, right = (
            Direction(x, lower @ turn, linalg.squared_norm_weighted(turn, gram))
            for x, lower, turn, gram in sides
        )
        return self._along(frame, coords, (left, right))

    def whitened(
        self, frame: GramFrame, coords: WeighedTangent, options: StepOptions
    ) -> WeighedTangent:
        found = whiten_both(coords.vector, _weights(frame), options.manner, options.sides)
        return self._along(frame, coords, found)

    def _along(
        self, frame: GramFrame, coords: WeighedTangent, found: tuple[Direction, Direction]
    ) -> WeighedTangent:
        """The vector whose Ξ_A L_B and Ξ_B L_A are these directions."""

        def back(rows: Tensor, turn: Tensor, inverse: Tensor) -> Tensor:
            return tall.turn(rows, turn @ inverse[:, None])

        rows, turns, _ = zip(*found, strict=True)
        made = both(back, rows, turns, (frame.right.inverse, frame.left.inverse))
        vector = Pair(*(x.view_as(old) for x, old in zip(made, coords.vector, strict=True)))
        square = scalars.total(found[0].squares, found[1].squares)
        return WeighedTangent(vector, (frame.right.lower, frame.left.lower), square)

    def step_limit(self, frame: GramFrame, coords: WeighedTangent) -> Tensor:
        # ‖A_i⁺Ξ_Ai‖₂ < 1 and ‖B_j⁺Ξ_Bj‖₂ < 1 for every factor. In the frames of the factors the
        # same matrix would have a norm that does not look at the gauge, but that lets a gauge drift
        # until it cannot be resolved: measured, in docs/safeguards.md.
        sizes = []
        for stacked, xi in zip(frame.point, coords.vector, strict=True):
            blocks = stacked.view_as(xi)
            lower = linalg.cholesky(tall.gram(blocks), frame.damping).inverse
            sizes.append(linalg.norm_bound(lower.mT @ (lower @ tall.overlap(blocks, xi))).amax(1))
        return 1 / torch.maximum(*sizes)

    def retract(
        self, frame: GramFrame, coords: WeighedTangent, scale: Tensor, options: StepOptions
    ) -> Landing:
        left, right = frame.left, frame.right
        triangles, inverses = (left.lower, right.lower), (left.inverse, right.inverse)
        if not options.weight_decay:
            alive = _bounded(coords, scale, triangles, inverses, options.largest)
            old = Pair(*(x.view_as(xi) for x, xi in zip(frame.point, coords.vector, strict=True)))
            ending = Stepped(old, coords.vector, scale, alive)
            return Landing(ending if kernels.serve(*old) else ending.formed(), None, alive, None)
        turns = decay.turns(left, right, options)
        triangles = left.lower.mT @ turns.left, right.lower.mT @ turns.right
        inverses = inverses[0] @ turns.left_inverse, inverses[1] @ turns.right_inverse
        alive = _bounded(coords, scale, triangles, inverses, options.largest)
        eye, g = linalg.identity_like(left.lower), tall.per_member(scale, left.lower)
        moved = (
            tall.move(x, turn - eye, flatten_blocks(xi), g * back, alive).view_as(xi)
            for x, turn, xi, back in zip(
                frame.point,
                (turns.left, turns.right),
                coords.vector,
                (turns.right_inverse, turns.left_inverse),
                strict=True,
            )
        )
        return Landing(Pair(*moved), turns, alive, None)

    def depart(
        self, frame: GramFrame, coords: WeighedTangent, tangent: Pair, landing: Landing
    ) -> Pair:
        return self.follow(frame, tangent, landing)

    def follow(self, frame: GramFrame, tangent: Pair, landing: Landing) -> Pair:
        turns = landing.record
        if turns is None:
            return tangent
        left = tall.turn(flatten_blocks(tangent.left), turns.right_inverse)
        right = tall.turn(flatten_blocks(tangent.right), turns.left_inverse)
        return Pair(left.view_as(tangent.left), right.view_as(tangent.right))


def _weights(frame: GramFrame) -> tuple[Tensor, Tensor]:
    """What weighs each side's blocks (batch, blocks, m, r) of a vector: L_B and L_A."""
    return frame.right.lower[:, None], frame.left.lower[:, None]


def _bounded(
    coords: WeighedTangent,
    scale: Tensor,
    triangles: tuple[Tensor, Tensor],
    inverses: tuple[Tensor, Tensor],
    largest: float,
) -> Tensor:
    """Members (batch,) whose ‖A + γΞ_A‖ + ‖B + γΞ_B‖ is certain to be no more than ``largest``.

    By a bound from Ξ_A = (Ξ_A L_B) L_B⁻¹ and A = U L_Aᵀ, with these triangles in either direction.
    """
    if kernels.serve_small(*triangles):
        return kernels.quotient.bounded(triangles, inverses, scale, coords.square(), largest)
    inverse_a, inverse_b = both(linalg.frobenius, inverses)
    size_a, size_b = both(linalg.frobenius, triangles)
    moved = scale.abs() * coords.square().sqrt()
    return torch.addcmul(size_a + size_b, moved, inverse_a + inverse_b) <= largest


def _weighed_square(
    vector: Pair, weights: tuple[Tensor, Tensor], only: Tensor | None = None
) -> Tensor:
    """‖Ξ_A L_B‖² + ‖Ξ_B L_A‖² (batch,), from L_B and L_A; of no use but for members ``only``.

    The weights go in as Cholesky factors: through the Gram matrices themselves the sum would
    cancel, and lose the square of their conditioning.
    """
    masks = [] if only is None else [(only, only)]
    flat = Pair(*(x if x.dim() == 3 else flatten_blocks(x) for x in vector))
    return torch.add(*both(tall.turned_square, flat, weights, *masks))
