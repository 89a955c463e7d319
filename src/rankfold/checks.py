"""What is checked of grids and gradients, and the looks at values on a first step."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from . import tall
from .diagnostics import overlaps
from .factors import Grid, describe
from .geometries import Pair, scale
from .precision import exact_arithmetic
from .stacks import Plan, itself

# Largest spectral norm of UᵀU − I that counts as orthonormal; one step repairs what is below it.
_ORTHONORMAL = 1e-3
_ORTHONORMAL_ROUNDED = 2e-2
# A right pair of gradients disagrees by rounding alone; a wrong axis makes them unrelated.
_INCONSISTENT = 0.3
_ROUNDING = 0.03


def check_grid(name: str, grid: Grid, taken: set[int]) -> None:
    """Raise if a grid cannot be optimized.

    ``taken`` holds the ids of parameters that belong to other groups.
    """
    for side, k, factor in grid.factors():
        for param in factor.params:
            where = f"grid {name!r}: {side}[{k}], {describe(param)},"
            if not param.requires_grad:
                raise ValueError(
                    f"{where} is frozen; a product can only be optimized with both its factors "
                    "trainable (requires_grad=True)"
                )
            if hasattr(param, "placements"):  # a DTensor, whose class takes long to import
                raise ValueError(
                    f"{where} is sharded (DTensor), and a step needs whole factors; shard other "
                    "parameters alone, or replicate with DistributedDataParallel"
                )
            if not param.is_leaf:
                raise ValueError(f"{where} is not a leaf; pass the parameter itself")
            if id(param) in taken:
                raise ValueError(
                    f"{where} is in another parameter group; grids that share a parameter must "
                    "share a group (Grid.rate is a learning rate of a grid's own within it)"
                )


def has_gradients(name: str, grid: Grid, held: Collection[int]) -> bool:
    """Whether the grid takes part in this step; raise if only some of its gradients are there.

    Also if its parameters are not what they were: ``held`` are the ids of those of its group.
    """
    params = grid.params()
    if not all(id(p) in held for p in params):
        raise RuntimeError(
            f"grid {name!r}: its parameter group holds other parameters than the grid. Something "
            "has replaced them after the optimizer was built, as FSDP2 does where it shards a "
            "model; products need whole factors: leave their modules unsharded, or replicate the "
            "model with DistributedDataParallel"
        )
    for side, k, factor in grid.factors():
        if factor.param.shape != factor.shape:
            raise RuntimeError(
                f"grid {name!r}: {side}[{k}] was a parameter of shape {tuple(factor.shape)} when "
                f"the grid was made, and is now {describe(factor.param)}. Wrappers that flatten "
                "or shard parameters, as FSDP does, leave no whole factors"
            )
    missing = sum(p.grad is None for p in params)
    if missing == len(params):
        return False
    for side, k, factor in grid.factors():
        for param in factor.params:
            if param.grad is not None and param.grad.layout == torch.strided:
                continue
            what = "bias of " if param is factor.bias else ""
            where = f"{what}{side}[{k}], {describe(param)}"
            if param.grad is not None:
                raise RuntimeError(f"grid {name!r}: sparse gradient of {where} is not supported")
            why = (
                "did every factor take part in the loss?"
                if param.requires_grad
                else "it was frozen after the optimizer was built; freeze the other factors of the "
                "product too, or build the optimizer again"
            )
            raise RuntimeError(
                f"grid {name!r} has some of its gradients but none for {where}: {why}"
            )
    return True


def require_finite(members: Sequence[str], grad: Pair) -> None:
    """Raise if a member's gradients have a NaN or an infinity; synchronises."""
    left, right = (x.isfinite().flatten(1).all(1) for x in grad)
    bad = [m for m, ok in zip(members, (left & right).tolist(), strict=True) if not ok]
    if bad:
        raise RuntimeError(
            f"the gradients of {', '.join(bad)} are not finite (on_nonfinite='raise'); nothing was "
            "changed"
        )


def orthonormality_defect(blocks: Tensor) -> Tensor:
    """Spectral norm of UᵀU − I, for each of ``(..., m, r)``; zero rows of padding do not count."""
    wide = blocks.double()
    gram = wide.mT @ wide
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    defect: Tensor = torch.linalg.matrix_norm(gram, ord=2)
    return defect


def orthonormal_tolerance(rounded: bool) -> float:
    """The largest defect that counts as orthonormal, for factors rounded to 16 bits or not."""
    return _ORTHONORMAL_ROUNDED if rounded else _ORTHONORMAL


