"""What a run is told: four groups of options, their presets, and the key that names a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, get_type_hints

from ..defaults import OUTPUT_RATE, RECOMMENDED, RECOMMENDED_NAME, VALUE_OUTPUT_RATE
from ..geometries import GEOMETRIES, geometry_for
from ..schatten import exponent
from ..whitening import TILTS
from .corpus import DataConfig
from .model import MODEL_PRESETS, ModelConfig

ADAMW_MOMENTUM = 0.9  # its first beta, where no other is asked for
OPTIMIZERS = ("adamw", "muon", "whitened", "dion", "frozen", *GEOMETRIES, RECOMMENDED_NAME)
# What stands behind `RECOMMENDED_NAME`, besides its geometry and rate.
CHOSEN: dict[str, Any] = {
    **{name: each for name, each in RECOMMENDED.items() if name not in ("geometry", "lr")},
    "tilted_products": "vo",
    "vo_rate": VALUE_OUTPUT_RATE,
    "output_rate": OUTPUT_RATE,
}
ANNEALINGS = ("none", "linear", "cosine")
NORMALIZATIONS = ("metric", "spectral", "none")  # and whitened, schatten-p
TILTED_PRODUCTS = ("all", "vo")
_NOT_BELOW_ZERO = {
    "optimizer": ("lr", "other_lr", "weight_decay", "product_decay", "growth"),
    "training": ("warmup", "clip", "diagnostics_every", "seed"),
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "momentum": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "row_balance": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "dion_rank": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "vo_rate": (lambda x: x > 0, "above 0"),
    "output_rate": (lambda x: x > 0, "above 0"),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """Who updates the query, key, value and output weights, and AdamW on all others.

    ``name`` is "adamw", "muon" (on each head's factors), "whitened" (Muon on pairs of them, see
    `lab/muon.py`), "dion" (`lab/dion.py`), "frozen" (they stay as they began), a geometry, or
    "recommended", whose options are those of `rankfold.recommended`.
    ``momentum`` is that of Muon and Dion, too, and AdamW's first beta, where 0 stands for torch's
    own 0.9. ``weight_decay`` is that of AdamW, Muon and Dion, and ``product_decay`` one of query,
    key, value and output weights alone, of their products: half of it for each factor by itself.
    ``dion_rank`` is the share of a head's rank that Dion's updates have. ``lr`` is that of
    query·key products; value·output ones go by ``vo_rate`` times it, and of these the output
    weights by ``output_rate`` times that, which with a geometry wants "whitened" steps. For
    geometries: ``momentum_form``, ``nesterov``, ``bias_correction``, ``second_moment``, ``growth``,
    ``normalize`` ("metric", "spectral", "none", "whitened" or "schatten-p"), for whitened steps
    (and for "muon" and "whitened") ``tilt`` and ``row_balance``, which with ``tilted_products``
    "vo" are of value·output products alone, ``retraction``, empty for the geometry's own,
    ``decay_to``, where their decay leads, and ``scale_lr``, if not 0, the rate of a learned scale
    of isometries at the full ``lr``.
    ``masters`` keeps float32 copies of bfloat16 weights; without, every step is rounded.
    """

    name: str = "adamw"
    lr: float = 2.0**-12
    other_lr: float = 2.0**-10
    momentum: float = 0.0
    momentum_form: str = "smoothing"
    nesterov: bool = False
    bias_correction: bool = False
    second_moment: float = 0.0
    growth: float = 0.0
    tilt: float = 0.0
    row_balance: float = 0.0
    tilted_products: str = "all"
    normalize: str = "metric"
    norm_floor: float = 2.0**-23
    retraction: str = ""
    weight_decay: float = 0.01
    product_decay: float = 0.0
    decay_to: float = 0.0
    scale_lr: float = 0.0
    masters: bool = True
    dion_rank: float = 1.0
    vo_rate: float = 1.0
    output_rate: float = 1.0


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how: ``clip`` bounds the gradient's norm, 0 does not.

    Learning rates rise linearly over ``warmup`` steps and, with an annealing, fall to zero at the
    end. Validation takes the next ``validation_batches`` of a fixed cycle. ``graph`` records a step
    into CUDA graphs, which take the host out of it. ``keep_weights`` leaves the trained weights in
    the run's folder.
    """

    steps: int = 1000
    warmup: int = 10
    annealing: str = "none"
    accumulate: int = 1
    clip: float = 0.0
    validate_every: int = 10
    validation_batches: int = 1
    diagnostics_every: int = 0
    checkpoint_every: int = 500
    seed: int = 0
    compile: bool = False
    graph: bool = False
    deterministic: bool = False
    keep_weights: bool = False


