"""rankfold: optimize rank-factored parameters W = A Bᵀ by their product."""

from __future__ import annotations

from . import diagnostics
from .adapters import attention_grids
from .build import build_optimizer
from .combined import CombinedOptimizer
from .defaults import recommended
from .factors import Factor, Grid
from .optimizer import RiemannianSGD
from .orthonormal import orthonormalize_

__version__ = "0.1.0"

__all__ = [
    "CombinedOptimizer",
    "Factor",
    "Grid",
    "RiemannianSGD",
    "__version__",
    "attention_grids",
    "build_optimizer",
    "diagnostics",
    "orthonormalize_",
    "recommended",
]
