"""lora_grids on PEFT's real layers: exact products, adapters by name, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from rankfold import RiemannianSGD, inspect, lora_grids

from .families import FAMILIES
from .gauge import members_read, move, move_along_gauge, random_gauge
from .layout_cases import TOKENS, randn, randomized

TARGETS = ["q_proj", "v_proj", "up_proj"]


def adapted(base: Any = None, **options: Any) -> Any:
    """A small Llama, or what is given, with adapters, all parameters random."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES["llama"].build() if base is None else base
        config = peft.LoraConfig(**{"r": 3, "target_modules": TARGETS, **options})
        wrapped: Any = peft.get_peft_model(model, config)
    return randomized(wrapped)


def convolutional() -> Any:
    return nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "flat": nn.Conv1d(3, 4, 1)})


def logits(model: Any) -> Callable[[], Tensor]:
    return lambda: model(input_ids=TOKENS).logits


def reasons(model: nn.Module) -> dict[str, str]:
    return {
        each.name.removeprefix("base_model.model."): str(each.reason)
        for each in inspect(model).skipped
        if each.kind == "lora"
    }


def encoder_layer() -> Any:
    return nn.TransformerEncoderLayer(12, 3, 8, dropout=0.0, batch_first=True)


MODELS: dict[str, Callable[[], tuple[Any, Callable[[], Tensor]]]] = {
    "plain": lambda: (model := adapted(), logits(model)),
    "rslora": lambda: (model := adapted(use_rslora=True, lora_alpha=7), logits(model)),
    "dora": lambda: (model := adapted(use_dora=True), logits(model)),
    "bias": lambda: (model := adapted(target_modules=["q_proj"], lora_bias=True), logits(model)),
    "conv1d": lambda: (
        model := adapted(FAMILIES["gpt2"].build(), target_modules=["c_attn"], fan_in_fan_out=True),
        logits(model),
    ),
    "multihead": lambda: (
        model := adapted(encoder_layer(), target_modules=["self_attn", "linear1"]),
        lambda: model(randn(2, 5, 12)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_is_what_the_model_computes(name: str) -> None:
    model, output = MODELS[name]()
    generator = torch.Generator().manual_seed(3)
    grids = lora_grids(model)
    assert all(grid.rank == 3 and grid.groups == 1 for grid in grids)
    with torch.no_grad():
        before = output()
        for grid in grids:
            members = members_read(grid)
            move_along_gauge(members, generator)
            assert float((output() - before).abs().max() / before.abs().max()) < 1e-6
            (block,) = members[0].left
            old = block[0].clone()
            move([block], random_gauge(3, generator))
            assert float((output() - before).abs().max() / before.abs().max()) > 1e-4
            block[0].copy_(old)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_and_one_step_lowers_the_loss(name: str) -> None:
    model, output = MODELS[name]()
    target = output().detach().roll(1)

    def loss() -> Tensor:
        return (output() - target).square().mean()

    seen = inspect(model, loss)
    values = [each.inconsistency for each in seen.found]
    assert values
    assert all(value is not None and value < 1e-5 for value in values), values
    optimizer = RiemannianSGD(lora_grids(model), lr=1e-4, geometry="fixed-quotient")
    before = loss()
    torch.autograd.backward(before)
    optimizer.step()
    assert loss().item() < before.item()


def test_dropout_before_the_factors_keeps_the_product_exact() -> None:
    """For the same mask, that is: the product of B and A meets an input with some entries zero."""
    model = adapted(lora_dropout=0.5).train()
    generator = torch.Generator().manual_seed(3)

    def output() -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return model(input_ids=TOKENS).logits

    with torch.no_grad():
        before = output()
        for grid in lora_grids(model):
            move_along_gauge(members_read(grid), generator)
        assert float((output() - before).abs().max() / before.abs().max()) < 1e-6
        model.eval()
        assert float((output() - before).abs().max()) > 1e-2  # the dropout was there
    seen = inspect(model.train(), lambda: output().sin().sum())
    assert max(each.inconsistency or 0 for each in seen.found) < 1e-5


def test_the_factors_are_where_they_should_be() -> None:
    model = adapted()
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    name = "base_model.model.model.layers.1.self_attn.q_proj.default"
    grid = next(grid for grid in lora_grids(model) if grid.name == name)
    assert grid.left[0].param is layer.lora_B["default"].weight
    assert grid.right[0].param is layer.lora_A["default"].weight
    assert grid.right[0].axis == -2
    assert len(lora_grids(model)) == 2 * len(TARGETS)


def test_a_fresh_adapter_is_measured_and_trained_with_damping() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=3, target_modules=TARGETS)
        model: Any = peft.get_peft_model(FAMILIES["llama"].build(), config)
    output = logits(model)
    target = torch.nn.functional.one_hot(TOKENS, 10).float()

    def loss() -> Tensor:
        return (output() - target).square().mean()

    assert all(each.inconsistency == 0 for each in inspect(model, loss).found)
    optimizer = RiemannianSGD(lora_grids(model), lr=0.1, geometry="fixed-quotient", damping=1e-3)
    before = loss()
    torch.autograd.backward(before)
    optimizer.step()
    assert loss().item() < before.item()


# Adapters ----------------------------------------------------------------------------------------


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return randomized(model)


def adapter_names(model: Any, **options: Any) -> set[str]:
    return {str(grid.name).rpartition(".")[2] for grid in lora_grids(model, **options)}


def test_only_active_adapters_are_taken() -> None:
    model = two_adapters()
    assert adapter_names(model) == {"default"}
    assert set(reasons(model).values()) == {"inactive"}
    model.set_adapter("other")
    assert adapter_names(model) == {"other"}
    model.base_model.set_adapter(["default", "other"])
    assert adapter_names(model) == {"default", "other"}
    assert adapter_names(model, adapters="other") == {"other"}
    assert adapter_names(model, adapters=iter(["other", "default"])) == {"default", "other"}
    assert not reasons(model)


def test_both_adapters_are_exact_together() -> None:
    model = two_adapters()
    model.base_model.set_adapter(["default", "other"])
    output, generator = logits(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        before = output()
        for grid in lora_grids(model):
            move_along_gauge(members_read(grid), generator)
        assert float((output() - before).abs().max() / before.abs().max()) < 1e-6


def test_an_adapter_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"named mine .* there are: default, other"):
        lora_grids(two_adapters(), adapters=["mine", "other"])
    with pytest.raises(ValueError, match="there are: none"):
        lora_grids(nn.Linear(2, 2), adapters="mine")


# Left out ----------------------------------------------------------------------------------------


def test_embeddings_and_convolutions_are_left_out() -> None:
    model = adapted(target_modules=["q_proj", "embed_tokens"])
    assert len(lora_grids(model)) == 2
    assert "an embedding" in reasons(model)["model.embed_tokens.default"]
    convolutions = adapted(convolutional(), target_modules=["conv", "flat"])
    assert all("a convolution" in reason for reason in reasons(convolutions).values())
    with pytest.raises(ValueError, match=r"no trainable LoRA adapters.*\n.*conv.default: not on"):
        lora_grids(convolutions)


def test_frozen_merged_disabled_and_too_wide() -> None:
    model = adapted(target_modules=["q_proj"])
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A.requires_grad_(False)
    (frozen,) = reasons(model).values()
    assert frozen.startswith("frozen: base_model")
    assert frozen.endswith("q_proj.lora_A.default.weight")
    model.merge_adapter()
    assert all("merged" in reason for reason in reasons(model).values())
    model.unmerge_adapter()
    with model.disable_adapter():
        assert all("disabled" in reason for reason in reasons(model).values())
    wide = adapted(r=17, target_modules=["q_proj"])
    assert all("rank 17 is above the height 16" in reason for reason in reasons(wide).values())


def test_other_adapters_by_way_of_lora_layers() -> None:
    model = FAMILIES["llama"].build()
    config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"])
    adaptive: Any = peft.get_peft_model(model, config)
    assert all("lora_E stands between" in reason for reason in reasons(adaptive).values())
    kept = adapted(init_lora_weights="mica", target_modules=["q_proj"])
    assert all("MiCALinearVariant is not known" in reason for reason in reasons(kept).values())


def test_attention_under_adapters_is_left_out() -> None:
    seen = inspect(adapted(target_modules=["q_proj"]))
    attention = [each for each in seen.skipped if each.kind == "attention"]
    assert len(attention) == 2
    assert all("not a plain linear" in str(each.reason) for each in attention)


def test_nothing_to_find() -> None:
    with pytest.raises(ValueError, match="no trainable LoRA adapters of linears found in Linear"):
        lora_grids(nn.Linear(2, 2))
