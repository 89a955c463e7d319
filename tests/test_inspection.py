"""inspect: its numbers and its table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankfold import attention_grids, inspect

from .families import FAMILIES
from .layout_cases import TOKENS, randn, randomized
from .test_attention_grids import RANK, WIDTH, Projections, Tower

# Numbers -----------------------------------------------------------------------------------------


def test_shares_of_whole_and_fused_parameters() -> None:
    tower: Any = Tower(bias="qkvo")
    seen = inspect(tower)
    outside = sum(block.o_proj.bias.numel() for block in tower.blocks)
    assert seen.parameters == seen.trainable == sum(p.numel() for p in tower.parameters())
    assert seen.covered == seen.parameters - outside
    assert not seen.partly
    phi: Any = FAMILIES["phi3"].build()
    fused = inspect(phi)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    # 2 of 8 heads are values, and all of the output is covered.
    assert fused.partly[name] == 0.25
    layer = phi.model.layers[0].self_attn
    assert fused.covered == 2 * (layer.qkv_proj.weight.numel() // 4 + layer.o_proj.weight.numel())


def test_frozen_and_shared_parameters_are_counted_once() -> None:
    layer: Any = Projections(head_dim=RANK)
    layer.o_proj.requires_grad_(False)
    model = nn.ModuleList([layer, layer])
    seen = inspect(model)
    total = sum(p.numel() for p in layer.parameters())
    assert seen.parameters == total
    assert seen.trainable == total - layer.o_proj.weight.numel()
    assert seen.covered == layer.q_proj.weight.numel() + layer.k_proj.weight.numel()
    assert [each.name for each in seen.found] == ["0.qk"]


def test_grids_are_those_that_are_found_by_default() -> None:
    model = FAMILIES["qwen3"].build()
    assert [g.name for g in inspect(model).grids] == [g.name for g in attention_grids(model)]


def test_nothing_is_changed() -> None:
    model = randomized(Tower())
    model.blocks[1].q_proj.weight.grad = held = torch.ones_like(model.blocks[1].q_proj.weight)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        seen = inspect(model, lambda: model(randn(2, 5, WIDTH)).sin().sum())
    assert all(each.inconsistency is not None for each in seen.products)
    assert model.blocks[1].q_proj.weight.grad is held
    assert held.eq(1).all()
    assert all(p.grad is None for p in model.parameters() if p.grad is not held)
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, param)


def test_a_product_outside_of_the_loss_is_not_measured() -> None:
    model = randomized(Tower())
    seen = inspect(model, lambda: model.blocks[0](randn(2, 5, WIDTH)).sin().sum())
    measured = {each.name: each.inconsistency is not None for each in seen.found}
    assert measured == {f"blocks.{k}.{p}": k == 0 for k in (0, 1) for p in ("qk", "vo")}
    nothing = inspect(nn.Linear(2, 2), lambda: torch.zeros(()))
    assert not nothing.products


@pytest.mark.parametrize(("size", "exact"), [(RANK, True), (RANK // 2, False)])
def test_a_wrong_layout_shows(size: int, exact: bool) -> None:
    """Heads told apart wrongly: the number is far from rounding."""
    model = randomized(Projections(head_dim=size))
    seen = inspect(model, lambda: model(randn(2, 5, WIDTH)).sin().sum())
    values = [each.inconsistency or 0.0 for each in seen.found]
    assert (max(values) < 1e-10) == exact, values


# The table ---------------------------------------------------------------------------------------


def test_layers_alike_are_one_line() -> None:
    found, left_out, total = str(inspect(FAMILIES["llama"].build())).split("\n\n")
    assert found.splitlines() == [
        "found                        times  members  grid  product  rank",
        "model.layers.*.self_attn.vo  2      2        2×1   16×17    4",
    ]
    why = "rotary embeddings between queries and keys (LlamaModel.rotary_emb)"
    assert left_out.splitlines() == [
        "left out                     times  why",
        f"model.layers.*.self_attn.qk  2      {why}",
    ]
    # 392 of each layer's 1,424; 336 more are outside of layers.
    share = "784 of 3,184 trainable parameters covered (24.6%)"
    assert total == f"LlamaForCausalLM: 2 grids found, 2 left out; {share}"


def test_layers_that_differ_are_lines_apart_and_parts_are_told() -> None:
    model: Any = FAMILIES["phi3"].build()
    model.model.layers[0].self_attn.o_proj.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    shown = str(inspect(model, lambda: model(TOKENS).logits.sin().sum()))
    lines = shown.splitlines()
    assert lines[0].split()[-1] == "inconsistency"
    assert lines[1].startswith("model.layers.1.self_attn.vo")
    assert any("frozen: model.layers.0.self_attn.o_proj.weight" in line for line in lines)
    assert "more are frozen" in shown
    assert "covered in part: model.layers.*.self_attn.qkv_proj.weight (25%)" in lines[-1]


def test_nothing_at_all() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    assert str(inspect(model)) == "Linear: 0 grids found, 0 left out; no trainable parameters"


def test_found_products_that_the_loss_bends_are_told() -> None:
    """As by a norm that is written into the forward pass, where no module shows it."""
    model: Any = Tower().double()
    x = randn(2, 5, WIDTH)
    assert "no product to the loss" not in str(inspect(model, lambda: model(x).square().mean()))

    def bent() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss + model.blocks[0].q_proj.weight.square().mean()

    told = str(inspect(model, bent)).partition("no product to the loss: ")[2]
    assert told.startswith("blocks.0.qk (")
    assert "blocks.1" not in told


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.ones(()), "must be a function that computes the loss of one batch, got Tensor"),
        (lambda: 1.0, "a tensor of one element that depends on the parameters, .* got 1.0"),
        (lambda: None, "without backward\\(\\) or item\\(\\), got None"),
        (lambda: torch.ones(3), "got a tensor that is not"),
    ],
)
def test_what_is_no_loss(loss: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        inspect(Tower(), loss)
