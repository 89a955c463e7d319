"""What a step runs in: float32 or float64, never TensorFloat-32 or autocast; and on what device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol, cast

import torch


class _Setting(Protocol):
    fp32_precision: str


# The two backends whose float32 matrix products may be lowered to TF32 or bf16. Their values are
# read as they take effect: "none" means that nothing has asked for less than float32.
_MATMULS: tuple[_Setting, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_WIDEST: _Setting = cast(_Setting, torch.backends)
_FULL = ("ieee", "none")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a parameter is computed in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _full_precision(matmul: _Setting) -> Iterator[None]:
    before = matmul.fp32_precision
    if before in _FULL:
        yield
        return
    # The value read may be the backend's own or inherited from torch's widest setting, and must be
    # put back as what it was. It is its own if it stays when the wide setting is moved.
    wide = _WIDEST.fp32_precision
    _WIDEST.fp32_precision = "ieee"
    own = matmul.fp32_precision == before
    _WIDEST.fp32_precision = wide
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before if own else "none"


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


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: that is where kernels are launched, whatever they are given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
