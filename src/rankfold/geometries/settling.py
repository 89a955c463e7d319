"""How a step of orthonormal factors ends: with columns that are orthonormal again."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from .. import kernels, linalg, polar, scalars, tall
from ..polar import Spread
from ..together import both
from .terms import Pair

# In eigenvalues, for factors that were reloaded from bfloat16 and are orthonormal to that alone.
MARGIN = 0.05


class Moved:
    """U + γΞ of both sides, (batch, blocks, m, r), with γ (batch,).

    ``reach`` is a bound on the length of this step, if there is one. Of short steps kernels make
    what is wanted from U and Ξ. Elsewhere it is formed: what would have to be added to the columns
    of a long step, to make them orthonormal, is nearly all of them, and little would be left.
    """

    def __init__(self, point: Pair, vector: Pair, scale: Tensor, reach: float | None) -> None:
        self._point, self._vector, self._scale = point, vector, scale
        self._spread = moved_spread(reach)
        self._formed: Pair | None = None
        if not (polar.is_small(self._spread) and kernels.serve(*point, *vector)):
            self._formed = Pair(*both(tall.step, point, vector, shared=(scale,)))

    def orthonormal(self, retraction: str, largest: float) -> tuple[Pair, Tensor]:
        """The columns made orthonormal by ``retraction``, and the members (batch,) that moved.

        Members stay where they were if an entry may be larger than ``largest``, or a number was
        not finite.
        """
        spread = self._spread
        scale = partial(orthonormal_scaling, retraction=retraction, spread=spread)
        left, right = both(scale, self._grams())
        alive = scalars.within((left.norm, right.norm), largest)
        new = self._turned((left.matrix, right.matrix), alive)
        if polar.is_small(spread):
            return new, alive
        return finish(new, self._point, alive, retraction)

    def _grams(self) -> tuple[Tensor, Tensor]:
        if self._formed is not None:
            return both(tall.gram, self._formed)
        return both(kernels.tall.stepped_gram, self._point, self._vector, shared=(self._scale,))

    def _turned(self, scalings: tuple[Tensor, Tensor], alive: Tensor) -> Pair:
        """Times an r×r matrix for each block, or the point where a member is not ``alive``."""

        def turned(x: Tensor, scaling: Tensor, u: Tensor, alive: Tensor) -> Tensor:
            return tall.choose(tall.turn(x, scaling), u, alive)

        if self._formed is not None:
            return Pair(*both(turned, self._formed, scalings, self._point, shared=(alive,)))
        changes = both(lambda x: x - linalg.identity_like(x), scalings)
        shared = self._scale, alive
        return Pair(*both(kernels.moves.settle, self._point, self._vector, changes, shared=shared))


class Scaling(NamedTuple):
    """A ``matrix`` (..., r, r) to multiply columns with, and their ``norm`` (...) then."""

    matrix: Tensor
    norm: Tensor


def orthonormal_scaling(gram: Tensor, retraction: str, spread: Spread | None) -> Scaling:
    """What makes columns with this Gram matrix (..., r, r) orthonormal.

    Exactly so where the ``spread`` of its eigenvalues is small, roughly otherwise: see `finish`.
    The Gram matrix is that of the numbers actually stored, so errors of the past are repaired here
    and orthonormality does not drift.
    """
    if retraction == "qr":
        scaling = linalg.cholesky(gram).inverse.mT
    else:
        scaling = polar.polar_scaling(gram, spread)
    return Scaling(scaling, linalg.squared_norm_weighted(scaling, gram).sqrt())


def finish(new: Pair, old: Pair, alive: Tensor, retraction: str) -> tuple[Pair, Tensor]:
    """A second pass over columns that `orthonormal_scaling` has only brought near orthonormality.

    Members (batch,) that are not ``alive``, or cannot be made orthonormal, stay where they were;
    returned with the members that did move.
    """
    scalings = []
    for x in new:
        gram = tall.gram(x)
        triangular = retraction == "qr"
        scaling = linalg.cholesky(gram).inverse.mT if triangular else polar.polish_scaling(gram)
        alive = alive & scaling.isfinite().flatten(1).all(1)
        scalings.append(scaling)
    moved = (
        tall.choose(tall.turn(x, scaling), before, alive)
        for x, scaling, before in zip(new, scalings, old, strict=True)
    )
    return Pair(*moved), alive


def gram_spread(reach: float | None) -> Spread | None:
    """Where eigenvalues of (U + Ξ)ᵀ(U + Ξ) = I + ΞᵀΞ lie for a tangent step of length ``reach``.

    No metric here lets a factor move by more than √2 of the step's length.
    """
    return None if reach is None else Spread(2 * reach**2 + MARGIN)


def moved_spread(reach: float | None) -> Spread | None:
    """The same where the step need not be tangent: between (1 − √2 t)² and (1 + √2 t)².

    What is left of a gradient that is all but normal is rounding, and not tangent, but is scaled
    to a full step like any other.
    """
    if reach is None or 2**0.5 * reach >= 1:  # where the lower end is 0
        return None
    centre, width = 1 + 2 * reach**2, 2 * 2**0.5 * reach + MARGIN
    # For short steps 1 is centre enough; a graph has to serve the longest.
    around_one = width + centre - 1
    return Spread(around_one) if around_one < 0.9 else Spread(width / centre, centre)
