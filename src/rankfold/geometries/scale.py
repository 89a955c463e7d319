"""One learned scale for all products of an isometry, W_ij = s U_i V_jᵀ, outside the manifold.

It lies in the factors themselves, √s in each, and is read from their norms. A geometry steps on U
and V as if there were none. Beside it goes log s ← log s − η_s cos, with the cosine of the angle
between factors and their gradients,

    cos = (Σ⟨G_Ui, U_i⟩ + Σ⟨G_Vj, V_j⟩) / (‖(U, V)‖ ‖(G_U, G_V)‖),

where ‖(U, V)‖² = J Σ‖U_i‖² + I Σ‖V_j‖² and for gradients, its dual, Σ‖G_Ui‖²/J + Σ‖G_Vj‖²/I. It
depends neither on the scale, nor on a common rotation, nor on the size of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import tall
from .base import Outcome, Pair, StepOptions


class Divided(NamedTuple):
    """Factors ``held`` divided by the ``sizes`` (batch,) of either side, whose product is s.

    ``grad`` are the gradients with respect to the quotients.
    """

    held: Pair
    sizes: Pair
    point: Pair
    grad: Pair


def sizes(point: Pair) -> Pair:
    """√s of either side (batch,): 1 where columns are of length 1."""
    left, right = ((tall.square(x).sum(1) / (x.shape[1] * x.shape[-1])).sqrt() for x in point)
    return Pair(left, right)


def divide(point: Pair, grad: Pair) -> Divided:
    """Take the scale out of factors, and into their gradients."""
    found = sizes(point)
    return Divided(
        point,
        found,
        Pair(*(x / tall.per_member(size, x) for x, size in zip(point, found, strict=True))),
        Pair(*(g * tall.per_member(size, g) for g, size in zip(grad, found, strict=True))),
    )


def multiply(
    divided: Divided, outcome: Outcome, rate: float | Tensor, options: StepOptions
) -> Pair:
    """The factors after a step, with their new scale; those of skipped members as they were."""
    change = rate * _cosine(divided.point, divided.grad, options.norm_floor) / 2
    change = change if options.maximize else -change
    # A sum may overflow where the step did not; then the scale waits for the next one.
    growth = torch.where(change.isfinite(), change, 0).exp()
    made = []
    for x, size, old in zip(outcome.point, divided.sizes, divided.held, strict=True):
        size = (size * growth).clamp_max(options.largest)
        made.append(tall.choose(x * tall.per_member(size, x), old, outcome.alive))
    return Pair(*made)


def _cosine(point: Pair, grad: Pair, floor: float) -> Tensor:
    (u, v), (g_u, g_v) = point, grad
    i, j, r = u.shape[1], v.shape[1], u.shape[-1]
    along = sum((x * g).flatten(1).sum(1) for x, g in ((u, g_u), (v, g_v)))
    square = tall.square(g_u).sum(1) / j + tall.square(g_v).sum(1) / i
    # Squares may be lost where a product is not: no cosine is beyond 1 for that.
    result: Tensor = along / (2 * i * j * r) ** 0.5 / square.sqrt().clamp_min(floor)
    return result.clamp(-1, 1)
