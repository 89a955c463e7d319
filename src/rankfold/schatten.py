"""Steepest directions under Schatten norms, from Gram matrices.

The Schatten-p norm of a matrix is the ℓᵖ norm of its singular values: p = 2 is Frobenius, p = ∞ the
largest one. Of all D with ‖D‖_p ≤ 1, the one along which X lies furthest is X C, where C is a
function of the r×r matrix XᵀX: for p = ∞ its inverse square root, so that X C has every singular
value 1. Rows of X meet in Gram matrices alone.

Several matrices that go by one norm together are blocks of one block-diagonal matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, linalg, tall
from .linalg import identity_like, overflown_is_nan, squared_norm, trace

# Singular values below this share of the Frobenius norm count for less and less: in float32 a Gram
# matrix knows little of them, and must stay positive with its rounding.
SMALLEST = 2.0**-8
# Steepest for p = ∞ in each factor's part of a vector alone, measured in each of its products.
WHITENED = "whitened"
# Where each factor's part goes alone, one of less than this share of its side's norm may be the
# others' rounding, which must not become the step of a factor that has no gradient.
SMALLEST_PART = 2.0**-16
_SQUARINGS = {torch.float32: 24, torch.float64: 48}


def exponent(normalize: str | None) -> float | None:
    """p of ``"schatten-p"``, ∞ for ``"whitened"``, and None for every other normalization.

    Raises ValueError if what follows "schatten-" is no number in [1, ∞].
    """
    if normalize == WHITENED:
        return math.inf
    if normalize is None or not normalize.startswith("schatten-"):
        return None
    try:
        p = float(normalize.removeprefix("schatten-"))
    except ValueError:
        p = math.nan
    if not p >= 1:
        raise ValueError(
            f"normalize={normalize!r}: give a number from 1 to inf, as in 'schatten-inf'"
        )
    return p


def by_products(p: float) -> bool:
    """Whether directions are found by products alone, which a CUDA graph can record."""
    return p in (1, 2, math.inf)


def inverse_root(
    gram: Tensor, scale: Tensor, smallest: float = SMALLEST, low: float | None = None
) -> Tensor:
    """``(gram + ridge)^(-1/2)`` of symmetric (..., r, r), eigenvalues in [0, scale], by products.

    The ridge is the square of ``smallest`` times ``scale`` (...). Newton–Schulz steps, each scaled
    to what the one before it has left of the spectrum. They are fewer, and lose less to rounding,
    where all eigenvalues are known to be above the square of some larger ``low`` times ``scale``.
    """
    low = low or smallest
    steps = stretches(low, gram.dtype)
    if kernels.serve_small(gram):
        return kernels.whiten.inverse_root(gram, scale, smallest, low, len(steps))
    eye, scale = identity_like(gram), scale[..., None, None]
    root = (gram / scale + smallest**2 * eye) / (1 + smallest**2)
    inverse = half_step = 1.5 * steps[0] * eye - 0.5 * steps[0] ** 3 * root
    for stretch in steps[1:]:
        root = root @ half_step
        half_step = tall.add_product(1.5 * stretch * eye, inverse, root, alpha=-0.5 * stretch**3)
        inverse = half_step @ inverse
    return linalg.sym(inverse) / scale.sqrt()


def stretches(low: float, dtype: torch.dtype) -> list[float]:
    """Before each step σ(3 − σ²)/2, what brings σ from ``low`` to 1 to the same distance from 1.

    A few microseconds, and not cached: `torch.compile` warns of caches in what it compiles.
    """
    found = []
    while 1 - low > torch.finfo(dtype).eps:
        stretch = math.sqrt(3 / (1 + low + low**2))
        found.append(stretch)
        low = stretch * low * (3 - (stretch * low) ** 2) / 2
    return found


def directions(grams: list[Tensor], p: float, floor: float) -> list[Tensor]:
    """C_b (batch, r, r) for which the blocks X_b C_b are the steepest direction, of norm 1, p < ∞.

    ``grams`` are the X_bᵀX_b. Where the Frobenius norm of all X_b is below ``floor`` the direction
    is shorter by as much, so that zero stays zero.
    """
    total = overflown_is_nan(torch.stack([trace(g) for g in grams]).sum(0))
    square = total.clamp_min(least_square(total))[..., None, None]
    length = (total.sqrt() / floor).clamp_max(1)[..., None, None] / square.sqrt()
    scaled = [g / square for g in grams]
    return [length * c for c in (_largest(scaled) if p == 1 else _powers(scaled, p))]


class Roots(NamedTuple):
    """``gram^(1/2)`` and ``gram^(-1/2)``, but for what is too small to count."""

    root: Tensor
    inverse: Tensor


def roots(gram: Tensor, whole: Tensor | None = None, smallest: float = SMALLEST) -> Roots:
    """Of symmetric (..., r, r) with eigenvalues from 0 on.

    ``whole`` (...) is the square norm of a vector that the Gram matrix is of a part of, and was
    perhaps found as a difference: then its rounding is small beside the whole, not beside itself.
    """
    scale = (trace(gram) if whole is None else whole).clamp_min(least_square(gram))
    inverse = inverse_root(gram, scale, smallest)
    return Roots(gram @ inverse, inverse)


def least_square(x: Tensor) -> float:
    """Of the norms that can be divided by."""
    return linalg.least_norm(x.dtype) ** 2


def _largest(grams: list[Tensor]) -> list[Tensor]:
    """For p = 1: all weight on the largest singular value, shared evenly if there are several."""
    powers = grams
    for _ in range(_SQUARINGS[grams[0].dtype]):
        most = torch.stack([squared_norm(g, 2) for g in powers]).amax(0).sqrt()
        scale = most.clamp_min(torch.finfo(most.dtype).tiny)[..., None, None]
        powers = [(g / scale) @ (g / scale) for g in powers]
    total = torch.stack([trace(g) for g in powers]).sum(0)[..., None, None]
    shares = [g / total.clamp_min(torch.finfo(total.dtype).tiny) for g in powers]
    value = torch.stack([(s * g).sum((-2, -1)) for s, g in zip(shares, grams, strict=True)]).sum(0)
    value = value[..., None, None].clamp_min(torch.finfo(value.dtype).tiny).sqrt()
    return [share / value for share in shares]


def _powers(grams: list[Tensor], p: float) -> list[Tensor]:
    """U Σ^(q−1) Vᵀ over the dual norm to the q − 1, by eigenvectors: the slow way."""
    q = p / (p - 1)
    # What is not finite would raise, and shall end its own member's step alone.
    sound = torch.stack([trace(g @ g).isfinite() for g in grams]).all(0)[..., None, None]
    found = [torch.linalg.eigh(torch.where(sound, g, 0)) for g in grams]
    # Relative to the largest one, of which any power is 1: near p = 1 those of all others vanish.
    values = [v.clamp_min(torch.finfo(v.dtype).eps ** 2) for v, _ in found]
    most = torch.stack([v[..., -1] for v in values]).amax(0)[..., None]
    values = [v / most for v in values]
    norm = torch.stack([(v ** (q / 2)).sum(-1) for v in values]).sum(0) ** ((q - 1) / q)
    length = most.sqrt() * norm[..., None]
    powers = (
        (vectors * (v ** ((q - 2) / 2) / length)[..., None, :]) @ vectors.mT
        for v, (_, vectors) in zip(values, found, strict=True)
    )
    return [torch.where(sound, power, torch.nan) for power in powers]
