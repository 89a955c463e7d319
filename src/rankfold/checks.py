"""What is checked before a parameter is touched, and the one look at values on the first step."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import tall
from .diagnostics import overlaps
from .factors import Grid, describe
from .geometries import GEOMETRIES, Pair, geometry_for, is_isometry, scale
from .groups import Owner
from .precision import exact_arithmetic
from .schatten import WHITENED, by_products, exponent
from .stacks import Plan, itself
from .whitening import TILTS

NUMBERS = (
    *("lr", "momentum", "second_moment", "growth", "tilt", "row_balance"),
    *("weight_decay", "decay_to", "norm_floor", "damping", "rank_floor"),
)
NUMBERS_OR_NONE = ("scale_lr", "trust_region")
NORMALIZATIONS = ("metric", "spectral", None)
REPAIRS = ("none", "average", "exact")
MOMENTUM_FORMS = ("smoothing", "unit-smoothing", "heavy-ball")
ON_NONFINITE = ("skip", "raise")

# Largest spectral norm of UᵀU − I that counts as orthonormal; one step repairs what is below it.
_ORTHONORMAL = 1e-3
_ORTHONORMAL_ROUNDED = 2e-2
# A right pair of gradients disagrees by rounding alone; a wrong axis makes them unrelated.
_INCONSISTENT = 0.3
_ROUNDING = 0.03
# Names this much alike: "momentun" is meant, "max_momentum" is a scheduler's.
_TYPING_ERROR = 0.85


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if an option is out of range or not known."""
    check_choices(options)
    for option in ("lr", "scale_lr"):
        rate = options[option]
        if rate is not None and not (math.isfinite(float(rate)) and float(rate) >= 0):
            raise ValueError(f"{option} must be finite and not negative, got {rate}")


