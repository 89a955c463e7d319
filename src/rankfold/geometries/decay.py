"""Weight decay of a product: its singular values are drawn towards a target.

W becomes W + ηλ (σ polar(W) − W) with learning rate η, decay λ and target σ; for σ = 0 that is
(1 − ηλ) W. Columns and rows keep their spans, so a tangent vector at W is one there too, the same
matrix, and the step goes from there along it. All that happens is r×r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import linalg, polar
from ..linalg import Cholesky
from .base import StepOptions


def core_change(core: Tensor, options: StepOptions) -> Tensor:
    """What is added to the core S (batch, r, r) of W = U S Vᵀ in orthonormal frames."""
    shrink = options.shrink_of(core)
    if isinstance(shrink, Tensor):  # the host does not know a rate that is too large for the decay
        shrink = torch.where(shrink < 1, shrink, math.nan)
    if not options.decay_to:
        return -shrink * core
    target = options.decay_to * core @ polar.inverse_modulus(core)
    return shrink * (target - core)


class Turns(NamedTuple):
    """P, Q, P⁻ᵀ and Q⁻ᵀ (batch or 1, r, r), with which A P and B Q are the factors after decay.

    A tangent vector (Ξ_A, Ξ_B) is (Ξ_A Q⁻ᵀ, Ξ_B P⁻ᵀ) there: the same matrix Ξ_A Bᵀ + A Ξ_Bᵀ.
    """

    left: Tensor
    right: Tensor
    left_inverse: Tensor
    right_inverse: Tensor


def turns(left: Cholesky, right: Cholesky, options: StepOptions) -> Turns:
    """For factors whose Gram matrices are factored so; each takes half of the change."""
    eye, shrink = linalg.identity_like(left.lower), options.shrink_of(left.lower)
    kept = 1 - shrink
    if not options.decay_to:
        one, back = kept**0.5 * eye[None], kept**-0.5 * eye[None]
        return Turns(one, one, back, back)
    # W + ηλ (σ polar(W) − W) = A T Bᵀ. A number is taken out of T first, so that the share of
    # what is left is small even where W is far from its target.
    modulus = polar.inverse_modulus(left.lower.mT @ right.lower)
    drawn = shrink * options.decay_to * (right.lower @ modulus @ right.inverse)
    mean = kept + linalg.trace(drawn)[..., None, None] / drawn.shape[-1]
    whole = (kept * eye + drawn) / mean
    share, guess, _ = linalg.half_share(whole - eye)
    back, root = linalg.inverse(eye + share, guess), mean.sqrt()
    return Turns(
        left=root * whole @ back,
        right=root * (eye + share).mT,
        left_inverse=((eye + share) @ linalg.inverse(whole)).mT / root,
        right_inverse=back / root,
    )
