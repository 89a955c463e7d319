"""Triton kernels for the r×r part of a fixed-quotient step, float32, r up to 64.

What they compute is said in the plain forms, in `geometries/fixed_quotient.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..together import empty_like_both
from .floats import single
from .products import dot
from .refine import launch, of_side, tile, total
from .sizes import padded


@triton.jit
def _turns_kernel(
    inverse_a_ptr, inverse_b_ptr, turn_a_ptr, turn_b_ptr, r, weight,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one side, from the inverse of the other."""
    place, inside, _ = tile(r, R)
    inverse = tl.load(of_side(inverse_b_ptr, inverse_a_ptr) + place, mask=inside, other=0.0)
    turn = single(weight) * dot(tl.trans(inverse), inverse, PRECISION)
    tl.store(of_side(turn_a_ptr, turn_b_ptr) + place, turn, mask=inside)


def turns(inverses: tuple[Tensor, Tensor], weight: float) -> tuple[Tensor, Tensor]:
    """``weight`` (BᵀB)⁻¹ and ``weight`` (AᵀA)⁻¹ from L_A⁻¹ and L_B⁻¹, all (batch, r, r)."""
    left, right = (x.contiguous() for x in inverses)
    made, r = empty_like_both(left, right), left.shape[-1]
    _turns_kernel[(len(left), 2)](left, right, *made, r, weight, **launch(r))
    return made


@triton.jit
def _half(inverse_ptr, overlap_ptr, place, inside, P: tl.constexpr):
    """Half of L⁻ᵀ (L⁻¹ overlap)."""
    inverse = tl.load(inverse_ptr + place, mask=inside, other=0.0)
    overlap = tl.load(overlap_ptr + place, mask=inside, other=0.0)
    return 0.5 * dot(tl.trans(inverse), dot(inverse, overlap, P), P)


@triton.jit
def _shifts_kernel(
    inverse_a_ptr, inverse_b_ptr, overlap_a_ptr, overlap_b_ptr, shift_a_ptr, shift_b_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place, inside, _ = tile(r, R)
    shift = _half(inverse_a_ptr, overlap_a_ptr, place, inside, PRECISION)
    shift -= tl.trans(_half(inverse_b_ptr, overlap_b_ptr, place, inside, PRECISION))
    tl.store(shift_a_ptr + place, shift, mask=inside)
    tl.store(shift_b_ptr + place, -tl.trans(shift), mask=inside)


def shifts(
    inverses: tuple[Tensor, Tensor], overlaps: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Λ and −Λᵀ from L_A⁻¹ and L_B⁻¹, AᵀM_A and BᵀM_B, all (batch, r, r)."""
    given = [x.contiguous() for x in (*inverses, *overlaps)]
    made, r = empty_like_both(given[0], given[1]), given[0].shape[-1]
    _shifts_kernel[(len(given[0]),)](*given, *made, r, **launch(r))
    return made


@triton.jit
def _product_square_kernel(
    a_ptr, b_ptr, out_ptr, r, R: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    place, inside, _ = tile(r, R)
    a = tl.load(a_ptr + place, mask=inside, other=0.0)
    core = dot(tl.trans(a), tl.load(b_ptr + place, mask=inside, other=0.0), PRECISION)
    tl.store(out_ptr + tl.program_id(0), total(core * core))


def product_square(left: Tensor, right: Tensor) -> Tensor:
    """‖A Bᵀ‖² (batch,) from L_A and L_B (batch, r, r) of AᵀA = L_A L_Aᵀ and BᵀB = L_B L_Bᵀ."""
    left, right, r = left.contiguous(), right.contiguous(), left.shape[-1]
    out = left.new_empty(len(left))
    _product_square_kernel[(len(left),)](left, right, out, r, **launch(r))
    return out


@triton.jit
def _size(x_ptr, place, inside):
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    return tl.sqrt_rn(total(x * x))


@triton.jit
def _bounded_kernel(
    triangle_a_ptr, triangle_b_ptr, inverse_a_ptr, inverse_b_ptr, scale_ptr, square_ptr,
    alive_ptr, r, largest, R: tl.constexpr,
):  # fmt: skip
    place, inside, _ = tile(r, R)
    member = tl.program_id(0)
    moved = tl.abs(tl.load(scale_ptr + member)) * tl.sqrt_rn(tl.load(square_ptr + member))
    inverses = _size(inverse_a_ptr, place, inside) + _size(inverse_b_ptr, place, inside)
    bound = _size(triangle_a_ptr, place, inside) + _size(triangle_b_ptr, place, inside)
    tl.store(alive_ptr + member, bound + moved * inverses <= single(largest))


def bounded(
    triangles: tuple[Tensor, Tensor],
    inverses: tuple[Tensor, Tensor],
    scale: Tensor,
    square: Tensor,
    largest: float,
) -> Tensor:
    """Members (batch,) with a bound on their entries after a step, from matrices (batch, r, r).

    ``square`` is that of the vector's norm, ``scale`` what it is multiplied by, both (batch,).
    """
    given = [x.contiguous() for x in (*triangles, *inverses, scale, square)]
    alive = torch.empty(square.shape, dtype=torch.bool, device=square.device)
    r = inverses[0].shape[-1]
    _bounded_kernel[(len(alive),)](*given, alive, r, largest, R=padded(r), num_warps=4)
    return alive
