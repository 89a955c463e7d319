"""Inverse roots and polar factors of r×r stacks by coupled Newton–Schulz products.

As in `linalg`: batched, a number of iterations known beforehand, no value asked for.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from . import kernels, tall
from .linalg import identity_like, inverse, square_unless_rounding, squared_norm, sym

# Newton–Schulz steps where nothing is known of the spectrum. The small end of it grows 2.25-fold
# a step before convergence turns quadratic, so 20 serve a condition number of about 2e5.
_BLIND_STEPS = 20
_POLISH_STEPS = 8
_FLOOR_STEPS = 18
# Of `inverse_modulus`: units of rounding added to a Gram matrix, and the steps after growth.
_RIDGE = 2
_QUADRATIC_STEPS = 6
# The share of a `Spread` that one pass serves: a condition number of 99, in nine steps.
_WIDEST = 0.98


class Spread(NamedTuple):
    """Eigenvalues lie no further from ``centre`` than this ``share`` of it."""

    share: float
    centre: float = 1.0


def newton_schulz_steps(spread: float, dtype: torch.dtype) -> int:
    """Steps until an eigenvalue ``spread`` away from 1 has reached 1 to working precision."""
    if not 0 <= spread < 1:
        raise ValueError(f"spread must be in [0, 1), got {spread}")
    error, steps = max(spread, 1e-4), 0
    while error > torch.finfo(dtype).eps / 4:
        error, steps = 0.75 * error**2 + 0.25 * error**3, steps + 1
    return steps


def inverse_sqrt(gram: Tensor, steps: int) -> Tensor:
    """``gram^(-1/2)`` for eigenvalues in (0, 3), by coupled Newton–Schulz products."""
    if kernels.serve_small(gram):
        return kernels.roots.inverse_sqrt(gram, steps, scale=1.0)
    if not tall.can_ask(gram):
        return _iterated_inverse_sqrt(gram, steps)
    found, error = _series(gram)
    near = squared_norm(error, 2) < _fifth_power_is_rounding(gram.dtype)
    if near.all():
        return found
    return torch.where(near[..., None, None], found, _iterated_inverse_sqrt(gram, steps))


def _series(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The series of (I − E)^(-1/2) up to E⁴, and E."""
    eye = identity_like(gram)
    error = eye - gram
    found = torch.add(eye, error, alpha=0.5)
    if tall.can_ask(error):
        square = square_unless_rounding(error, squared_norm(error, 2))
    else:
        square = error @ error
    if square.dim():
        higher = torch.add(0.375 * eye, error, alpha=5 / 16).add_(square, alpha=35 / 128)
        found = tall.add_product(found, square, higher, given=True)
    return found, error


def _fifth_power_is_rounding(dtype: torch.dtype) -> float:
    """The square of the norm below which an E (..., r, r) has a fifth power that is rounding."""
    return float((4 * torch.finfo(dtype).eps) ** 0.4)


def _iterated_inverse_sqrt(gram: Tensor, steps: int) -> Tensor:
    wide = 1.5 * identity_like(gram)
    half_step = torch.sub(wide, gram, alpha=0.5)
    root, inverse_root = gram @ half_step, half_step
    for k in range(1, steps):
        half_step = tall.add_product(wide, inverse_root, root, alpha=-0.5)
        inverse_root = half_step @ inverse_root
        if k + 1 < steps:
            root = root @ half_step
    return inverse_root


def scaled_inverse_sqrt(gram: Tensor, steps: int) -> Tensor:
    """The same for any positive eigenvalues: scaled so that [1, row-sum bound] centres on 1."""
    if kernels.serve_small(gram):
        return kernels.roots.inverse_sqrt(gram, steps)
    bound = gram.abs().sum(-1).amax(-1)[..., None, None].clamp_min(1)
    scale = 2 / (1 + bound)
    return inverse_sqrt(gram * scale, steps) * scale.sqrt()


def polar_scaling(gram: Tensor, spread: Spread | None) -> Tensor:
    """The r×r that takes a tall matrix to its polar factor, from its Gram matrix (..., r, r).

    ``spread`` says where the eigenvalues of ``gram`` lie; None when nothing is known, and then the
    result is orthonormal only roughly, to be finished by `polish_scaling`.
    """
    if is_small(spread):
        steps, centre = newton_schulz_steps(spread.share, gram.dtype), spread.centre
        if kernels.serve(gram) and not kernels.serve_small(gram):
            # What may be far from I seldom is. Each member goes by its own distance.
            series, error = _series(gram)
            found = kernels.members.Found((series,), error, _fifth_power_is_rounding(gram.dtype))
            return kernels.roots.inverse_sqrt(gram, steps, scale=1 / centre, found=found)
        if centre == 1:
            return inverse_sqrt(gram, steps)
        return inverse_sqrt(gram / centre, steps) / math.sqrt(centre)
    return scaled_inverse_sqrt(gram, _BLIND_STEPS)


def polish_scaling(gram: Tensor) -> Tensor:
    """The same for a matrix that is nearly orthonormal, but nobody knows how nearly.

    Past the condition number that all these steps serve there is no polar factor to be had: NaN.
    """
    scaling = scaled_inverse_sqrt(gram, _POLISH_STEPS)
    defect = scaling.mT @ gram @ scaling - identity_like(gram)
    done = defect.abs().amax((-2, -1), keepdim=True) < torch.finfo(gram.dtype).eps ** 0.5
    # What is below the root of rounding is rounding after one more step, and not before it.
    scaling = tall.add_product(scaling, scaling, defect, alpha=-0.5)
    return torch.where(done, scaling, torch.nan)


def inverse_modulus(x: Tensor) -> Tensor:
    """``(xᵀx)^(-1/2)`` (..., r, r), so that ``x`` times it is the polar factor of ``x``.

    A singular value that its own square's rounding hides, one below √(2rε) of their root of
    squares, does not come all the way to 1.
    """
    square = squared_norm(x, 2).clamp_min(torch.finfo(x.dtype).tiny)[..., None, None]
    ridge = _RIDGE * x.shape[-1] * torch.finfo(x.dtype).eps
    steps = math.ceil(math.log(1 / ridge, 2.25)) + _QUADRATIC_STEPS
    gram = x.mT @ x / square + ridge * identity_like(x)
    return scaled_inverse_sqrt(gram, steps) / square.sqrt()


def is_small(spread: Spread | None) -> TypeGuard[Spread]:
    """Whether eigenvalues lie so close that one pass of an orthonormalization is enough."""
    return spread is not None and spread.share < _WIDEST


def raise_small_values(x: Tensor, floor: Tensor) -> Tensor:
    """E such that ``x (I + E)`` has the singular values (σ⁴ + floor⁴)^¼, (..., r, r).

    ``floor`` is (...,). Values far above it stay: they change by (floor/σ)⁴ / 4. Values below a
    tenth of it grow tenfold, no more, since the smallest cannot be told from rounding; that keeps
    the condition of the first root below at 1e4, which `_FLOOR_STEPS` serve.
    """
    eye = identity_like(x)
    square = floor.square()[..., None, None]
    share = square * inverse(x.mT @ x + 1e-2 * square * eye)
    lift = sym(share @ share)
    root, fourth = eye + lift, []
    for _ in range(2):
        root = sym(root @ scaled_inverse_sqrt(root, _FLOOR_STEPS))
        fourth.append(inverse(eye + root))
    # (1 + d)^¼ − 1 = d / (1 + √(1 + d)) / (1 + (1 + d)^¼), without cancellation
    return lift @ fourth[0] @ fourth[1]