def check_names(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise for a name in a group that is almost that of an option, and would not be heard.

    Others are not ours to judge: schedulers keep numbers of their own in groups.
    """
    options = list(options)
    for name in group:
        near = get_close_matches(name, options, n=1, cutoff=_TYPING_ERROR)
        if name not in options and near:
            raise ValueError(f"a parameter group has no option {name!r}; did you mean {near[0]!r}?")


def check_choices(options: Mapping[str, Any]) -> None:
    """The same but for the values of learning rates, which may lie on a device."""
    for option in (*NUMBERS, *NUMBERS_OR_NONE):
        value = options[option]
        if not isinstance(value, Real | Tensor) and (option in NUMBERS or value is not None):
            raise TypeError(f"{option} must be a number, got {value!r}")
    lr, momentum, floor = options["lr"], options["momentum"], options["norm_floor"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor lr must have one element, got shape {tuple(lr.shape)}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not (math.isfinite(floor) and floor > 0):
        raise ValueError(f"norm_floor must be finite and positive, got {floor}")
    if options["capturable"]:
        if not isinstance(lr, Tensor):
            raise ValueError(
                "capturable=True needs lr as a 0-dim tensor on the parameters' device, "
                "torch.tensor(lr, device=...): a graph would keep a float for ever"
            )
        if options["on_nonfinite"] == "raise":
            raise ValueError("capturable=True cannot look at values, as on_nonfinite='raise' does")
    damping, trust = options["damping"], options["trust_region"]
    if not (math.isfinite(damping) and damping >= 0):
        raise ValueError(f"damping must be finite and not negative, got {damping}")
    if trust is not None and not 0 < trust <= 1:
        raise ValueError(f"trust_region must be None or in (0, 1], got {trust}")
    rank_floor = options["rank_floor"]
    if not 0 <= rank_floor < 1:
        raise ValueError(f"rank_floor must be in [0, 1), got {rank_floor}")
    if rank_floor and options["geometry"] != "fixed-embedded":
        raise ValueError(
            "rank_floor is an option of fixed-embedded alone; fixed-quotient has damping"
        )
    for option, known in (("gradient_repair", REPAIRS), ("on_nonfinite", ON_NONFINITE)):
        if options[option] not in known:
            raise ValueError(f"{option} must be one of {known}, got {options[option]!r}")
    if options["geometry"] not in GEOMETRIES:
        raise ValueError(
            f"unknown geometry {options['geometry']!r}; there are {', '.join(GEOMETRIES)}"
        )
    if damping and is_isometry(options["geometry"]):
        raise ValueError(
            f"damping is for products that start at zero, and {options['geometry']} has none: "
            "its factors are orthonormal"
        )
    _check_normalization(options)
    _check_momentum(options)
    _check_scale(options)
    _check_growth(options)
    _check_manner(options)


def _check_growth(options: Mapping[str, Any]) -> None:
    growth = options["growth"]
    if not (math.isfinite(growth) and growth >= 0):
        raise ValueError(f"growth must be finite and not negative, got {growth}")
    if growth and is_isometry(options["geometry"]):
        raise ValueError(
            f"{options['geometry']} has no growth: singular values of an isometry are all 1"
        )
    if growth and options["damping"]:
        raise ValueError(
            "damping is for products that start at zero, and with a growth these stay there"
        )


def _check_manner(options: Mapping[str, Any]) -> None:
    tilt, balance = options["tilt"], options["row_balance"]
    if tilt not in TILTS:
        known = ", ".join(f"{each:g}" for each in TILTS)
        raise ValueError(f"tilt must be one of {known}, got {tilt}")
    if not 0 <= balance <= 1:
        raise ValueError(f"row_balance must be in [0, 1], got {balance}")
    for option, value in (("tilt", tilt), ("row_balance", balance)):
        if value and options["normalize"] != WHITENED:
            raise ValueError(f"{option} is of whitened steps: it needs normalize='{WHITENED}'")
        if value and is_isometry(options["geometry"]):
            raise ValueError(f"{options['geometry']} has no {option}: use a fixed-rank geometry")


def _check_scale(options: Mapping[str, Any]) -> None:
    rate = options["scale_lr"]
    if rate is None:
        return
    if not is_isometry(options["geometry"]):
        raise ValueError(
            f"scale_lr is for isometries: products of {options['geometry']} have sizes of their own"
        )
    if isinstance(rate, Tensor) and rate.dim() > 0:
        raise ValueError(f"a tensor scale_lr must be 0-dim, got shape {tuple(rate.shape)}")
    if options["capturable"] and not isinstance(rate, Tensor):
        raise ValueError("capturable=True needs scale_lr as a 0-dim tensor, like lr")


def _check_momentum(options: Mapping[str, Any]) -> None:
    form, beta = options["momentum_form"], options["second_moment"]
    if form not in MOMENTUM_FORMS:
        raise ValueError(f"momentum_form must be one of {MOMENTUM_FORMS}, got {form!r}")
    if not options["momentum"]:
        for option, needs in (
            ("nesterov=True", options["nesterov"]),
            ("bias_correction=True", options["bias_correction"]),
            (f"momentum_form={form!r}", form != "smoothing"),
        ):
            if needs:
                raise ValueError(f"{option} needs a momentum above 0")
    if options["bias_correction"] and form == "heavy-ball":
        raise ValueError(
            "bias_correction is for momentum_form='smoothing': a heavy ball is the last step, "
            "and no mean of gradients"
        )
    if beta and form == "unit-smoothing":
        raise ValueError(
            "second_moment divides by the running size of gradients, which "
            "momentum_form='unit-smoothing' has taken out already: choose one of the two"
        )
    if not 0 <= beta < 1:
        raise ValueError(f"second_moment must be in [0, 1), got {beta}")
    if beta and options["normalize"] not in ("metric", "spectral"):
        raise ValueError(
            "second_moment is a running mean of squared norms: choose which with "
            f"normalize='metric' or 'spectral', not {options['normalize']!r}"
        )


def check_rate(options: Mapping[str, Any], owner: Owner) -> None:
    """Raise if grids of this rate cannot have these options.

    Not once and for all: learning rates change.
    """
    if owner.uneven and options["normalize"] != WHITENED:
        raise ValueError(
            f"Grid.sides other than (1, 1) need normalize='whitened', where each factor goes by "
            f"itself; got normalize={options['normalize']!r}"
        )
    _check_decay(options, owner.share)


def _check_decay(options: Mapping[str, Any], rate: float) -> None:
    decay, target, lr = options["weight_decay"], options["decay_to"], options["lr"]
    for option, value in (("weight_decay", decay), ("decay_to", target)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{option} must be finite and not negative, got {value}")
    if decay and is_isometry(options["geometry"]):
        raise ValueError(
            f"{options['geometry']} has no weight_decay: singular values of an isometry are all 1; "
            "scale_lr learns a scale for them"
        )
    if target and not decay:
        raise ValueError("decay_to is where weight_decay leads, and needs one above 0")
    if not isinstance(lr, Tensor) and rate * lr * decay >= 1:
        raise ValueError(
            f"lr times weight_decay must be below 1, the share of a weight that a step may take, "
            f"got {rate * lr} · {decay}"
        )


def _check_normalization(options: Mapping[str, Any]) -> None:
    normalize = options["normalize"]
    if normalize in NORMALIZATIONS:
        return
    p = exponent(normalize) if isinstance(normalize, str) else None
    if p is None:
        raise ValueError(
            "normalize must be 'metric', 'spectral', 'schatten-p' with a number p from 1 to inf, "
            f"'whitened' or None, got {normalize!r}"
        )
    if options["capturable"] and not by_products(p):
        raise ValueError(
            f"normalize={normalize!r} takes eigenvalues, which no graph can record: with "
            "capturable=True p is 1, 2 or inf"
        )


def check_grid(name: str, grid: Grid, options: Mapping[str, Any], taken: set[int]) -> None:
    """Raise if a grid cannot be optimized with these options.

    ``taken`` holds the ids of parameters that belong to other groups.
    """
    geometry = geometry_for(options["geometry"], grid.lefts, grid.rights)
    retraction = options["retraction"]
    if retraction is not None and retraction not in geometry.retractions:
        raise ValueError(
            f"grid {name!r}: {options['geometry']} has no retraction {retraction!r} for "
            f"{grid.lefts}×{grid.rights} members; it has {', '.join(geometry.retractions)}"
        )
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


def has_gradients(name: str, grid: Grid) -> bool:
    """Whether the grid takes part in this step; raise if only some of its gradients are there."""
    params = grid.params()
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
                    "adapter with rankfold.full_rank_start_(model), or give damping=1e-3"
                )


def warn_if_inconsistent(members: Sequence[str], point: Pair, grad: Pair, isometry: bool) -> None:
    """Warn of members whose factor gradients cannot come from a loss of the product; synchronises.

    For such a loss, Σ A_iᵀG_Ai equals (Σ B_jᵀG_Bj)ᵀ, or at least their skew parts do, which is
    all that isometry geometries need.
    """
    difference, size, unrelated = overlaps(point, grad, isometry)
    far_off = (difference > _INCONSISTENT * size) & (difference > _ROUNDING * unrelated)
    found = [m for m, flag in zip(members, far_off.tolist(), strict=True) if flag]
    if found:
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        share = (difference / size.clamp_min(torch.finfo(size.dtype).tiny))[far_off].amax().item()
        warnings.warn(
            f"the factor gradients of {shown} are inconsistent (AᵀG_A and G_BᵀB differ by up to "
            f"{share:.0%} of their size), so the loss does not depend on the product alone. A "
            "wrong axis=, start= or blocks= looks like this; so do rotary embeddings or "
            "normalization between the factors.",
            stacklevel=_outside(),
        )


def _outside() -> int:
    """The stack level, for a caller's warning, of the code that called into rankfold and torch."""
    level, frame = 1, sys._getframe(1)
    inside = ("rankfold", "torch")
    # Code run by exec may have no __name__.
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level
