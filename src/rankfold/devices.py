"""Devices as commands are told them."""

from __future__ import annotations

import torch


def device_named(name: str | None) -> torch.device:
    """The CPU or a CUDA device; None is CUDA if there is one. ValueError says what is wrong."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is no device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} is neither cpu nor cuda")
    return device
