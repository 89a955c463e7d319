"""Known model families -> grids."""

from __future__ import annotations

from .attention import attention_grids
from .families import register_attention
from .lora import lora_grids
from .rules import AttentionRule, Joined, PerHead

__all__ = [
    "AttentionRule",
    "Joined",
    "PerHead",
    "attention_grids",
    "lora_grids",
    "register_attention",
]
