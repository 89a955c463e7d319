"""Known model families -> grids, and adapters that start at full rank."""

from __future__ import annotations

from .attention import attention_grids
from .full_rank import FullRankStart, full_rank_start_

__all__ = ["FullRankStart", "attention_grids", "full_rank_start_"]
