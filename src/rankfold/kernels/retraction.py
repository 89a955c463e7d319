"""Triton kernels for the whole r×r part of the truncated-SVD retractions, float32, r up to 64.

One program a member. What each line computes is said in the plain forms, `retract` in
`geometries/fixed_embedded.py` and `geometries/isometry_embedded.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .refine import best_rank, dot, invert, launch, roots, tile, total


@triton.jit
def _norm(u, x, xx, P: tl.constexpr):
    """‖U u + X x‖ for orthonormal U and XᵀX = xx."""
    return tl.sqrt(total(u * u) + tl.maximum(total(x * dot(xx, x, P)), 0.0))


@triton.jit
def _fixed_kernel(
    r_a_ptr, r_b_ptr, inverse_a_ptr, inverse_b_ptr, k_ptr, xx_ptr, yy_ptr, inner_a_ptr, inner_b_ptr,
    scale_ptr, u_ptr, v_ptr, x_ptr, y_ptr, to_a_ptr, to_ta_ptr, to_b_ptr, to_tb_ptr,
    moved_ptr, norm_ptr, r,
    R: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    r_a = tl.load(r_a_ptr + place, mask=inside, other=eye)
    r_b = tl.load(r_b_ptr + place, mask=inside, other=eye)
    inverse_a = tl.load(inverse_a_ptr + place, mask=inside, other=eye)
    inverse_b = tl.load(inverse_b_ptr + place, mask=inside, other=eye)
    step = g * tl.load(k_ptr + place, mask=inside, other=0.0)
    xx = g * g * tl.load(xx_ptr + place, mask=inside, other=0.0)
    yy = g * g * tl.load(yy_ptr + place, mask=inside, other=0.0)

    core = dot(r_a, tl.trans(r_b), P) + step
    guess = dot(tl.trans(inverse_b), inverse_a, P)
    p, f, q = best_rank(core, xx, yy, guess, eye, moved_ptr + member * ITERATIONS, ITERATIONS, P)

    grow_a, z_a = roots(eye + dot(tl.trans(q), dot(xx, q, P), P), eye, P)
    _, z_b = roots(eye + dot(tl.trans(f), dot(yy, f, P), P), eye, P)
    grown = dot(grow_a - eye, p, P)
    change = step + dot(yy, f, P) + grown + dot(p + grown, z_b - eye, P)
    delta = dot(inverse_a, dot(change, tl.trans(inverse_b), P), P)
    long = (total(delta * delta) <= 0.25) == 0
    share = 0.25 * (delta + dot(delta, invert(eye + 0.5 * delta, eye, eye, P), P))
    share = tl.where(long, 0.0, share)
    rest = dot(delta - share, invert(eye + share, eye, eye, P), P)
    wide_a = r_a + dot(r_a, rest, P)
    wide_b = r_b + dot(r_b, tl.trans(share), P)
    ratio = total(tl.where(inside, wide_b * wide_b, 0.0)) * total(tl.where(inside, r_a * r_a, 0.0))
    ratio /= total(tl.where(inside, wide_a * wide_a, 0.0)) * total(tl.where(inside, r_b * r_b, 0.0))
    # Square roots of squared norms, and then of their ratio: after a long step alone.
    ratio = tl.where(long, tl.sqrt(tl.sqrt(ratio)), 1.0)
    left = dot(r_a, rest, P) + (ratio - 1.0) * wide_a
    right = dot(r_b, tl.trans(share), P) + (1.0 / ratio - 1.0) * wide_b
    wide_a *= ratio
    wide_b /= ratio

    u = dot(z_a, wide_a, P)
    x = dot(q, u, P)
    tl.store(u_ptr + place, u, mask=inside)
    tl.store(x_ptr + place, g * x, mask=inside)
    v = dot(z_b, wide_b, P)
    y = dot(f, v, P)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(y_ptr + place, g * y, mask=inside)
    u = tl.where(inside, u, 0.0)
    v = tl.where(inside, v, 0.0)
    tl.store(norm_ptr + member, _norm(u, x, xx, P) + _norm(v, y, yy, P))

    left += dot(z_a - eye, wide_a, P)
    left -= g * dot(tl.load(inner_a_ptr + place, mask=inside, other=0.0), x, P)
    tl.store(to_a_ptr + place, dot(inverse_a, left, P), mask=inside)
    tl.store(to_ta_ptr + place, g * dot(inverse_b, x, P), mask=inside)
    right += dot(z_b - eye, wide_b, P)
    right -= g * dot(tl.load(inner_b_ptr + place, mask=inside, other=0.0), y, P)
    tl.store(to_b_ptr + place, dot(inverse_b, right, P), mask=inside)
    tl.store(to_tb_ptr + place, g * dot(inverse_a, y, P), mask=inside)


def fixed_embedded(
    triangles: tuple[Tensor, Tensor],
    inverses: tuple[Tensor, Tensor],
    k: Tensor,
    grams: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor],
    scale: Tensor,
    iterations: int,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """New coefficients and coefficients of the moves, from matrices (batch, r, r), left first.

    Returns u, v, x, y of `NewCoefficients`; what to multiply A, T_A, B, T_B by; how far each
    iteration moved (batch, iterations); and the norms of both new factors added up (batch,).
    """
    given = [x.contiguous() for x in (*triangles, *inverses, k, *grams, *inner, scale)]
    made = [torch.empty_like(given[4]) for _ in range(8)]
    batch, r, _ = k.shape
    moved, norm = k.new_empty(batch, iterations), k.new_empty(batch)
    how = {**launch(r), "num_warps": 8}
    _fixed_kernel[(batch,)](*given, *made, moved, norm, r, ITERATIONS=iterations, **how)
    return made[:4], made[4:], moved, norm


@triton.jit
def _isometry_kernel(
    k_ptr, xx_ptr, yy_ptr, own_u_ptr, own_v_ptr, inner_a_ptr, inner_b_ptr, scale_ptr,
    u_ptr, v_ptr, x_ptr, y_ptr, to_a_ptr, to_b_ptr, moved_ptr, norm_ptr, r,
    R: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = PRECISION
    place, inside, eye = tile(r, R)
    member = tl.program_id(0)
    g = tl.load(scale_ptr + member)
    core = eye + g * tl.load(k_ptr + place, mask=inside, other=0.0)
    xx = g * g * tl.load(xx_ptr + place, mask=inside, other=0.0)
    yy = g * g * tl.load(yy_ptr + place, mask=inside, other=0.0)
    p, f, _ = best_rank(core, xx, yy, eye, eye, moved_ptr + member * ITERATIONS, ITERATIONS, P)

    inner_b = g * tl.load(inner_b_ptr + place, mask=inside, other=0.0)
    gram = dot(yy - dot(tl.trans(inner_b), inner_b, P), f, P)
    gram = tl.load(own_v_ptr + place, mask=inside, other=eye) + dot(tl.trans(f), gram, P)
    _, v = roots(gram, eye, P)
    norm = tl.sqrt(total(tl.where(inside, v * dot(gram, v, P), 0.0)))
    y = dot(f, v, P)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(y_ptr + place, g * y, mask=inside)
    tl.store(to_b_ptr + place, v - eye - dot(inner_b, y, P), mask=inside)

    inner_a = g * tl.load(inner_a_ptr + place, mask=inside, other=0.0)
    gram = xx - dot(tl.trans(inner_a), inner_a, P)
    own = tl.load(own_u_ptr + place, mask=inside, other=eye)
    gram += dot(tl.trans(p), dot(own, p, P), P)
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
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The same for an isometry: u, v, x, y; what to multiply U and V by besides x and y; and so on.

    Steps must be short enough for one pass of orthonormalization.
    """
    given = [x.contiguous() for x in (k, *grams, *own, *inner, scale)]
    made = [torch.empty_like(given[0]) for _ in range(6)]
    batch, r, _ = k.shape
    moved, norm = k.new_empty(batch, iterations), k.new_empty(batch)
    how = {**launch(r), "num_warps": 8}
    _isometry_kernel[(batch,)](*given, *made, moved, norm, r, ITERATIONS=iterations, **how)
    return made[:4], made[4:], moved, norm