# Options that change how a run is carried out and not what comes out of it.
WITHOUT_INFLUENCE = {("training", "checkpoint_every"), ("training", "keep_weights")}


@dataclass(frozen=True)
class RunConfig:
    """All options of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        _check(self)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, group by group."""
        return dataclasses.asdict(self)

    @cached_property
    def key(self) -> str:
        """A name that is the same for the same run, and readable in front.

        Made from what differs from the defaults, so that a version with further options still
        finds the runs of an earlier one.
        """
        plain = {
            f"{group}.{name}": value
            for group, options in self.as_dict().items()
            for name, value in options.items()
            if (group, name) not in WITHOUT_INFLUENCE and value != DEFAULTS[group][name]
        }
        if self.optimizer.name == RECOMMENDED_NAME:  # which a later version may choose otherwise
            plain["chosen"] = {"geometry": RECOMMENDED["geometry"], **CHOSEN}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:10]
        kind = "mha" if self.model.kv_heads == self.model.heads else "gqa"
        return f"{kind}-{self.optimizer.name}-s{self.training.seed}-{digest}"

    def with_options(self, options: Mapping[str, Any]) -> RunConfig:
        """A copy with some options replaced, by dotted names: ``{"optimizer.lr": "2^-8"}``."""
        groups: dict[str, dict[str, Any]] = {}
        for dotted, value in options.items():
            group, _, name = dotted.partition(".")
            kinds = _options_of(group, dotted)
            if name not in kinds:
                raise ValueError(
                    f"there is no option {dotted!r}; {group} has {', '.join(sorted(kinds))}"
                )
            groups.setdefault(group, {})[name] = _converted(dotted, value, kinds[name])
        changed = {g: dataclasses.replace(getattr(self, g), **new) for g, new in groups.items()}
        return dataclasses.replace(self, **changed)


