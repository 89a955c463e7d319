"""Triton kernels for the whole r×r part of the truncated-SVD retractions, float32, r up to 64.

One program a member. What each line computes is said in the plain forms, `retract` in
`geometries/fixed_embedded.py` and `geometries/isometry_embedded.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import dot, overlap, rough
from .refine import best_rank, invert, launch, of_side, root_changes, roots, tile, total


@triton.jit
def _fixed_core_kernel(
    r_a_ptr, r_b_ptr, inverse_a_ptr, inverse_b_ptr, k_ptr, xx_ptr, yy_ptr, scale_ptr,
    p_ptr, pulled_ptr, q_ptr, f_ptr, unconverged_ptr, r, share,
    R: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Best rank: P, Q, F, and what F adds to the core."""
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    r_a = tl.load(r_a_ptr + place, mask=inside, other=eye)
    r_b = tl.load(r_b_ptr + place, mask=inside, other=eye)
    core = dot(r_a, tl.trans(r_b), P) + g * tl.load(k_ptr + place, mask=inside, other=0.0)
    inverse_a = tl.load(inverse_a_ptr + place, mask=inside, other=eye)
    inverse_b = tl.load(inverse_b_ptr + place, mask=inside, other=eye)
    guess = overlap(inverse_b, inverse_a, P)
    unconverged_ptr += member
    pulled, f, q = best_rank(
        core, xx_ptr, yy_ptr, g * g, guess, place, inside, eye, unconverged_ptr, share,
        ITERATIONS, P,
    )  # fmt: skip
    tl.store(p_ptr + place, core + pulled, mask=inside)
    tl.store(pulled_ptr + place, pulled, mask=inside)
    tl.store(q_ptr + place, q, mask=inside)
    tl.store(f_ptr + place, f, mask=inside)


