"""Triton kernels between the products over rows of an embedded step, float32, r up to 64.

What they compute is said in the plain forms: `orthonormal_frames` in `linalg.py` and
`coordinates` in `geometries/fixed_embedded.py` and `geometries/isometry_embedded.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .products import change_dot, dot, half_gram, overlap
from .refine import launch, root_changes, tile, total
from .sizes import padded


@triton.jit
def _finish_kernel(
    lower_ptr, inverse_ptr, gram_ptr, lifted_ptr, triangle_ptr, turn_ptr, own_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    lifted = tl.load(lifted_ptr + tl.program_id(0))
    gram = tl.load(gram_ptr + place, mask=inside, other=eye)
    # Registers are scarce: matrices are loaded when needed.
    if lifted:
        tl.store(own_ptr + place, gram, mask=inside)
        lower = tl.load(lower_ptr + place, mask=inside, other=0.0)
        tl.store(triangle_ptr + place, tl.trans(lower), mask=inside)
        inverse = tl.load(inverse_ptr + place, mask=inside, other=0.0)
        tl.store(turn_ptr + place, tl.trans(inverse), mask=inside)
    else:
        tl.store(own_ptr + place, eye, mask=inside)
        grow, turn = root_changes(gram, eye, P)
        square = total(grow * grow)
        upper = tl.trans(tl.load(lower_ptr + place, mask=inside, other=0.0))
        upper += change_dot(grow, upper, square, P)
        tl.store(triangle_ptr + place, upper, mask=inside)
        upper = tl.trans(tl.load(inverse_ptr + place, mask=inside, other=0.0))
        upper += change_dot(upper, turn, square, P)
        tl.store(turn_ptr + place, upper, mask=inside)


def finish(
    lower: Tensor, inverse: Tensor, gram: Tensor, lifted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The second pass of a QR by Cholesky, from the Gram matrix that the first one left.

    Triangles, their inverses and the Gram matrices of the bases, all (..., r, r) like what is
    given; a ``lifted`` (...) member keeps its first pass.
    """
    lower, inverse, gram = (x.contiguous() for x in (lower, inverse, gram))
    triangle, turn, own = (torch.empty_like(gram) for _ in range(3))
    r = gram.shape[-1]
    _finish_kernel[(lifted.numel(),)](
        lower, inverse, gram, lifted.contiguous(), triangle, turn, own, r, **launch(r)
    )
    return triangle, turn, own


@triton.jit
def _side(
    cross_ptr, square_ptr, inverse_ptr, gram_ptr, inner_ptr, normal_ptr, short,
    place, inside, eye, P: tl.constexpr,
):  # fmt: skip
    """Stores one side's inner overlap and XᵀX; returns UᵀC, and the traces of CᵀC and XᵀX."""
    inverse = tl.load(inverse_ptr + place, mask=inside, other=0.0)
    along = overlap(inverse, tl.load(cross_ptr + place, mask=inside, other=0.0), P)
    if short:
        # A basis that is short in places has to be projected away from twice.
        gram = tl.load(gram_ptr + place, mask=inside, other=0.0)
        inner = 2.0 * along - dot(gram, along, P)
        tl.store(inner_ptr + place, inner, mask=inside)
        within = 0.5 * overlap(inner, 2.0 * along - dot(gram, inner, P), P)
    else:
        tl.store(inner_ptr + place, along, mask=inside)
        within = half_gram(along, P)
    square = tl.load(square_ptr + place, mask=inside, other=0.0)
    normal = square - (within + tl.trans(within))
    tl.store(normal_ptr + place, normal, mask=inside)
    return along, total(square * eye), total(normal * eye)


