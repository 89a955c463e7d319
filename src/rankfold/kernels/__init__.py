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

from ..eager import constant_when_compiled

if TYPE_CHECKING:
    from . import carrying as carrying
    from . import elimination as elimination
    from . import frames as frames
    from . import members as members
    from . import moves as moves
    from . import moving as moving
    from . import quotient as quotient
    from . import refine as refine
    from . import retraction as retraction
    from . import roots as roots
    from . import scalars as scalars
    from . import stiefel as stiefel
    from . import tall as tall
    from . import whiten as whiten

_LARGEST_RANK = 128
_SMALL_RANK = 64
_SHARED_MEMORY = 227 * 1024  # bytes a program may take on the GPUs these kernels are shaped for

enabled = os.environ.get("RANKFOLD_KERNELS", "1") != "0"


def serve(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors (..., m, r): float32, on a GPU, of no great rank."""
    fit = all(
        x.is_cuda and x.dtype == torch.float32 and x.shape[-1] <= _LARGEST_RANK for x in tensors
    )
    return fit and available(tensors[0].device)


def serve_numbers(*numbers: Tensor) -> bool:
    """Whether kernels can take these numbers, a few a member, however many members there are."""
    return serve(*(x[..., None] for x in numbers))


@constant_when_compiled
def available(device: torch.device) -> bool:
    """Whether kernels run on a device: switched on, with Triton, on a GPU with room for them."""
    return enabled and device.type == "cuda" and _importable() and _has_room(device)


def serve_small(*tensors: Tensor) -> bool:
    """Whether r is small, too: one program then holds many r×r matrices at once."""
    return serve(*tensors) and tensors[0].shape[-1] <= _SMALL_RANK


@cache
def _has_room(device: torch.device) -> bool:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= _SHARED_MEMORY


@cache
def _importable() -> bool:
    try:
        from . import (  # noqa: F401
            carrying,
            elimination,
            frames,
            members,
            moves,
            moving,
            quotient,
            refine,
            retraction,
            roots,
            scalars,
            stiefel,
            tall,
            whiten,
        )
    except ImportError:
        return False
    return True