@triton.jit
def _fixed_roots_kernel(
    xx_ptr, yy_ptr, q_ptr, f_ptr, scale_ptr, grow_a_ptr, grow_b_ptr, z_a_ptr, z_b_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Z − I and Z⁻¹ − I of one side."""
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    g = tl.load(scale_ptr + tl.program_id(0))
    q = tl.load(of_side(q_ptr, f_ptr) + place, mask=inside, other=0.0)
    gram = g * g * tl.load(of_side(xx_ptr, yy_ptr) + place, mask=inside, other=0.0)
    grow, turn = root_changes(eye + overlap(q, dot(gram, q, P), P), eye, P)
    tl.store(of_side(grow_a_ptr, grow_b_ptr) + place, grow, mask=inside)
    tl.store(of_side(z_a_ptr, z_b_ptr) + place, turn, mask=inside)


@triton.jit
def _fixed_share_kernel(
    r_a_ptr, r_b_ptr, inverse_a_ptr, inverse_b_ptr, k_ptr, scale_ptr,
    p_ptr, pulled_ptr, grow_a_ptr, z_b_ptr, change_a_ptr, change_b_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How the change of the core is shared: the changes of R_A and R_B."""
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    g = tl.load(scale_ptr + tl.program_id(0))
    p = tl.load(p_ptr + place, mask=inside, other=0.0)
    grown = dot(tl.load(grow_a_ptr + place, mask=inside, other=0.0), p, P)
    delta = grown + dot(p + grown, tl.load(z_b_ptr + place, mask=inside, other=0.0), P)
    delta += g * tl.load(k_ptr + place, mask=inside, other=0.0)
    delta += tl.load(pulled_ptr + place, mask=inside, other=0.0)
    inverse_b = tl.load(inverse_b_ptr + place, mask=inside, other=0.0)
    delta = dot(delta, tl.trans(inverse_b), P)
    delta = dot(tl.load(inverse_a_ptr + place, mask=inside, other=0.0), delta, P)
    size = total(delta * delta)
    long = (size <= 0.25) == 0
    if size < 2.0**-11:
        # (Δ − H)(I + H)⁻¹ is Δ − H − H² up to 5/128 Δ⁵.
        square = rough(delta, delta, P)
        share = 0.5 * delta - 0.125 * (square - 0.5 * rough(square, delta, P))
        rest = delta - share - rough(share, share, P)
    else:
        square = dot(delta, delta, P)
        share = 0.5 * delta - 0.125 * (square - 0.5 * dot(square, delta, P))
        share = tl.where(long, 0.0, share)
        guess = tl.where(long, eye, eye - 0.5 * delta + 0.375 * square)
        rest = dot(delta - share, invert(eye + share, guess, eye, P), P)
    r_a = tl.load(r_a_ptr + place, mask=inside, other=0.0)
    r_b = tl.load(r_b_ptr + place, mask=inside, other=0.0)
    left = dot(r_a, rest, P)
    right = dot(r_b, tl.trans(share), P)
    ratio = total((r_b + right) * (r_b + right)) * total(r_a * r_a)
    ratio /= total((r_a + left) * (r_a + left)) * total(r_b * r_b)
    # Square roots of squared norms, and then of their ratio: after a long step alone.
    ratio = tl.where(long, tl.sqrt(tl.sqrt(ratio)), 1.0)
    left += (ratio - 1.0) * (r_a + left)
    right += (1.0 / ratio - 1.0) * (r_b + right)
    tl.store(change_a_ptr + place, left, mask=inside)
    tl.store(change_b_ptr + place, right, mask=inside)


@triton.jit
def _fixed_moves_kernel(
    r_a_ptr, r_b_ptr, inverse_a_ptr, inverse_b_ptr, xx_ptr, yy_ptr, inner_a_ptr, inner_b_ptr,
    scale_ptr, q_ptr, f_ptr, z_a_ptr, z_b_ptr, change_a_ptr, change_b_ptr,
    u_ptr, v_ptr, x_ptr, y_ptr, to_a_ptr, to_b_ptr, to_ta_ptr, to_tb_ptr, norm_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """New coefficients and moves of one side, from the change of its triangle."""
    P: tl.constexpr = PRECISION
    place, inside, _ = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    change = tl.load(of_side(change_a_ptr, change_b_ptr) + place, mask=inside, other=0.0)
    wide = change + tl.load(of_side(r_a_ptr, r_b_ptr) + place, mask=inside, other=0.0)
    turned = dot(tl.load(of_side(z_a_ptr, z_b_ptr) + place, mask=inside, other=0.0), wide, P)
    change += turned
    u = wide + turned
    tl.store(of_side(u_ptr, v_ptr) + place, u, mask=inside)
    x = g * dot(tl.load(of_side(q_ptr, f_ptr) + place, mask=inside, other=0.0), u, P)
    tl.store(of_side(x_ptr, y_ptr) + place, x, mask=inside)
    gram = tl.load(of_side(xx_ptr, yy_ptr) + place, mask=inside, other=0.0)
    norm = tl.sqrt(total(u * u) + tl.maximum(total(x * rough(gram, x, P)), 0.0))
    tl.store(norm_ptr + tl.program_id(1) * tl.num_programs(0) + member, norm)
    change -= dot(tl.load(of_side(inner_a_ptr, inner_b_ptr) + place, mask=inside, other=0.0), x, P)
    own = tl.load(of_side(inverse_a_ptr, inverse_b_ptr) + place, mask=inside, other=0.0)
    tl.store(of_side(to_a_ptr, to_b_ptr) + place, dot(own, change, P), mask=inside)
    other = tl.load(of_side(inverse_b_ptr, inverse_a_ptr) + place, mask=inside, other=0.0)
    tl.store(of_side(to_ta_ptr, to_tb_ptr) + place, dot(other, x, P), mask=inside)


def fixed_embedded(
    triangles: tuple[Tensor, Tensor],
    inverses: tuple[Tensor, Tensor],
    k: Tensor,
    grams: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor],
    scale: Tensor,
    iterations: int,
    share: float,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """New coefficients and coefficients of the moves, from matrices (batch, r, r), left first.

    Returns u, v, x, y of `NewCoefficients`; what to multiply A, B, T_A, T_B by; who has not
    converged (batch,), as ``share`` tells; and the norms of both new factors (2, batch).

    In four kernels, since more than a handful of matrices do not fit a program's registers; where
    the sides do not need each other they have programs of their own.
    """
    k, scale = k.contiguous(), scale.contiguous()
    r_a, r_b, inverse_a, inverse_b, xx, yy, inner_a, inner_b = (
        x.contiguous() for x in (*triangles, *inverses, *grams, *inner)
    )
    # Behind each other, so that what is of both sides can be taken for one; apart from what nobody
    # needs afterwards.
    made = k.new_empty(8, *k.shape).unbind()
    p, pulled, q, f, grow_a, grow_b, z_a, z_b, change_a, change_b = k.new_empty(
        10, *k.shape
    ).unbind()
    batch, r, _ = k.shape
    unconverged, norm = k.new_empty(batch, dtype=torch.bool), k.new_empty(2, batch)
    how = launch(r)
    _fixed_core_kernel[(batch,)](
        r_a, r_b, inverse_a, inverse_b, k, xx, yy, scale, p, pulled, q, f, unconverged, r, share,
        ITERATIONS=iterations, **how,
    )  # fmt: skip
    _fixed_roots_kernel[(batch, 2)](xx, yy, q, f, scale, grow_a, grow_b, z_a, z_b, r, **how)
    _fixed_share_kernel[(batch,)](
        r_a, r_b, inverse_a, inverse_b, k, scale, p, pulled, grow_a, z_b, change_a, change_b, r,
        **how,
    )  # fmt: skip
    _fixed_moves_kernel[(batch, 2)](
        r_a, r_b, inverse_a, inverse_b, xx, yy, inner_a, inner_b, scale,
        q, f, z_a, z_b, change_a, change_b, *made, norm, r, **how,
    )  # fmt: skip
    return list(made[:4]), list(made[4:]), unconverged, norm


@triton.jit
def _isometry_core_kernel(
    k_ptr, xx_ptr, yy_ptr, scale_ptr, p_ptr, f_ptr, unconverged_ptr, r, share,
    R: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Best rank: P and F."""
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    core = eye + g * tl.load(k_ptr + place, mask=inside, other=0.0)
    unconverged_ptr += member
    pulled, f, _ = best_rank(
        core, xx_ptr, yy_ptr, g * g, eye, place, inside, eye, unconverged_ptr, share,
        ITERATIONS, P,
    )  # fmt: skip
    tl.store(p_ptr + place, core + pulled, mask=inside)
    tl.store(f_ptr + place, f, mask=inside)


@triton.jit
def _isometry_moves_kernel(
    xx_ptr, yy_ptr, own_u_ptr, own_v_ptr, inner_a_ptr, inner_b_ptr, scale_ptr, p_ptr, f_ptr,
    u_ptr, v_ptr, x_ptr, y_ptr, to_a_ptr, to_b_ptr, norm_ptr, r,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Polar factors of the right side, and then of the left one in its terms."""
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    f = tl.load(f_ptr + place, mask=inside, other=eye)
    inner_b = g * tl.load(inner_b_ptr + place, mask=inside, other=0.0)
    own = tl.load(own_v_ptr + place, mask=inside, other=eye)
    missing = inner_b - dot(own, inner_b, P)
    gram = g * g * tl.load(yy_ptr + place, mask=inside, other=0.0)
    gram = dot(gram - dot(tl.trans(inner_b), inner_b + missing, P), f, P)
    cross = dot(missing, f, P)
    gram = own + dot(tl.trans(f), gram, P) + cross + tl.trans(cross)
    _, turn = root_changes(gram, eye, P)
    v = eye + turn
    norm = tl.sqrt(total(tl.where(inside, v * dot(gram, v, P), 0.0)))
    y = dot(f, v, P)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(y_ptr + place, g * y, mask=inside)
    tl.store(to_b_ptr + place, turn - dot(inner_b, y, P), mask=inside)

    inner_a = g * tl.load(inner_a_ptr + place, mask=inside, other=0.0)
    own = tl.load(own_u_ptr + place, mask=inside, other=eye)
    missing = inner_a - dot(own, inner_a, P)
    gram = g * g * tl.load(xx_ptr + place, mask=inside, other=0.0)
    gram -= dot(tl.trans(inner_a), inner_a + missing, P)
    p = tl.load(p_ptr + place, mask=inside, other=eye)
    cross = dot(tl.trans(p), missing, P)
    gram += dot(tl.trans(p), dot(own, p, P), P) + cross + tl.trans(cross)
    gram = dot(tl.trans(v), dot(gram, v, P), P)
    _, scaling = roots(gram, eye, P)
    norm += tl.sqrt(total(tl.where(inside, scaling * dot(gram, scaling, P), 0.0)))
    x = dot(v, scaling, P)
    u = dot(p, x, P)
    tl.store(u_ptr + place, u, mask=inside)
    tl.store(x_ptr + place, g * x, mask=inside)
    tl.store(to_a_ptr + place, u - eye - dot(inner_a, x, P), mask=inside)
    tl.store(norm_ptr + member, norm)


def isometry_embedded(
    k: Tensor,
    grams: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor],
    scale: Tensor,
    iterations: int,
    share: float,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The same for an isometry: u, v, x, y; what to multiply U and V by besides x and y; and so on.

    Steps must be short enough for one pass of orthonormalization.
    """
    k, xx, yy, scale = (x.contiguous() for x in (k, *grams, scale))
    rest = [x.contiguous() for x in (*own, *inner)]
    made, (p, f) = k.new_empty(6, *k.shape).unbind(), k.new_empty(2, *k.shape).unbind()
    batch, r, _ = k.shape
    unconverged, norm = k.new_empty(batch, dtype=torch.bool), k.new_empty(batch)
    how = launch(r)
    _isometry_core_kernel[(batch,)](
        k, xx, yy, scale, p, f, unconverged, r, share, ITERATIONS=iterations, **how
    )
    _isometry_moves_kernel[(batch,)](xx, yy, *rest, scale, p, f, *made, norm, r, **how)
    return list(made[:4]), list(made[4:]), unconverged, norm
