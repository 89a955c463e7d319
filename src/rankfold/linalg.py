"""Batched linear algebra for thin factors: products, Cholesky and small inverses alone.

Everything here works on stacks ``(..., rows, r)`` and ``(..., r, r)``, runs a number of iterations
known beforehand, and never asks the device for a value. No SVD, QR or eigendecomposition: each is
tens to hundreds of times dearer than the products it can be replaced by.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, tall
from .together import as_one, both, halves

_SIGN_STEPS = 14
# Multiples of r·ε by which the diagonal of a Gram matrix is lifted when it fails to factor.
_LIFTS = (8.0, 8e3)
_PIVOT_NOISE = 8


def sym(x: Tensor) -> Tensor:
    """Symmetric part of ``(..., r, r)``."""
    return (x + x.mT) / 2


def skew(x: Tensor) -> Tensor:
    """Skew-symmetric part of ``(..., r, r)``."""
    return (x - x.mT) / 2


def identity_like(x: Tensor) -> Tensor:
    """The r×r identity in the dtype and on the device of ``x`` ``(..., r, r)``."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def inverse(x: Tensor, guess: Tensor | None = None) -> Tensor:
    """Inverse of ``(..., r, r)``; a singular member does not come out right, no other is touched.

    A ``guess`` that is likely to be near it makes this faster and changes nothing else.
    """
    if guess is not None and kernels.serve_small(x):
        return kernels.refine.inverse(x, guess)
    served = kernels.serve(x)
    if guess is None or not (served or tall.can_ask(x)):
        return kernels.elimination.inverse(x) if served else _eliminated(x)
    # Three products take a quarter of the time. Each member goes by its own guess.
    guess = guess.expand_as(x)
    error = tall.add_product(identity_like(x), x, guess, alpha=-1.0)
    if served:
        refined = tall.add_product(guess, guess, tall.add_product(error, error, error))
        found = kernels.members.Found((refined,), error, _cubed_is_rounding(x.dtype))
        return kernels.elimination.inverse(x, found)
    size = squared_norm(error, 2)
    refined = tall.add_product(guess, guess, error + square_unless_rounding(error, size))
    near = size < _cubed_is_rounding(x.dtype)
    if near.all():
        return refined
    return torch.where(near[..., None, None], refined, _eliminated(x))


