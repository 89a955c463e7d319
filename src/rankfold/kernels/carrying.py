"""A Triton kernel for the r×r part of carrying momentum downstairs, float32, r up to 64.

What it computes is said in the plain form, `carry` in `geometries/embedded.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import dot
from .refine import launch, of_side, tile


@triton.jit
def _carry_kernel(
    k_ptr, xx_ptr, yy_ptr, u_ptr, v_ptr, x_ptr, y_ptr, inner_a_ptr, inner_b_ptr,
    to_u_ptr, to_v_ptr, to_x_ptr, to_y_ptr, to_a_ptr, to_b_ptr, to_ta_ptr, to_tb_ptr, r,
    DESKEW: tl.constexpr, FRAMED: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one side: M B' as U along + X beside, in terms of what U and X are combinations of."""
    P: tl.constexpr = PRECISION
    place, inside, _ = tile(r, R)
    k = tl.load(k_ptr + place, mask=inside, other=0.0)
    if tl.program_id(1) == 1:
        k = tl.trans(k)
    beside = tl.load(of_side(v_ptr, u_ptr) + place, mask=inside, other=0.0)
    gram = tl.load(of_side(yy_ptr, xx_ptr) + place, mask=inside, other=0.0)
    across = tl.load(of_side(y_ptr, x_ptr) + place, mask=inside, other=0.0)
    along = dot(gram, across, P) + dot(k, beside, P)
    if DESKEW:
        # The overlap with the new point, of which either side finds the symmetric part by itself.
        own_u = tl.load(of_side(u_ptr, v_ptr) + place, mask=inside, other=0.0)
        own_x = tl.load(of_side(x_ptr, y_ptr) + place, mask=inside, other=0.0)
        gram = tl.load(of_side(xx_ptr, yy_ptr) + place, mask=inside, other=0.0)
        overlap = dot(tl.trans(own_u), along, P)
        overlap += dot(tl.trans(dot(gram, own_x, P)), beside, P)
        overlap = 0.5 * (overlap + tl.trans(overlap))
        along -= dot(own_u, overlap, P)
        beside -= dot(own_x, overlap, P)
    inner = tl.load(of_side(inner_a_ptr, inner_b_ptr) + place, mask=inside, other=0.0)
    along -= dot(inner, beside, P)
    if FRAMED:
        to = tl.load(of_side(to_u_ptr, to_v_ptr) + place, mask=inside, other=0.0)
        along = dot(to, along, P)
        to = tl.load(of_side(to_x_ptr, to_y_ptr) + place, mask=inside, other=0.0)
        beside = dot(to, beside, P)
    tl.store(of_side(to_a_ptr, to_b_ptr) + place, along, mask=inside)
    tl.store(of_side(to_ta_ptr, to_tb_ptr) + place, beside, mask=inside)


def carry(
    k: Tensor,
    grams: tuple[Tensor, Tensor],
    new: tuple[Tensor, ...],
    inner: tuple[Tensor, Tensor],
    to: Sequence[Tensor],
    deskew: bool,
) -> Tensor:
    """What to multiply A, B, T_A, T_B by for a carried momentum, (4, batch, r, r).

    ``new`` are u, v, x, y of the new factors, ``grams`` XᵀX and YᵀY, ``inner`` and ``to`` those of
    the sides: to_u of both and then to_x, or nothing where they are identities; all (batch, r, r).
    """
    given = [x.contiguous() for x in (k, *grams, *new, *inner)]
    turns = [x.contiguous() for x in to] or [given[0]] * 4
    made = torch.empty((4, *k.shape), dtype=k.dtype, device=k.device)
    r = k.shape[-1]
    _carry_kernel[(len(k), 2)](
        *given, *turns, *made, r, DESKEW=deskew, FRAMED=len(to) > 0, **launch(r)
    )
    return made
