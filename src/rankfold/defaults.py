"""`recommended`: the optimizer to begin with, from one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from .adapters import attention_grids
from .factors import Grid
from .optimizer import RiemannianSGD

# Provisional: from first looks, until the contest (docs/lab.md) is run. Of fixed rank, since
# isometries would need factors that start orthonormal.
RECOMMENDED: Mapping[str, Any] = MappingProxyType(
    {
        "geometry": "fixed-embedded",
        "normalize": "schatten-inf",
        "momentum": 0.9,
        "nesterov": True,
        "lr": 2.0**-7,
    }
)


def recommended(
    model_or_grids: nn.Module | Grid | Iterable[Grid] | Iterable[dict[str, Any]],
    lr: float | Tensor | None = None,
    **overrides: Any,
) -> RiemannianSGD:
    """The optimizer to begin with.

    Args:
        model_or_grids: a model, of which it takes `attention_grids`, or what `RiemannianSGD` takes.
        lr: learning rate, the largest singular value of a step of the product. The default,
            2⁻⁷, is for factors with singular values of about one.
        overrides: options of `RiemannianSGD`, in place of those recommended.

    The choice is fixed-embedded geometry, normalize "schatten-inf", momentum 0.9 and nesterov. It
    is provisional: from first looks, not yet from the contest. Parameters outside of the products
    need an optimizer of their own, such as AdamW.
    """
    grids = (
        attention_grids(model_or_grids) if isinstance(model_or_grids, nn.Module) else model_or_grids
    )
    options = {**RECOMMENDED, **overrides}
    if lr is not None:
        options["lr"] = lr
    return RiemannianSGD(grids, **options)
