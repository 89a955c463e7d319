"""What a run is told: options as text, keys, presets."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.defaults import RECOMMENDED_NAME
from rankfold.geometries import GEOMETRIES
from rankfold.lab import config
from rankfold.lab.config import OPTIMIZERS, PRESETS, RunConfig, from_dict, preset
from rankfold.lab.model import Decoder
from rankfold.lab.optimizers import Riemannian, build


def test_options_are_read_from_text_and_keys_follow_them() -> None:
    start = preset("tiny")
    changed = start.with_options(
        {"optimizer.lr": "2^-8", "model.rope": "true", "training.steps": "20", "data.ranks": None}
    )
    assert changed.optimizer.lr == 2**-8
    assert changed.model.rope is True
    assert changed.training.steps == 20
    assert changed.key != start.key
    for name, value in (("checkpoint_every", 3), ("keep_weights", True)):
        assert start.with_options({f"training.{name}": value}).key == start.key
    for name in PRESETS:
        assert from_dict(json.loads(json.dumps(preset(name).as_dict()))) == preset(name)


def test_runs_of_versions_with_fewer_options_keep_their_keys() -> None:
    changed = preset("paper").with_options({"optimizer.lr": 0.5})
    older = changed.as_dict()
    del older["optimizer"]["nesterov"], older["training"]["graph"]
    assert from_dict(older).key == changed.key
    assert changed.key != preset("paper").key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer.rate": 1}, "there is no option 'optimizer.rate'"),
        ({"optimizer.vo_rate": 0}, "vo_rate must be above 0"),
        ({"optimizer.output_rate": 0}, "output_rate must be above 0"),
        (
            {"optimizer.output_rate": 2, "optimizer.name": "fixed-quotient"},
            "output_rate needs optimizer.normalize whitened.*not metric",
        ),
        (
            {
                "optimizer.output_rate": 2,
                "optimizer.name": "muon",
                "optimizer.weight_decay": 0.1,
            },
            "output_rate needs optimizer.weight_decay 0: with muon",
        ),
        ({"optimiser.lr": 1}, "groups are model, data, optimizer, training"),
        ({"optimizer.lr": "fast"}, "optimizer.lr is a number"),
        ({"optimizer.lr": "nan"}, "optimizer.lr is a number"),
        ({"optimizer.lr": "2^99999"}, "optimizer.lr is a number"),
        ({"optimizer.lr": -1}, "optimizer.lr must be at least 0"),
        ({"optimizer.growth": -1}, "optimizer.growth must be at least 0"),
        ({"optimizer.tilt": 0.25}, "optimizer.tilt: adamw has none, leave it at 0.0"),
        ({"optimizer.tilted_products": "qk"}, "tilted_products is one of all, vo, not 'qk'"),
        *(
            (
                {"optimizer.name": name, "optimizer.tilted_products": "vo"},
                f"tilted_products: {name} has none, leave it at all",
            )
            for name in OPTIMIZERS
            if name not in (*GEOMETRIES, RECOMMENDED_NAME)
        ),
        *(
            (
                {"optimizer.name": name, f"optimizer.{option}": value},
                f"optimizer.{option}: {name} has none, leave it at",
            )
            for name, option, value in (
                ("adamw", "growth", 0.5),
                ("adamw", "normalize", "spectral"),
                ("adamw", "nesterov", True),
                ("adamw", "retraction", "polar"),
                ("muon", "momentum_form", "heavy-ball"),
                ("muon", "decay_to", 0.5),
                ("muon", "dion_rank", 0.5),
                ("dion", "tilt", 0.5),
                ("frozen", "momentum", 0.5),
                ("fixed-quotient", "dion_rank", 0.5),
                ("recommended", "dion_rank", 0.5),
            )
        ),
        *(
            ({"optimizer.name": name, **options}, words)
            for name in ("muon", "whitened", "fixed-quotient")
            for options, words in (
                ({"optimizer.tilt": 0.3}, "tilt is one of 0.0, 0.125, 0.25, 0.5, 1.0, not 0.3"),
                ({"optimizer.tilt": 2}, "tilt is one of .* not 2.0"),
                ({"optimizer.row_balance": -1}, r"row_balance must be in \[0, 1\], not -1"),
                ({"optimizer.row_balance": 1.5}, r"row_balance must be in \[0, 1\], not 1.5"),
            )
        ),
        (
            {"optimizer.name": "isometry-quotient", "optimizer.retraction": "svd"},
            "retraction is one of polar, qr, not 'svd'",
        ),
        (
            {"optimizer.name": "recommended", "optimizer.retraction": "qr"},
            "retraction is one of additive, not 'qr'",
        ),
        (
            {
                "optimizer.name": "isometry-quotient",
                "optimizer.lr": 0,
                "optimizer.scale_lr": 0.5,
            },
            "scale_lr follows the schedule of optimizer.lr, and needs one above 0",
        ),
        (
            {"optimizer.name": "fixed-quotient", "optimizer.tilted_products": "vo"},
            "changes nothing without optimizer.tilt or optimizer.row_balance: set one of them",
        ),
        ({"training.steps": "inf"}, "training.steps is a number"),
        ({"training.steps": ""}, "training.steps is a number"),
        ({"training.steps": [1]}, "training.steps is a number"),
        ({"training.warmup": -3}, "training.warmup must be at least 0"),
        ({"training.seed": -1}, "training.seed must be at least 0"),
        ({"training.steps": 1.5}, "whole number"),
        ({"training.steps": 0}, "at least 1"),
        ({"model.rope": "maybe"}, "true or false"),
        ({"optimizer.name": "sgd"}, "one of adamw, muon, whitened, dion, frozen, fixed-embedded"),
        ({"optimizer.momentum": 1}, r"in \[0, 1\)"),
        ({"optimizer.dion_rank": 0}, r"in \(0, 1\]"),
        (
            {"optimizer.name": "recommended", "optimizer.tilt": 0.5},
            "tilt is chosen by recommended.*set optimizer.name to a geometry",
        ),
        ({"optimizer.normalize": "l2"}, "one of metric, spectral, none, whitened"),
        ({"optimizer.normalize": "schatten-0"}, "a number from 1 to inf"),
        ({"training.annealing": "exp"}, "one of none, linear, cosine"),
        ({"training.graph": True, "training.diagnostics_every": 5}, "measures nothing on the way"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig().with_options(options)


@pytest.mark.parametrize(
    ("geometry", "kv_heads", "retraction"),
    [("isometry-embedded", 8, "svd"), ("isometry-embedded", 1, "qr"), ("fixed-embedded", 1, "svd")],
)
def test_retractions_are_those_of_the_models_grids(
    geometry: str, kv_heads: int, retraction: str
) -> None:
    told = {"optimizer.name": geometry, "model.kv_heads": kv_heads}
    config = RunConfig().with_options({**told, "optimizer.retraction": retraction})
    stepper, _ = build(Decoder(config.model, 50), config.optimizer)
    assert isinstance(stepper, Riemannian)  # which takes it
    if geometry == "isometry-embedded":
        other = {**told, "model.kv_heads": 9 - kv_heads, "optimizer.retraction": retraction}
        with pytest.raises(ValueError, match="retraction is one of"):
            RunConfig().with_options(other)


@pytest.mark.parametrize("name", ["tilt", "row_balance"])
def test_either_can_be_of_some_products_alone(name: str) -> None:
    told = {"optimizer.name": "fixed-quotient", "optimizer.normalize": "whitened"}
    tilted = RunConfig().with_options({**told, f"optimizer.{name}": 0.5})
    assert tilted.with_options({"optimizer.tilted_products": "all"}).key == tilted.key
    assert tilted.with_options({"optimizer.tilted_products": "vo"}).key != tilted.key


def test_what_is_recommended_is_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a version which recommends something else does not take over older runs."""
    told = RunConfig().with_options({"optimizer.name": "recommended"})
    before = told.key
    monkeypatch.setitem(config.CHOSEN, "tilt", 0.5)
    assert from_dict(told.as_dict()).key != before


