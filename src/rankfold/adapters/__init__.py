"""Known model families -> grids, and adapters that start at full rank."""

from __future__ import annotations

from .attention import attention_grids
from .families import register_attention
from .full_rank import FullRankStart, full_rank_start_
from .lora import lora_grids
from .rules import AttentionRule, Joined, PerHead

__all__ = [
    "AttentionRule",
    "FullRankStart",
    "Joined",
    "PerHead",
    "attention_grids",
    "full_rank_start_",
    "lora_grids",
    "register_attention",
]