def check_orthonormal(
    members: Sequence[str], point: Pair, rounded: bool, scaled: bool = False
) -> None:
    """Raise if factors of ``(batch, blocks, m, r)`` are not orthonormal; synchronises.

    ``scaled`` ones may be so but for one number a side.
    """
    tolerance = orthonormal_tolerance(rounded)
    for side, blocks, size in zip(("left", "right"), point, scale.sizes(point), strict=True):
        if scaled:
            blocks = blocks / tall.per_member(size, blocks)
        worst = orthonormality_defect(blocks).amax(1).tolist()
        for member, defect in zip(members, worst, strict=True):
            if not defect <= tolerance:
                raise ValueError(
                    f"grid member {member!r}: its {side} factors are not orthonormal"
                    f"{' but for one common scale' if scaled else ''}, "
                    f"‖UᵀU − I‖₂ = {defect:.3g} where an isometry geometry needs at most "
                    f"{tolerance:g}; start from orthonormal factors, for instance with "
                    "rankfold.orthonormalize_(grids)"
                )


def require_orthonormal(plan: Plan, scaled: bool) -> None:
    """`check_orthonormal` of all stacks of a plan."""
    with torch.no_grad(), exact_arithmetic(plan.device_types):
        weights = plan.gather(itself)
        for stack in plan.stacks:
            check_orthonormal(stack.members, stack.read(weights), stack.rounded, scaled)


def check_full_rank(members: Sequence[str], point: Pair) -> None:
    """Raise if a factor has lost rank, so that no fixed-rank step exists; synchronises."""
    for side, blocks in zip(("left", "right"), point, strict=True):
        values = torch.linalg.svdvals(blocks.double().nan_to_num(0, 0, 0))
        rounding = max(blocks.shape[-2:]) * torch.finfo(blocks.dtype).eps
        broken = values.amin(-1) <= rounding * values.amax(-1)
        for member, flags in zip(members, broken.tolist(), strict=True):
            if any(flags):
                raise ValueError(
                    f"grid member {member!r}: {side} factor {flags.index(True)} does not have "
                    f"full column rank {blocks.shape[-1]}, and fixed-rank geometries cannot step "
                    "from there; initialise it with linearly independent columns, a fresh LoRA "
                    "adapter with rankfold.full_rank_start_(model), or give damping=1e-3, with "
                    "which factors that start at zero, as some output projections do, may stay so"
                )


def warn_if_inconsistent(
    members: Sequence[str], point: Pair, grad: Pair, isometry: bool
) -> list[bool]:
    """Warn of members whose factor gradients cannot come from a loss of the product; synchronises.

    For such a loss, Σ A_iᵀG_Ai equals (Σ B_jᵀG_Bj)ᵀ, or at least their skew parts do, which is
    all that isometry geometries need. Returns whose gradients tell anything.
    """
    difference, size, unrelated = overlaps(point, grad, isometry)
    far_off = (difference > _INCONSISTENT * size) & (difference > _ROUNDING * unrelated)
    found = [m for m, flag in zip(members, far_off.tolist(), strict=True) if flag]
    if found:
        share = (difference / size.clamp_min(torch.finfo(size.dtype).tiny))[far_off].amax().item()
        warnings.warn(
            f"the factor gradients of {_listed(found)} are inconsistent (AᵀG_A and G_BᵀB differ by "
            f"up to {share:.0%} of their size), so the loss does not depend on the product alone. "
            "A wrong axis=, start=, blocks= or order of heads looks like this, and a bias= that "
            "was left out; so do rotary embeddings or normalization between the factors.",
            stacklevel=_outside(),
        )
    told: list[bool] = (unrelated.isfinite() & (unrelated > 0)).tolist()
    _warn_if_coarse(members, point, grad, told, isometry)
    return told


def _warn_if_coarse(
    members: Sequence[str], point: Pair, grad: Pair, told: Sequence[bool], isometry: bool
) -> None:
    """Warn of members that are several: where each part of the factors agrees by itself.

    Then the loss has products of some left factors with some right ones, and not of all with all.
    """
    left, right = point.left.shape[1], point.right.shape[1]
    for parts in (k for k in range(math.gcd(left, right), 1, -1) if left % k == right % k == 0):
        point_apart, grad_apart = (
            Pair(*(x.reshape(-1, x.shape[1] // parts, *x.shape[2:]) for x in pair))
            for pair in (point, grad)
        )
        difference, size, unrelated = overlaps(point_apart, grad_apart, isometry)
        agree = (difference < _ROUNDING * size) & (size > _ROUNDING * unrelated)
        flags = agree.view(-1, parts).all(1).tolist()
        found = [m for m, *is_true in zip(members, flags, told, strict=True) if all(is_true)]
        if found:
            warnings.warn(
                f"the factor gradients of {_listed(found)} are those of {parts} products apart, "
                "not of one in which every left factor meets every right one: it looks as if "
                f"groups= were {parts} times what was given, as for heads that go by themselves.",
                stacklevel=_outside(),
            )
            return


def _listed(members: Sequence[str]) -> str:
    return ", ".join(members[:4]) + (f" and {len(members) - 4} more" if len(members) > 4 else "")


def _outside() -> int:
    """The stack level, for a caller's warning, of the code that called into rankfold and torch."""
    level, frame = 1, sys._getframe(1)
    inside = ("rankfold", "torch")
    # Code run by exec may have no __name__.
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level
