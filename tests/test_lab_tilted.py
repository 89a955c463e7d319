"""Tilt and row balance of value·output products alone, against an optimizer for each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rankfold import RiemannianSGD
from rankfold.lab.config import OptimizerConfig
from rankfold.lab.model import MODEL_PRESETS, Decoder
from rankfold.lab.optimizers import Riemannian

CONFIG = OptimizerConfig(
    name="fixed-quotient",
    lr=2.0**-6,
    momentum=0.8,
    momentum_form="unit-smoothing",
    nesterov=True,
    growth=0.5,
    tilt=0.25,
    row_balance=0.5,
    tilted_products="vo",
    normalize="whitened",
    vo_rate=4.0,
    output_rate=2.0,
)
RATES = [2.0**-6, 2.0**-6, 2.0**-7, 2.0**-8]


def wide(model: str) -> Decoder:
    return Decoder(MODEL_PRESETS[model], 50, seed=2).double()


def pull(decoder: Decoder) -> None:
    """Gradients of a loss in float64, in which weights of all layers meet."""
    decoder.zero_grad()
    tokens = torch.arange(48).reshape(4, 12) % 7
    decoder.logits(tokens).square().mean().backward()


def trained(decoder: Decoder, config: OptimizerConfig, graph: bool) -> list[torch.Tensor]:
    """The attention weights after steps at `RATES`, half of them after a checkpoint."""
    stepper = Riemannian(decoder.grids(), config, graph)
    assert stepper.capturable == graph
    for k, rate in enumerate(RATES):
        if k == len(RATES) // 2:
            kept = stepper.state_dict()
            stepper = Riemannian(decoder.grids(), config, graph)
            stepper.load_state_dict(kept)
        pull(decoder)
        stepper.set_lr(rate)
        stepper.step()
    return [param.detach() for param in decoder.attention_parameters()]


@pytest.mark.parametrize("graph", [False, True])  # with learning rates as tensors
@pytest.mark.parametrize("model", ["tiny", "tiny-gqa"])
def test_each_kind_of_products_has_a_manner_of_its_own(model: str, graph: bool) -> None:
    found = trained(wide(model), CONFIG, graph)
    decoder = wide(model)
    grids = decoder.grids()
    queries, outputs = grids[::2], grids[1::2]
    for grid in outputs:
        grid.rate, grid.sides = 4.0, (2.0, 1.0)
    common: dict[str, Any] = {
        "geometry": "fixed-quotient",
        "momentum": 0.8,
        "momentum_form": "unit-smoothing",
        "nesterov": True,
        "growth": 0.5,
        "normalize": "whitened",
    }
    apart = [
        RiemannianSGD(queries, 1.0, **common),
        RiemannianSGD(outputs, 1.0, tilt=0.25, row_balance=0.5, **common),
    ]
    for rate in RATES:
        pull(decoder)
        for optimizer in apart:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    wanted = [param.detach() for param in decoder.attention_parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("products", "queries"), [("all", True), ("vo", False)])
def test_one_group_has_both_kinds(products: str, queries: bool) -> None:
    config = replace(CONFIG, tilted_products=products)
    (group,) = Riemannian(wide("tiny").grids(), config).inner.param_groups
    assert (group["tilt"], group["row_balance"]) == (0.25, 0.5)
    tilted = {grid.name: grid.tilted for grid in group["grids"]}
    layers = ("layer0", "layer1")
    kinds = {"qk": queries, "vo": True}
    assert tilted == {f"{layer}.{kind}": on for layer in layers for kind, on in kinds.items()}