def from_dict(groups: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The configuration that `RunConfig.as_dict` was made from."""
    flat = {
        f"{g}.{name}": value for g, options in groups.items() for name, value in options.items()
    }
    return RunConfig().with_options(flat)


@cache  # a contest asks for thousands of configurations
def _options_of(group: str, dotted: str) -> dict[str, Any]:
    kinds: dict[str, type] = {
        "model": ModelConfig,
        "data": DataConfig,
        "optimizer": OptimizerConfig,
        "training": TrainingConfig,
    }
    if group not in kinds:
        raise ValueError(f"there is no option {dotted!r}; groups are {', '.join(kinds)}")
    return get_type_hints(kinds[group])


def _converted(dotted: str, value: Any, kind: Any) -> Any:
    """A value as its option's type; text is read, "2^-12" too."""
    if kind not in (bool, int, float, str) and value in (None, ""):
        return None
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ValueError(f"{dotted} is true or false, not {value!r}")
    if kind in (int, float):
        try:
            number = _number(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{dotted} is a number, not {value!r}")
        if kind is int and number != int(number):
            raise ValueError(f"{dotted} is a whole number, not {value!r}")
        return kind(number)
    return str(value)


def _number(value: Any) -> float:
    power = re.fullmatch(r"2\^(-?\d+)", value) if isinstance(value, str) else None
    return 2.0 ** int(power[1]) if power else float(value)


def _check(config: RunConfig) -> None:
    training = config.training
    _one_of("training.annealing", training.annealing, ANNEALINGS)
    for name in ("steps", "accumulate", "validate_every", "validation_batches", "checkpoint_every"):
        if getattr(training, name) < 1:
            raise ValueError(f"training.{name} must be at least 1")
    for group, names in _NOT_BELOW_ZERO.items():
        for name in names:
            if getattr(getattr(config, group), name) < 0:
                raise ValueError(f"{group}.{name} must be at least 0")
    if training.graph and training.diagnostics_every:
        raise ValueError(
            "a CUDA graph measures nothing on the way: set training.diagnostics_every to 0 or "
            "training.graph to false"
        )
    _check_values(config.optimizer)
    _check_owned(config.optimizer)
    _check_rates(config.optimizer)
    _check_retraction(config.optimizer, config.model)


def _check_values(optimizer: OptimizerConfig) -> None:
    """Each option by itself."""
    _one_of("optimizer.name", optimizer.name, OPTIMIZERS)
    if exponent(optimizer.normalize) is None:
        known = (*NORMALIZATIONS, "whitened", "schatten-p")
        _one_of("optimizer.normalize", optimizer.normalize, known)
    _one_of("optimizer.tilted_products", optimizer.tilted_products, TILTED_PRODUCTS)
    _one_of("optimizer.tilt", optimizer.tilt, TILTS)
    for name, (fits, range_) in _RANGES.items():
        value = getattr(optimizer, name)
        if not fits(value):
            raise ValueError(f"optimizer.{name} must be {range_}, not {value}")


def _check_owned(optimizer: OptimizerConfig) -> None:
    """What would do nothing, and yet be a run of its own, is refused."""
    owned = OPTIONS_OF[optimizer.name] | {"lr"}  # presets give one to all
    for name, default in _DEFAULT_OPTIMIZER.items():
        if getattr(optimizer, name) == default or name in owned:
            continue
        if optimizer.name == RECOMMENDED_NAME and name in CHOSEN:
            raise ValueError(
                f"optimizer.{name} is chosen by {RECOMMENDED_NAME}: to choose it yourself, set "
                "optimizer.name to a geometry"
            )
        raise ValueError(f"optimizer.{name}: {optimizer.name} has none, leave it at {default}")
    if optimizer.tilted_products != "all" and not (optimizer.tilt or optimizer.row_balance):
        raise ValueError(
            f"optimizer.tilted_products {optimizer.tilted_products} changes nothing without "
            "optimizer.tilt or optimizer.row_balance: set one of them, or leave it at all"
        )


def _check_rates(optimizer: OptimizerConfig) -> None:
    """Learning rates beside each other."""
    if optimizer.scale_lr and not optimizer.lr:
        raise ValueError(
            "optimizer.scale_lr follows the schedule of optimizer.lr, and needs one above 0"
        )
    if optimizer.output_rate == 1:
        return
    if optimizer.name in GEOMETRIES and optimizer.normalize != "whitened":
        raise ValueError(
            "optimizer.output_rate needs optimizer.normalize whitened, where each factor goes "
            f"by itself, not {optimizer.normalize}"
        )
    if optimizer.name in ("muon", "whitened", "dion") and optimizer.weight_decay:
        raise ValueError(
            "optimizer.output_rate needs optimizer.weight_decay 0: with "
            f"{optimizer.name} both factors decay at one rate"
        )


def _check_retraction(optimizer: OptimizerConfig, model: ModelConfig) -> None:
    if not optimizer.retraction:
        return
    told = RECOMMENDED["geometry"] if optimizer.name == RECOMMENDED_NAME else optimizer.name
    known = geometry_for(told, model.heads // model.kv_heads, 1).retractions
    _one_of("optimizer.retraction", optimizer.retraction, known)


def in_effect(option: str, value: Any, optimizer: str) -> Any:
    """What an option comes to, by its dotted name: some optimizers have values of their own."""
    group, _, name = option.partition(".")
    if group == "optimizer" and optimizer == RECOMMENDED_NAME:
        return CHOSEN.get(name, value)
    if (optimizer, option) == ("adamw", "optimizer.momentum"):
        return value or ADAMW_MOMENTUM
    return value


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")


_DEFAULT_OPTIMIZER = dataclasses.asdict(OptimizerConfig())
# Those of all optimizers, most of them for the AdamW of all other weights.
_COMMON = {"name", "other_lr", "weight_decay", "masters"}
_RATES = {"lr", "momentum", "vo_rate", "output_rate"}
_OF_GEOMETRIES = _DEFAULT_OPTIMIZER.keys() - {"dion_rank"}
_OF_RIVALS = _COMMON | _RATES | {"product_decay"}
_OF_MUON = _OF_RIVALS | {"tilt", "row_balance", "norm_floor"}
OPTIONS_OF: dict[str, Set[str]] = {
    "adamw": _OF_RIVALS,
    "muon": _OF_MUON,
    "whitened": _OF_MUON,
    "dion": _OF_RIVALS | {"dion_rank"},
    "frozen": _COMMON,
    **dict.fromkeys(GEOMETRIES, _OF_GEOMETRIES),
    RECOMMENDED_NAME: _OF_GEOMETRIES - CHOSEN.keys(),
}

DEFAULTS = RunConfig().as_dict()


def _paper(model: str) -> RunConfig:
    return RunConfig(
        MODEL_PRESETS[model],
        DataConfig(source="fineweb", tokenizer="gpt2"),
        OptimizerConfig(masters=False),
        TrainingConfig(),
    )


def _tiny(model: str) -> RunConfig:
    return RunConfig(
        MODEL_PRESETS[model],
        DataConfig(context=128, batch=16, validation_share=0.1),
        OptimizerConfig(lr=2.0**-8, other_lr=2.0**-8),
        TrainingConfig(steps=400, validation_batches=4, checkpoint_every=100),
    )


# "paper" is the paper to the letter: bfloat16 weights without masters, no final norm.
PRESETS: dict[str, RunConfig] = {
    "tiny": _tiny("tiny"),
    "tiny-gqa": _tiny("tiny-gqa"),
    "paper": _paper("paper-mha"),
    "paper-mha": _paper("paper-mha"),
    "paper-gqa": _paper("paper-gqa"),
}

_SMALL: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2.0**-11},
    "muon": {"lr": 2.0**-7, "momentum": 0.8},
    RECOMMENDED_NAME: {"lr": 2.0**-8},
    **{geometry: {"lr": 2.0**-4} for geometry in GEOMETRIES},
}
_PAPER: dict[str, dict[str, Any]] = {
    "muon": {"lr": 2.0**-9, "vo_rate": 4.0, "momentum": 0.8},
    RECOMMENDED_NAME: {"lr": 2.0**-7},
    **{geometry: {"lr": 2.0**-8} for geometry in GEOMETRIES},
}
# At what optimizers are compared where nothing else is said. For the small models that is the best
# rate of a coarse sweep (benchmarks/results/small-models/rates.csv), one for all geometries; else
# the paper's or, for those it does not have, the contest's.
COMPARED_AT: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": _SMALL,
    "tiny-gqa": {
        **_SMALL,
        "adamw": {"lr": 2.0**-12},
        RECOMMENDED_NAME: {"lr": 2.0**-7},
        **{geometry: {"lr": 2.0**-2} for geometry in GEOMETRIES},
    },
    "paper": _PAPER,
    "paper-mha": _PAPER,
    "paper-gqa": {**_PAPER, **{geometry: {"lr": 2.0**-3} for geometry in GEOMETRIES}},
}


def preset(name: str) -> RunConfig:
    """A preset by its name."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
