"""Fused GPU kernels, each behind a function whose plain PyTorch form is its reference.

They are written in Triton and imported on first use; where Triton is missing, or the environment
says ``RANKFOLD_KERNELS=0``, every function takes its plain form.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import moving as moving
    from . import refine as refine
    from . import retraction as retraction
    from . import small as small
    from . import stiefel as stiefel
    from . import tall as tall

_LARGEST_RANK = 128
_SMALL_RANK = 64

enabled = os.environ.get("RANKFOLD_KERNELS", "1") != "0"


def serve(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors (..., m, r): float32, on a GPU, of no great rank."""
    fit = all(
        x.is_cuda and x.dtype == torch.float32 and x.shape[-1] <= _LARGEST_RANK for x in tensors
    )
    return fit and enabled and _importable()


def serve_whole(matrices: Tensor) -> bool:
    """Whether one program can also hold all r×r matrices of a retraction at once."""
    return serve(matrices) and matrices.shape[-1] <= _SMALL_RANK


def serve_sums(*factors: Tensor) -> bool:
    """Whether kernels sum over rows faster than the library's products: above this they do not."""
    return serve(*factors) and factors[0].shape[-1] <= _SMALL_RANK


@cache
def _importable() -> bool:
    try:
        from . import moving, refine, retraction, small, stiefel, tall  # noqa: F401
    except ImportError:
        return False
    return True
