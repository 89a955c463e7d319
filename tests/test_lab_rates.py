"""Learning rates of value·output products and of output weights, whoever updates them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rankfold
from rankfold.geometries import GEOMETRIES
from rankfold.lab.config import OptimizerConfig
from rankfold.lab.model import MODEL_PRESETS, Attention, Decoder
from rankfold.lab.optimizers import build, by_rate


def attentions(decoder: Decoder) -> list[Attention]:
    return [m for m in decoder.modules() if isinstance(m, Attention)]


def pull(decoder: Decoder) -> None:
    """Gradients of a loss linear in all products, so that none of them sees another one move."""
    for layer in attentions(decoder):
        for one, other in ((layer.q, layer.k), (layer.v, layer.o)):
            weights = one.weight, other.weight.mT if other is layer.o else other.weight
            blocks = [w.unflatten(0, (-1, 16)) for w in weights]
            (blocks[0].mT @ blocks[1] * torch.arange(64.0).cos()).sum().backward()


@pytest.mark.parametrize("model", ["tiny", "tiny-gqa"])
@pytest.mark.parametrize("name", ["adamw", "muon", "whitened", *GEOMETRIES])  # Dion draws bases
def test_value_output_products_have_a_rate_of_their_own(name: str, model: str) -> None:
    lr, seen = 2.0**-6, {}
    for label, lr_of_run, vo_rate in (("one", lr, 1.0), ("double", 2 * lr, 1.0), ("both", lr, 2.0)):
        config = OptimizerConfig(name=name, lr=lr_of_run, vo_rate=vo_rate, momentum=0.5)
        decoder = Decoder(MODEL_PRESETS[model], 50, seed=2)
        stepper, _ = build(decoder, config)
        assert stepper is not None
        for k in range(3):
            if k == 1 and label == "both":  # goes on from what was kept
                kept = stepper.state_dict()
                stepper, _ = build(decoder, config)
                assert stepper is not None
                stepper.load_state_dict(kept)
            decoder.zero_grad()
            pull(decoder)
            stepper.set_lr(lr_of_run)
            stepper.step()
        seen[label] = {x: getattr(attentions(decoder)[0], x).weight.detach() for x in "qkvo"}
    start = attentions(Decoder(MODEL_PRESETS[model], 50, seed=2))[0]
    for x in "qkvo":
        like, unlike = ("one", "double") if x in "qk" else ("double", "one")
        torch.testing.assert_close(seen["both"][x], seen[like][x], atol=1e-5, rtol=1e-4)
        moved = seen["both"][x] - getattr(start, x).weight
        assert (seen["both"][x] - seen[unlike][x]).norm() > 0.2 * moved.norm()


@pytest.mark.parametrize("model", ["tiny", "tiny-gqa"])
def test_what_is_recommended_is_what_users_get(model: str) -> None:
    """The laboratory tells options of its own, and `recommended` those of the library."""
    ours, theirs = (Decoder(MODEL_PRESETS[model], 50, seed=2) for _ in range(2))
    stepper, _ = build(ours, OptimizerConfig(name="recommended", lr=2.0**-6))
    assert stepper is not None
    optimizer = rankfold.recommended(theirs.grids(), 2.0**-6)
    for _ in range(3):
        for decoder in (ours, theirs):
            decoder.zero_grad()
            pull(decoder)
        stepper.step()
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    start = Decoder(MODEL_PRESETS[model], 50, seed=2)
    moved = [
        x for x, y in zip(ours.parameters(), start.parameters(), strict=True) if (x != y).any()
    ]
    assert len(moved) == 4 * len(attentions(ours))


@pytest.mark.parametrize("model", ["tiny", "tiny-gqa"])
@pytest.mark.parametrize(
    "name",
    ["adamw", "muon", "whitened", "dion", "fixed-quotient", "isometry-quotient"],
)
def test_output_weights_have_a_rate_of_their_own(name: str, model: str) -> None:
    """In one step from one place, in which each factor moves by itself; then it can be resumed.

    Value·output products are on their own throughout, as Dion draws for all it has in one go.
    """
    seen, lr = {}, 2.0**-6
    for label, vo_rate, output_rate in (("one", 2.0, 1.0), ("double", 4.0, 1.0), ("o", 2.0, 2.0)):
        config = OptimizerConfig(
            name=name,
            lr=lr,
            vo_rate=vo_rate,
            output_rate=output_rate,
            normalize="whitened",
            momentum=0.5,
            weight_decay=0.0,
        )
        decoder = Decoder(MODEL_PRESETS[model], 50, seed=2)
        stepper, _ = build(decoder, config)
        assert stepper is not None
        pull(decoder)
        stepper.set_lr(lr)
        stepper.step()
        seen[label] = {x: getattr(attentions(decoder)[0], x).weight.detach() for x in "qkvo"}
        again, _ = build(decoder, config)
        assert again is not None
        again.load_state_dict(stepper.state_dict())
    for x in "qkvo":
        like, unlike = ("double", "one") if x == "o" else ("one", "double")
        torch.testing.assert_close(seen["o"][x], seen[like][x], atol=1e-6, rtol=1e-5)
        assert x in "qk" or (seen["o"][x] - seen[unlike][x]).norm() > 1e-3
    alone = replace(config, vo_rate=1.0)  # which sets them apart all the same
    assert [share for _, share in by_rate(decoder.grids(), alone)] == [1.0, 1.0]


@pytest.mark.parametrize("model", ["tiny", "tiny-gqa"])
@pytest.mark.parametrize(
    "name", ["adamw", "muon", "whitened", "dion", "fixed-quotient", "fixed-embedded"]
)
@pytest.mark.parametrize("output_rate", [0.5, 1.0, 2.0])
def test_a_decay_shrinks_all_products_alike_and_nothing_else(
    name: str, model: str, output_rate: float
) -> None:
    config = OptimizerConfig(
        name=name,
        lr=2.0**-3,
        vo_rate=2.0,
        output_rate=output_rate,
        weight_decay=0.0,
        product_decay=0.25,
        normalize="whitened" if name in GEOMETRIES else "metric",
    )
    decoder = Decoder(MODEL_PRESETS[model], 50, seed=2)
    before = {k: p.detach().clone() for k, p in decoder.named_parameters()}
    stepper, others = build(decoder, config)
    assert stepper is not None
    for p in decoder.parameters():
        p.grad = torch.zeros_like(p)
    stepper.step()
    others.step()
    after = dict(decoder.named_parameters())
    for layer in ("layers.0.attention", "layers.1.attention"):
        # Where factors go by themselves, each by half, so that the product has both halves.
        for pair, shrink in (("qk", 2.0**-5), ("ov", 2.0**-4 * max(1, output_rate))):
            left = 1 - shrink if name in GEOMETRIES else (1 - shrink / 2) ** 2
            names = [f"{layer}.{x}.weight" for x in pair]
            was, now = (_norms(*(of[k] for k in names)) for of in (before, after))
            torch.testing.assert_close(now, left * was, rtol=1e-5, atol=0)
    others_after = {k: p for k, p in after.items() if "attention." not in k}
    for k, p in others_after.items():
        torch.testing.assert_close(p, before[k], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon", "fixed-quotient"])
def test_a_decay_takes_no_more_than_there_is(name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.25, vo_rate=4.0, product_decay=1.0)
    with pytest.raises(ValueError, match="must be below 1, the share of a"):
        build(Decoder(MODEL_PRESETS["tiny"], 50), config)


def _norms(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of the factors' norms, which shrinks as all products of their heads do."""
    return left.detach().norm() * right.detach().norm()
