"""What options may be, alone and together; no look at a tensor's values but for learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any

from torch import Tensor

from .factors import Grid
from .geometries import geometry_for, is_isometry
from .groups import Owner
from .schatten import WHITENED, by_products, exponent
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
    geometry_for(options["geometry"], 1, 1)  # raises for an unknown one
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


def check_retraction(name: str, grid: Grid, options: Mapping[str, Any]) -> None:
    """Raise if the geometry has no such retraction for grids of this shape."""
    geometry = geometry_for(options["geometry"], grid.lefts, grid.rights)
    retraction = options["retraction"]
    if retraction is not None and retraction not in geometry.retractions:
        raise ValueError(
            f"grid {name!r}: {options['geometry']} has no retraction {retraction!r} for "
            f"{grid.lefts}×{grid.rights} members; it has {', '.join(geometry.retractions)}"
        )
