"""Triton kernel for inverse roots of r×r float32 matrices, r up to 128, by products alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .members import Found, flattened, is_near, known, padded_rank, room_for

_WARPS = {32: 4, 64: 8, 128: 8}  # measured on an H200, at r = 64 and 128


@triton.jit
def _product(a, b, r, R: tl.constexpr):
    """Product of two members in memory, padded with zeros."""
    rows = tl.arange(0, R)[:, None]
    cols = tl.arange(0, R)[None, :]
    result = tl.zeros((R, R), tl.float32)
    for k in range(0, r, 16):
        left = k + tl.arange(0, 16)[None, :]
        top = k + tl.arange(0, 16)[:, None]
        x = tl.load(a + rows * r + left, mask=(rows < r) & (left < r), other=0.0)
        y = tl.load(b + top * r + cols, mask=(top < r) & (cols < r), other=0.0)
        result = tl.dot(x, y, result, input_precision="ieee")
    return result


@triton.jit
def _inverse_sqrt_kernel(
    gram, out, root, half, error, limit, scale, stride, row_stride, col_stride, r, steps,
    GIVEN_SCALE: tl.constexpr, R: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    if FOUND:  # noqa: SIM102  (the one is known when a kernel is compiled, the other is not)
        if is_near(error, member, r, limit, R):
            return
    rows = tl.arange(0, R)[:, None]
    cols = tl.arange(0, R)[None, :]
    inside = (rows < r) & (cols < r)
    out += member * r * r
    root += member * r * r
    half += member * r * r
    here = rows * r + cols
    three = tl.where(rows == cols, 3.0, 0.0)
    tile = tl.load(
        gram + member * stride + rows * row_stride + cols * col_stride, mask=inside, other=0.0
    )
    scale = single(scale)
    if not GIVEN_SCALE:
        bound = tl.max(tl.sum(tl.abs(tile), 1))
        scale = 2.0 / (1.0 + tl.where(bound < 1.0, 1.0, bound))
    tile *= scale
    tl.store(root + here, tile, mask=inside)
    tl.store(half + here, (three - tile) * 0.5, mask=inside)
    tile = (three - tile) * 0.5
    # What one thread stores others load: hence a barrier after every step.
    for _ in range(1, steps):
        tl.debug_barrier()
        rooted = _product(root, half, r, R)
        tl.debug_barrier()
        tl.store(root + here, rooted, mask=inside)
        tl.store(out + here, tile, mask=inside)
        tl.debug_barrier()
        tile = (three - _product(out, root, r, R)) * 0.5
        tl.store(half + here, tile, mask=inside)
        tl.debug_barrier()
        tile = _product(half, out, r, R)
    tile *= tl.sqrt(scale)
    tl.debug_barrier()
    tl.store(out + here, tile, mask=inside)


def inverse_sqrt(
    gram: Tensor, steps: int, scale: float | None = None, found: Found | None = None
) -> Tensor:
    """``gram^(-1/2)`` of symmetric (..., r, r) by coupled Newton–Schulz, ``steps`` at least one.

    For eigenvalues that are in (0, 3) when multiplied by ``scale``. Without one, for any positive
    ones, as `polar.scaled_inverse_sqrt`. Inverse roots that are ``found`` stay.
    """
    flat, out = flattened(gram), room_for(gram) if found is None else found.results[0].contiguous()
    size = padded_rank(gram.shape[-1])
    if len(flat):
        _inverse_sqrt_kernel[(len(flat),)](
            flat, out, room_for(gram), room_for(gram), *known(found, flat),
            1.0 if scale is None else scale, *flat.stride(), gram.shape[-1], steps,
            GIVEN_SCALE=scale is not None, R=size, FOUND=found is not None,
            num_warps=_WARPS[size],
        )  # fmt: skip
    return out
