"""Known model families -> grids."""

from __future__ import annotations

from .attention import attention_grids

__all__ = ["attention_grids"]
