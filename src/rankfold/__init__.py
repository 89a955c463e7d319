"""rankfold: optimize rank-factored parameters W = A Bᵀ by their product."""

from __future__ import annotations

from . import diagnostics
from .adapters import (
    AttentionRule,
    Joined,
    PerHead,
    attention_grids,
    full_rank_start_,
    lora_grids,
    register_attention,
)
from .build import build_optimizer
from .combined import CombinedOptimizer
from .defaults import recommended
from .factors import Factor, Grid
from .inspection import Inspection, inspect
from .optimizer import RiemannianSGD
from .orthonormal import orthonormalize_

__version__ = "0.1.0"

__all__ = [
    "AttentionRule",
    "CombinedOptimizer",
    "Factor",
    "Grid",
    "Inspection",
    "Joined",
    "PerHead",
    "RiemannianSGD",
    "__version__",
    "attention_grids",
    "build_optimizer",
    "diagnostics",
    "full_rank_start_",
    "inspect",
    "lora_grids",
    "orthonormalize_",
    "recommended",
    "register_attention",
]
