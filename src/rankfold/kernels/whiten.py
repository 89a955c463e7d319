"""Triton kernel for inverse roots of r×r float32 matrices, r up to 64, singular ones included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import dot
from .refine import launch, tile


@triton.jit
def _stretch(low):
    """What is best before a step σ(3 − σ²)/2 where all σ are in [low, 1]."""
    return tl.sqrt(3.0 / (1.0 + low + low * low))


@triton.jit
def _inverse_root_kernel(
    gram_ptr, scale_ptr, out_ptr, r, smallest, low, steps, R: tl.constexpr, PRECISION: tl.constexpr
):
    place, inside, eye = tile(r, R)
    scale = tl.load(scale_ptr + tl.program_id(0))
    ridge = smallest * smallest
    # What pads a matrix is 1 after this, and stays.
    gram = tl.load(gram_ptr + place, mask=inside, other=eye * scale) / scale
    root = (gram + ridge * eye) / (1.0 + ridge)
    stretch = _stretch(low)
    half = 1.5 * stretch * eye - 0.5 * stretch * stretch * stretch * root
    inverse = half
    for _ in range(1, steps):
        root = dot(root, half, PRECISION)
        low = stretch * low * (3.0 - stretch * low * stretch * low) * 0.5
        stretch = _stretch(low)
        cubed = 0.5 * stretch * stretch * stretch
        half = 1.5 * stretch * eye - cubed * dot(inverse, root, PRECISION)
        inverse = dot(half, inverse, PRECISION)
    inverse = (inverse + tl.trans(inverse)) * (0.5 / tl.sqrt(scale))
    tl.store(out_ptr + place, inverse, mask=inside)


def inverse_root(gram: Tensor, scale: Tensor, smallest: float, low: float, steps: int) -> Tensor:
    """``(gram + smallest² scale)^(-1/2)`` of symmetric (..., r, r) with eigenvalues in [0, scale].

    As `schatten.inverse_root`; ``scale`` is (...), ``steps`` how many its stretches from ``low`` on
    are.
    """
    gram, scale = gram.contiguous(), scale.contiguous()
    out = torch.empty_like(gram)
    members, r = gram.shape[:-2].numel(), gram.shape[-1]
    if members:
        _inverse_root_kernel[(members,)](gram, scale, out, r, smallest, low, steps, **launch(r))
    return out
