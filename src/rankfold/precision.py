"""The arithmetic a step runs in: float32 or float64, never TensorFloat-32, never autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch


class _Matmul(Protocol):
    fp32_precision: str


# The two backends whose float32 matrix products may be lowered to TF32 or bf16. Their values are
# read as they take effect: "none" means that nothing has asked for less than float32.
_MATMULS: tuple[_Matmul, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_FULL = ("ieee", "none")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a parameter is computed in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _full_precision(matmul: _Matmul) -> Iterator[None]:
    before = matmul.fp32_precision
    if before in _FULL:
        yield
        return
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        # A value may be the backend's own or inherited from a wider setting. Clear it first, and
        # set it only if clearing did not bring the old one back: what was inherited stays so.
        matmul.fp32_precision = "none"
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before


@contextmanager
def exact_arithmetic(device_types: Iterable[str]) -> Iterator[None]:
    """Run the block in plain float32/float64, and leave the user's global settings as they were.

    Covers the TF32 switches (old and new interface alike) and any autocast context the caller is
    in, for each of ``device_types``. Settings are restored when the block raises, too.
    """
    with ExitStack() as settings:
        for matmul in _MATMULS:
            settings.enter_context(_full_precision(matmul))
        for device_type in sorted(set(device_types)):
            if torch.amp.is_autocast_available(device_type):
                settings.enter_context(torch.autocast(device_type, enabled=False))
        yield