@triton.jit
def _coordinates_kernel(
    cross_a_ptr, cross_b_ptr, square_a_ptr, square_b_ptr, inverse_a_ptr, inverse_b_ptr,
    gram_a_ptr, gram_b_ptr, lifted_a_ptr, lifted_b_ptr, inner_a_ptr, inner_b_ptr,
    k_ptr, xx_ptr, yy_ptr, norm_ptr, r, little, rounding,
    DAMPED: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    little, rounding = single(little), single(rounding)
    short = DAMPED
    if not DAMPED:
        short = tl.load(lifted_a_ptr + tl.program_id(0)) | tl.load(lifted_b_ptr + tl.program_id(0))
    left, trace_c, trace_x = _side(
        cross_a_ptr, square_a_ptr, inverse_a_ptr, gram_a_ptr, inner_a_ptr, xx_ptr, short,
        place, inside, eye, P,
    )  # fmt: skip
    right, trace_d, trace_y = _side(
        cross_b_ptr, square_b_ptr, inverse_b_ptr, gram_b_ptr, inner_b_ptr, yy_ptr, short,
        place, inside, eye, P,
    )  # fmt: skip
    k = 0.5 * (left + tl.trans(right))
    tl.store(k_ptr + place, k, mask=inside)
    across = trace_x + trace_y
    # Not tl.maximum, which would make zero of NaN.
    square = total(k * k) + tl.where(across < 0.0, 0.0, across)
    hidden = 0.0
    if square < little * (trace_c + trace_d):
        hidden = rounding * (trace_c + trace_d)
        diagonal = tl.program_id(0).to(tl.int64) * r * r + tl.arange(0, R) * (r + 1)
        there = tl.arange(0, R) < r
        tl.debug_barrier()  # other threads have stored what is read
        tl.store(xx_ptr + diagonal, tl.load(xx_ptr + diagonal, mask=there) + hidden, mask=there)
        tl.store(yy_ptr + diagonal, tl.load(yy_ptr + diagonal, mask=there) + hidden, mask=there)
    tl.store(norm_ptr + tl.program_id(0), square + 2 * r * hidden)


def coordinates(
    crosses: tuple[Tensor, Tensor],
    squares: tuple[Tensor, Tensor],
    inverses: tuple[Tensor, Tensor],
    grams: tuple[Tensor, Tensor],
    lifted: tuple[Tensor, Tensor],
    little: float,
    rounding: float,
    *,
    damped: bool,
) -> list[Tensor]:
    """Inner overlaps of both sides, K, XᵀX, YᵀY (batch, r, r) and the square norm (batch,).

    ``grams`` are looked at where a side was ``lifted`` (batch,), or all are ``damped``.
    """
    given = [x.contiguous() for x in (*crosses, *squares, *inverses, *grams, *lifted)]
    made = [torch.empty_like(given[0]) for _ in range(5)]
    batch, r, _ = given[0].shape
    norm = given[0].new_empty(batch)
    _coordinates_kernel[(batch,)](
        *given, *made, norm, r, little, rounding, DAMPED=damped, **launch(r)
    )
    return [*made, norm]


@triton.jit
def _skew_core_kernel(
    left_ptr, right_ptr, xx_ptr, yy_ptr, k_ptr, norm_ptr, r, R: tl.constexpr
):  # fmt: skip
    place, inside, eye = tile(r, R)
    k = tl.load(left_ptr + place, mask=inside, other=0.0)
    k -= tl.load(right_ptr + place, mask=inside, other=0.0)
    k = 0.25 * (k - tl.trans(k))
    tl.store(k_ptr + place, k, mask=inside)
    across = tl.load(xx_ptr + place, mask=inside, other=0.0)
    across = total((across + tl.load(yy_ptr + place, mask=inside, other=0.0)) * eye)
    square = total(k * k) + tl.where(across < 0.0, 0.0, across)
    tl.store(norm_ptr + tl.program_id(0), square)


def skew_core(left: Tensor, right: Tensor, xx: Tensor, yy: Tensor) -> tuple[Tensor, Tensor]:
    """K (batch, r, r) of an isometry's vector, and the square of the norm (batch,).

    From UᵀC and VᵀD, XᵀX and YᵀY.
    """
    given = [x.contiguous() for x in (left, right, xx, yy)]
    k, (batch, r, _) = torch.empty_like(given[0]), given[0].shape
    norm = k.new_empty(batch)
    _skew_core_kernel[(batch,)](*given, k, norm, r, R=padded(r), num_warps=4)
    return k, norm
