"""rankfold: optimize rank-factored parameters W = A Bᵀ by their product."""

from __future__ import annotations

from . import diagnostics
from .adapters import attention_grids, full_rank_start_
from .defaults import recommended
from .factors import Factor, Grid
from .optimizer import RiemannianSGD
from .orthonormal import orthonormalize_

__version__ = "0.1.0"

__all__ = [
    "Factor",
    "Grid",
    "RiemannianSGD",
    "__version__",
    "attention_grids",
    "diagnostics",
    "full_rank_start_",
    "orthonormalize_",
    "recommended",
]
