"""Triton kernels that invert r×r float32 matrices, r up to 64, by products from a good guess.

Elimination is a chain of r dependent steps; a product of two r×r matrices is one instruction
stream. In a step on the fixed-rank manifold nearly every inverse has a neighbour that is known
already, and a few products take that the rest of the way. How many is decided in the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .products import PRECISION, dot, rough
from .sizes import padded


@triton.jit
def tile(r, R: tl.constexpr):
    """Where the program's own matrix of a stack (..., r, r) lies, what of it exists, and I."""
    rows = tl.arange(0, R)[:, None]
    cols = tl.arange(0, R)[None, :]
    place = tl.program_id(0).to(tl.int64) * r * r + rows * r + cols
    return place, (rows < r) & (cols < r), (rows == cols).to(tl.float32)


@triton.jit
def of_side(left_ptr, right_ptr):
    """One of two tensors, by the second coordinate of the program."""
    chosen = left_ptr
    if tl.program_id(1) == 1:
        chosen = right_ptr
    return chosen


@triton.jit
def total(x):
    """The sum of a matrix."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def invert(m, guess, eye, P: tl.constexpr):
    """m⁻¹ by Newton's iteration X ← X (2I − m X), which squares the error I − m X every time."""
    x = guess
    error = eye - dot(m, x, P)
    size = total(error * error)
    if (size < 0.5) == 0:
        # Too far off, or not a number: the start that converges for any matrix, if slowly.
        rows = tl.max(tl.sum(tl.abs(m), 1), 0)
        x = tl.trans(m) / (rows * tl.max(tl.sum(tl.abs(m), 0), 0))
        error = eye - dot(m, x, P)
        size = total(error * error)
    steps = 0
    while (steps < 64) & (size >= 1e-6):
        x += rough(x, error, P)
        error = eye - dot(m, x, P)
        size = total(error * error)
        steps += 1
    # An error of 1e-3, cubed, is rounding, and one of 1e-4, squared.
    if size >= 1e-8:
        error += rough(error, error, P)
    x += rough(x, error, P)
    return x


@triton.jit
def _inverse_kernel(m_ptr, guess_ptr, out_ptr, r, R: tl.constexpr, PRECISION: tl.constexpr):
    place, inside, eye = tile(r, R)
    m = tl.load(m_ptr + place, mask=inside, other=eye)
    guess = tl.load(guess_ptr + place, mask=inside, other=eye)
    tl.store(out_ptr + place, invert(m, guess, eye, PRECISION), mask=inside)


