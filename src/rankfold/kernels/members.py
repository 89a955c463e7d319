"""What kernels with one program for each r×r matrix of a stack, a member of it, have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import single
from .sizes import padded


class Found(NamedTuple):
    """Results (..., r, r) good for members whose ``error`` (..., r, r) has squares below ``limit``.

    The others are still to be made.
    """

    results: tuple[Tensor, ...]
    error: Tensor
    limit: float


@triton.jit
def is_near(error, member, r, limit, R: tl.constexpr):
    """Whether the squares of a member's error add up to less than ``limit``."""
    rows = tl.arange(0, R)[:, None]
    cols = tl.arange(0, R)[None, :]
    inside = (rows < r) & (cols < r)
    tile = tl.load(error + member * r * r + rows * r + cols, mask=inside, other=0.0)
    return tl.sum(tl.sum(tile * tile, 1), 0) < single(limit)


def known(found: Found | None, flat: Tensor) -> tuple[Tensor, float]:
    """Error and limit as a kernel takes them; it asks for neither if nothing was found."""
    return (flat, 0.0) if found is None else (found.error.contiguous(), found.limit)


def flattened(x: Tensor) -> Tensor:
    """(members, r, r): a view, unless the leading dimensions cannot be one."""
    return x.reshape(-1, *x.shape[-2:])


def room_for(x: Tensor) -> Tensor:
    """An empty tensor for results in the shape of ``x``, contiguous whatever that is."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def padded_rank(r: int) -> int:
    """The size of a member's tile."""
    if not 1 <= r <= 128:
        raise ValueError(f"r must be from 1 to 128, got {r}")
    return padded(r, least=32)