@pytest.mark.parametrize(
    ("optimizer", "option", "value", "shown"),
    [
        ("recommended", "optimizer.momentum", 0.0, 0.8),
        ("recommended", "optimizer.lr", 0.1, 0.1),
        ("recommended", "training.seed", 3, 3),
        ("adamw", "optimizer.momentum", 0.0, 0.9),
        ("adamw", "optimizer.momentum", 0.5, 0.5),
        ("muon", "optimizer.momentum", 0.0, 0.0),
    ],
)
def test_reports_show_what_options_come_to(
    optimizer: str, option: str, value: float, shown: float
) -> None:
    assert config.in_effect(option, value, optimizer) == shown


@pytest.mark.parametrize("name", ["tiny", "tiny-gqa"])
def test_small_models_are_compared_at_the_best_rates_of_the_sweep(name: str) -> None:
    """All geometries at one, the best of those at which all have been tried."""
    path = Path(__file__).parents[1] / "benchmarks/results/small-models/rates.csv"
    losses: dict[str, dict[float, list[float]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["preset"] == name:
                kind = "geometry" if row["optimizer"] in GEOMETRIES else row["optimizer"]
                of_kind = losses.setdefault(kind, {})
                of_kind.setdefault(float(row["lr"]), []).append(float(row["loss"]))
    most = {kind: max(map(len, of_kind.values())) for kind, of_kind in losses.items()}
    assert most == {"adamw": 1, "muon": 1, "recommended": 1, "geometry": len(GEOMETRIES)}
    for optimizer, told in config.COMPARED_AT[name].items():
        kind = "geometry" if optimizer in GEOMETRIES else optimizer
        tried = {lr: sum(x) for lr, x in losses[kind].items() if len(x) == most[kind]}
        best = min(tried, key=lambda lr: tried[lr])
        assert told["lr"] == best
        assert min(losses[kind]) < best < max(losses[kind])  # at neither end of the line


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_compared_can_be_run(name: str) -> None:
    for optimizer, told in config.COMPARED_AT[name].items():
        options = {f"optimizer.{option}": value for option, value in told.items()}
        chosen = preset(name).with_options({"optimizer.name": optimizer, **options})
        assert chosen.optimizer.lr == told["lr"]


def test_unknown_presets_are_named() -> None:
    with pytest.raises(ValueError, match="there are tiny"):
        preset("huge")


def test_paper_preset_is_the_paper() -> None:
    paper = preset("paper")
    assert (paper.model.weights, paper.model.final_norm) == ("bfloat16", False)
    assert not paper.optimizer.masters
    assert (paper.data.context, paper.data.batch, paper.data.tokenizer) == (512, 8, "gpt2")
    assert (paper.training.warmup, paper.training.validate_every) == (10, 10)
    assert paper.optimizer.norm_floor == 2**-23