@triton.jit
def best_rank(
    core, xx_ptr, yy_ptr, gg, guess, place, inside, eye, unconverged_ptr, share,
    ITERATIONS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Alternating least squares, each inverse from the one before it, with gg xx and gg yy.

    Returns gg yy right, right and (core + gg yy right)⁻¹, and stores whether more than a ``share``
    of the last distance but one is left to move. Once a distance is rounding, less is. Matrices
    that do not change are loaded when needed: registers are scarce.
    """
    inverse = invert(core, guess, eye, P)
    right = tl.trans(inverse)
    pulled = dot(gg * tl.load(yy_ptr + place, mask=inside, other=0.0), right, P)
    distance = 1.0
    earlier = 1.0
    k = 0
    while (k < ITERATIONS) & (distance > 1e-7):
        change = -right
        pull = dot(gg * tl.load(xx_ptr + place, mask=inside, other=0.0), inverse, P)
        right = invert(tl.trans(core) + pull, right, eye, P)
        change += right
        before = pulled
        pulled = dot(gg * tl.load(yy_ptr + place, mask=inside, other=0.0), right, P)
        earlier = distance
        # What pads a matrix has no weight in yy.
        distance = tl.sqrt(tl.maximum(total(change * (pulled - before)), 0.0))
        # The first one was of the core alone; a later one of what hardly moves is good to 1e-7.
        if (k == 0) | (distance > 1e-7):
            inverse = invert(core + pulled, inverse, eye, P)
        k += 1
    # As in `rank_core._still_moving`; where iterations ended early they did so at rounding.
    left = distance * tl.minimum(distance, earlier)
    tl.store(unconverged_ptr, left > single(share) * earlier)
    return pulled, right, inverse


@triton.jit
def _roots(m, eye, LESS_ONE: tl.constexpr, P: tl.constexpr):
    """m^(1/2) and m^(-1/2), or both less I, as they are made: what is small beside I stays exact,
    and so does what is small far from it."""
    bound = tl.max(tl.sum(tl.abs(m), 1), 0)
    # Eigenvalues must lie below 3; close to 1 they are best left alone.
    scale = tl.where(bound < 2.5, 1.0, 2.0 / (1.0 + bound))
    root = m * scale
    error = eye - root
    size = total(error * error)
    if size < 1e-5:
        # Scaled matrices have a row sum above 10/7, and are not as near. (I − E)^(±1/2) up to E²;
        # what is left out is 5/16 of the cube of 3e-3.
        square = tl.zeros_like(error)
        if size >= 1e-8:
            square = rough(error, error, P)
        root = -0.5 * error - 0.125 * square
        inverse = 0.5 * error + 0.375 * square
        if not LESS_ONE:
            root += eye
            inverse += eye
    else:
        inverse = eye
        steps = 0
        while (steps < 40) & (size >= 1e-5):
            half = eye + 0.5 * error
            root = dot(root, half, P)
            inverse = dot(half, inverse, P)
            error = eye - dot(inverse, root, P)
            size = total(error * error)
            steps += 1
        half = 0.5 * error + 0.375 * rough(error, error, P)
        root = (root + rough(root, half, P)) / tl.sqrt(scale)
        inverse = (inverse + rough(half, inverse, P)) * tl.sqrt(scale)
        if LESS_ONE:
            root -= eye
            inverse -= eye
    return root, inverse


@triton.jit
def root_changes(m, eye, P: tl.constexpr):
    """m^(1/2) − I and m^(-1/2) − I."""
    return _roots(m, eye, True, P)


@triton.jit
def roots(m, eye, P: tl.constexpr):
    """m^(1/2) and m^(-1/2), by a series near I and by coupled Newton–Schulz products."""
    return _roots(m, eye, False, P)


@triton.jit
def _best_rank_kernel(
    core_ptr, xx_ptr, yy_ptr, guess_ptr, left_ptr, right_ptr, inverse_ptr, unconverged_ptr,
    r, share, R: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place, inside, eye = tile(r, R)
    core = tl.load(core_ptr + place, mask=inside, other=eye)
    guess = tl.load(guess_ptr + place, mask=inside, other=eye)
    unconverged_ptr += tl.program_id(0)
    pulled, right, inverse = best_rank(
        core, xx_ptr, yy_ptr, 1.0, guess, place, inside, eye, unconverged_ptr, share,
        ITERATIONS, PRECISION,
    )  # fmt: skip
    tl.store(left_ptr + place, core + pulled, mask=inside)
    tl.store(right_ptr + place, right, mask=inside)
    tl.store(inverse_ptr + place, inverse, mask=inside)


@triton.jit
def _root_kernel(m_ptr, root_ptr, inverse_ptr, r, R: tl.constexpr, PRECISION: tl.constexpr):
    place, inside, eye = tile(r, R)
    m = tl.load(m_ptr + place, mask=inside, other=eye)
    root, inverse = roots(m, eye, PRECISION)
    tl.store(root_ptr + place, root, mask=inside)
    tl.store(inverse_ptr + place, inverse, mask=inside)


def launch(r: int) -> dict[str, int | str]:
    """How a kernel of one program a matrix is launched for matrices r×r."""
    return {"R": padded(r), "PRECISION": PRECISION, "num_warps": 4}


def inverse(x: Tensor, guess: Tensor) -> Tensor:
    """Inverses of ``x`` (..., r, r) from a ``guess`` that need not be good, only usually is."""
    x = x.contiguous()
    guess = guess.expand_as(x).contiguous()
    out = torch.empty_like(x)
    r = x.shape[-1]
    _inverse_kernel[(x.shape[:-2].numel(),)](x, guess, out, r, **launch(r))
    return out


def root(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric roots and inverse roots of positive definite ``x`` (..., r, r)."""
    x = x.contiguous()
    made = torch.empty_like(x), torch.empty_like(x)
    r = x.shape[-1]
    _root_kernel[(x.shape[:-2].numel(),)](x, *made, r, **launch(r))
    return made


def best_rank_core(
    core: Tensor, xx: Tensor, yy: Tensor, guess: Tensor, iterations: int, share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``left``, ``right`` and ``left⁻¹`` (batch, r, r), and who has not converged (batch,).

    As in `rankfold.rank_core`; ``guess`` is near the inverse of ``core``, and ``share`` what may be
    left to move of the last distance but one.
    """
    core, xx, yy = (x.contiguous() for x in (core, xx, yy))
    guess = guess.expand_as(core).contiguous()
    made = [torch.empty_like(core) for _ in range(3)]
    unconverged = core.new_empty(core.shape[:-2], dtype=torch.bool)
    r = core.shape[-1]
    _best_rank_kernel[(core.shape[:-2].numel(),)](
        core, xx, yy, guess, *made, unconverged, r, share, ITERATIONS=iterations, **launch(r)
    )
    return made[0], made[1], made[2], unconverged