def _eliminated(x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.inv_ex(x, check_errors=False).inverse
    return result


def _cubed_is_rounding(dtype: torch.dtype) -> float:
    """The square of the norm below which an error (..., r, r) has a cube that is rounding."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def square_unless_rounding(error: Tensor, size: Tensor) -> Tensor:
    """``error²``, made where values may be asked for and some member needs it.

    Zero for members whose ``size`` ‖error‖² (...) is rounding beside 1.
    """
    rounding = size < torch.finfo(error.dtype).eps
    if rounding.all():
        return error.new_zeros(())
    return torch.where(rounding[..., None, None], 0, error @ error)


class Cholesky(NamedTuple):
    """``gram = lower lowerᵀ`` and ``lower⁻¹``, (..., r, r), after a lift for the ``lifted`` (...).

    The inverse is explicit, because a product of a tall block with it is several times faster
    than a triangular solve on that block.
    """

    lower: Tensor
    inverse: Tensor
    lifted: Tensor


def cholesky(gram: Tensor, damping: float = 0.0) -> Cholesky:
    """Cholesky factor of ``gram + damping·I``; members that fail are lifted and tried again.

    A Gram matrix that is singular to working precision, one that fails to factor or has a pivot
    that can be rounding alone, gets a growing multiple of its diagonal added. Every member takes
    part in every try, since asking which ones failed would stop the device, but a member that
    succeeded keeps its factor untouched.
    """
    if damping:
        gram = gram + damping * identity_like(gram)
    if kernels.serve(gram):
        return Cholesky(*kernels.elimination.cholesky_inverse(gram))
    lower, info = torch.linalg.cholesky_ex(gram, check_errors=False)
    eps, size = torch.finfo(gram.dtype).eps, gram.diagonal(dim1=-2, dim2=-1)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    rounding = (pivots <= (_PIVOT_NOISE + gram.shape[-1]) * eps * size).any(-1)
    info = torch.where(rounding, 1, info)
    lifted = info != 0
    if tall.can_ask(lifted) and not lifted.any():
        return Cholesky(lower, _triangular_inverse(lower), lifted)
    # A column of zeros has no size of its own to be lifted by.
    diagonal = torch.diag_embed(size.clamp_min(eps * size.amax(-1, keepdim=True)))
    for multiple in _LIFTS:
        lift = multiple * gram.shape[-1] * eps
        again, info_again = torch.linalg.cholesky_ex(gram + lift * diagonal, check_errors=False)
        failed = info != 0
        lower = torch.where(failed[..., None, None], again, lower)
        info = torch.where(failed, info_again, info)
    return Cholesky(lower, _triangular_inverse(lower), lifted)


def root_near_identity(gram: Tensor) -> tuple[Tensor, Tensor]:
    """A root ``gram = root rootᵀ`` and its inverse, for ``I`` plus something positive or small.

    Any root will do where this is used: the triangular one or, if cheaper, the symmetric one.
    """
    if kernels.serve_small(gram):
        return kernels.refine.root(gram)
    served = kernels.serve(gram)
    if not (served or tall.can_ask(gram)):
        return _triangular_root(gram)
    eye = identity_like(gram)
    error = eye - gram
    # The symmetric root, by the series of (I − E)^(±1/2) up to E².
    if served:
        half = tall.add_product(error, error, error, 0.5, 0.375)
        series = tall.add_product(gram, gram, half), eye + half
        found = kernels.members.Found(series, error, _cubed_is_rounding(gram.dtype))
        return kernels.elimination.cholesky_inverse(gram, found)[:2]
    size = squared_norm(error, 2)
    half, square = error / 2, square_unless_rounding(error, size)
    series = eye - half - square / 8, eye + half + 0.375 * square
    near = size < _cubed_is_rounding(gram.dtype)
    if near.all():
        return series
    pairs = zip(series, _triangular_root(gram), strict=True)
    root, inverse_root = (torch.where(near[..., None, None], one, other) for one, other in pairs)
    return root, inverse_root


def _triangular_root(gram: Tensor) -> tuple[Tensor, Tensor]:
    lower = torch.linalg.cholesky_ex(gram, check_errors=False).L
    return lower, _triangular_inverse(lower)


def _triangular_inverse(lower: Tensor) -> Tensor:
    eye = identity_like(lower).expand_as(lower)
    result: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
    return result


def squared_norm(x: Tensor, dims: int) -> Tensor:
    """Sum of squares over the last ``dims`` dimensions."""
    return x.square().flatten(-dims).sum(-1)


def frobenius(x: Tensor) -> Tensor:
    """Frobenius norm of each ``(..., rows, columns)``."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norms


def typical_value(x: Tensor) -> Tensor:
    """Root mean square of the singular values of each ``(..., r, r)``."""
    return frobenius(x) / math.sqrt(x.shape[-1])


def least_norm(dtype: torch.dtype) -> float:
    """The smallest norm to divide by: the squares that a smaller one is made of have vanished."""
    return float(torch.finfo(dtype).tiny ** 0.5)


class Frame(NamedTuple):
    """An orthonormal basis ``factor @ inverse`` of a factor's columns, not formed itself.

    ``triangle`` and its ``inverse`` are (..., r, r), ``gram`` is the Gram matrix of the basis,
    the identity unless the factor was ``lifted`` (...) or damped.
    """

    triangle: Tensor
    inverse: Tensor
    gram: Tensor
    lifted: Tensor


def cholesky_pair(left: Tensor, right: Tensor, damping: float) -> tuple[Cholesky, Cholesky]:
    """`cholesky` of two stacks of one shape in one go: it takes hardly longer than one alone."""
    return halves(cholesky(as_one(left, right), damping))


def orthonormal_frames(left: Tensor, right: Tensor, damping: float = 0.0) -> tuple[Frame, Frame]:
    """QR of factors ``(batch, m, r)``, ``(batch, n, r)``, by Cholesky of their Gram matrices.

    Done twice: one pass leaves a defect of κ²ε, the second takes it to κε for any κ whose square
    the Cholesky factorization survives (about 4e3 in float32). Past that, and with a ``damping``
    of the Gram matrix, the basis has columns shorter than one: what the factor does not span
    stays unspanned, and solves against it stay bounded. Both sides go through the r×r work
    together.
    """
    factors = left, right
    lower, inverse_lower, lifted = cholesky(as_one(*both(tall.gram, factors)), damping)
    triangle, turn = lower.mT, inverse_lower.mT
    gram = as_one(*both(tall.turned_gram, factors, halves(turn)))
    if not damping and kernels.serve_small(gram):
        triangle, turn, gram = kernels.frames.finish(lower, inverse_lower, gram, lifted)
    elif not damping:
        root, inverse_root = root_near_identity(gram)
        finished = root.mT @ triangle, turn @ inverse_root.mT, identity_like(gram).expand_as(gram)
        # A lifted basis is short on purpose; a second pass would stretch its noise to length one.
        pairs = zip(finished, (triangle, turn, gram), strict=True)
        triangle, turn, gram = (tall.choose(new, old, ~lifted) for new, old in pairs)
    return halves(Frame(triangle, turn, gram, lifted))


def overflown_is_nan(size: Tensor) -> Tensor:
    """A norm, or its square, with NaN for infinity.

    What is divided by an infinite size is zero, and a step of zero would pass for a finite one.
    """
    return size.nan_to_num(nan=math.nan, posinf=math.nan)


def trace(x: Tensor) -> Tensor:
    """Trace of (..., r, r)."""
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def squared_norm_weighted(x: Tensor, weight: Tensor) -> Tensor:
    """``tr(xᵀ weight x)`` for (..., r, r), never negative."""
    return (x * (weight @ x)).sum((-2, -1)).clamp_min(0)


def spectral_norm(cc: Tensor, uc: Tensor, dd: Tensor, vd: Tensor, i: int, j: int) -> Tensor:
    """Largest singular value of ``C Vᵀ + U Dᵀ`` from the r×r products of its factors.

    ``cc = CᵀC``, ``uc = UᵀC``, ``dd = DᵀD``, ``vd = VᵀD`` (..., r, r), ``UᵀU = i·I``,
    ``VᵀV = j·I``. With P the Gram matrix of [C U] and Q that of [V D], the squared singular
    values are the eigenvalues of PQ. Squaring that product in the symmetric form P ← P Q P
    leaves the top of the spectrum, with no factorization of Grams that may be singular.
    """
    tiny = torch.finfo(cc.dtype).tiny
    eye = identity_like(cc).expand_as(cc)
    # Work on a matrix of norm about one, so that the blocks of P are comparable.
    size, least = (trace(cc) + trace(dd)).sqrt(), least_norm(cc.dtype)
    s = size.clamp_min(least)[..., None, None]
    p = torch.cat([torch.cat([cc / s / s, uc.mT / s], -1), torch.cat([uc / s, i * eye], -1)], -2)
    q = torch.cat([torch.cat([j * eye, vd / s], -1), torch.cat([vd.mT / s, dd / s / s], -1)], -2)
    # The estimate is off by at most about 2r / 2^squarings, when many values crowd at the top.
    top = p
    for _ in range(38 if cc.dtype == torch.float64 else 24):
        top = sym(top @ q @ top)
        top = top / trace(top)[..., None, None].clamp_min(tiny)
    weight = top @ q
    value = trace(weight @ p @ q) / trace(weight).clamp_min(tiny)
    # Below the least norm overlaps are there yet, and squares no longer.
    return torch.where(size < least, size, size * value.clamp_min(0).sqrt())


def sylvester(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Solution X of ``a X + X b = c`` for symmetric positive definite a and b, all (..., r, r).

    The matrix sign of [[a, c], [0, −b]] by Newton's iteration, scaled by determinants' stand-in
    (norms) so that condition numbers up to 1e8 converge in the steps made: inverses and products
    alone, no eigendecomposition.
    """
    for _ in range(_SIGN_STEPS):
        a_inverse, b_inverse = inverse(a), inverse(b)
        # One factor for both keeps the block matrix's own scaling.
        small = (frobenius(a_inverse).square() + frobenius(b_inverse).square()).sqrt()
        large = (frobenius(a).square() + frobenius(b).square()).sqrt()
        scale = (small / large).sqrt()[..., None, None]
        c = (scale * c + a_inverse @ c @ b_inverse / scale) / 2
        a = (scale * a + a_inverse / scale) / 2
        b = (scale * b + b_inverse / scale) / 2
    return c / 2


def half_share(delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The right factor's part H of the core's relative change Δ: (I + H)² ≈ I + Δ, (batch, r, r).

    With it a matrix near (I + H)⁻¹, and which members (batch,) make a long step, for which H is
    zero.

    The left factor takes the rest, (I + Δ)(I + H)⁻¹. A square root shared evenly keeps a run that
    goes back and forth from driving the factors apart; its series up to Δ³ does as well. A
    change of the order of the core itself is left to the left factor alone. The product does not
    depend on any of this.
    """
    eye = identity_like(delta)
    square = delta @ delta
    root = delta / 2 - (square - square @ delta / 2) / 8
    guess = eye - delta / 2 + 0.375 * square
    long = ~(squared_norm(delta, 2) <= 0.25)
    far = tall.per_member(long, delta)
    return torch.where(far, 0, root), torch.where(far, eye, guess), long


def norm_bound(x: Tensor) -> Tensor:
    """An upper bound on the spectral norm of (..., r, r), at most 1% above it for r up to 150.

    A Schatten norm of high order, by repeated squaring of xᵀx.
    """
    tiny = torch.finfo(x.dtype).tiny
    power, log_scale = x.mT @ x, torch.zeros_like(x[..., 0, 0])
    for k in range(9):
        size = trace(power).clamp_min(tiny)
        log_scale = log_scale + size.log() / 2**k
        power = power / size[..., None, None]
        power = power @ power
    return ((log_scale + trace(power).clamp_min(tiny).log() / 2**9) / 2).exp()
