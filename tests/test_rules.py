"""Rules of one's own, and every reason for which a product is left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.parametrizations import orthogonal

from rankfold import (
    AttentionRule,
    Joined,
    PerHead,
    RiemannianSGD,
    attention_grids,
    inspect,
    register_attention,
)
from rankfold.adapters import families

from .families import FAMILIES, LATENT, transformer
from .gauge import members_read, move_along_gauge
from .layout_cases import randn, randomized
from .test_attention_grids import RANK, WIDTH, Projections, Tower, names

HEADS, SHARED = 4, 2


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(families, "_BY_CLASS", dict(families._BY_CLASS))


def reasons(model: nn.Module) -> dict[str, str | None]:
    return {each.name: each.reason for each in inspect(model).skipped}


class Inner(nn.Module):
    """All of queries, keys and values in one weight, keys and values cut together by head."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * RANK)
        self.wkv = nn.Linear(WIDTH, SHARED * (RANK + 3))
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.wq(x).unflatten(-1, (HEADS, RANK)).transpose(1, 2)
        kv = self.wkv(x).unflatten(-1, (SHARED, RANK + 3)).transpose(1, 2)
        k, v = kv.split([RANK, 3], -1)
        if self.norm:
            q, k = (nn.functional.normalize(y, dim=-1) for y in (q, k))
        return q, k, v


class Odd(nn.Module):
    """Attention that no rule knows: nested, grouped, values narrower than keys."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.inner = Inner(norm)
        self.back = nn.Linear(HEADS * 3, WIDTH)
        self.count, self.value_size = HEADS, 3
        self.after = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x)
        mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y: Tensor = self.after(x + self.back(mixed.transpose(1, 2).flatten(2)))
        return y


def odd_rule(**options: Any) -> AttentionRule:
    return AttentionRule(
        query="inner.wq",
        key=PerHead("inner.wkv", (RANK, "value_size"), 0),
        value=PerHead("inner.wkv", (RANK, "value_size"), 1),
        output="back",
        heads="count",
        beside=("after",),
        **options,
    )


# Registering -------------------------------------------------------------------------------------


def test_a_registered_rule_is_exact() -> None:
    model: Any = randomized(nn.Sequential(Odd(), Odd()))
    with pytest.raises(ValueError, match="no attention products found in Sequential"):
        attention_grids(model)
    register_attention(Odd, odd_rule())
    grids = attention_grids(model)
    assert names(grids) == ["0.qk", "0.vo", "1.qk", "1.vo"]
    assert [(g.groups, g.lefts, g.rights, g.rank) for g in grids[:2]] == [
        (SHARED, 2, 1, RANK),
        (SHARED, 2, 1, 3),
    ]
    assert grids[0].left[0].bias is model[0].inner.wq.bias
    x, generator = randn(2, 5, WIDTH), torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = model(x)
        for grid in grids:
            move_along_gauge(members_read(grid), generator)
        assert float((model(x) - before).abs().max()) < 1e-12


def test_what_the_rule_says_stands_between_is_left_out() -> None:
    model = randomized(Odd(norm=True))
    register_attention(Odd, odd_rule(between={"qk": "queries and keys are normalized"}))
    assert names(attention_grids(model)) == ["vo"]
    assert names(attention_grids(model, pairs="qk")) == ["qk"]
    seen = inspect(model, lambda: model(randn(2, 5, WIDTH)).sin().sum())
    (skipped,) = seen.skipped
    assert skipped.reason == "queries and keys are normalized"
    assert skipped.inconsistency is not None
    assert skipped.inconsistency > 1e-2


def test_weights_of_unknown_purpose_leave_both_out() -> None:
    rule = AttentionRule(odd_rule().query, odd_rule().key, odd_rule().value, "back", heads="count")
    register_attention(Odd, rule)
    found = reasons(Odd())
    assert all("after (LayerNorm) may stand between" in str(found[pair]) for pair in ("qk", "vo"))


def test_subclasses_are_read_by_the_rule_and_names_do_for_classes() -> None:
    class Odder(Odd):
        pass

    register_attention(f"{Odd.__module__}.{Odd.__qualname__}", odd_rule())
    assert names(attention_grids(Odder())) == ["qk", "vo"]
    register_attention(Odder, odd_rule(between={"vo": "it says so"}))
    assert names(attention_grids(Odder())) == ["qk"]
    assert names(attention_grids(Odd())) == ["qk", "vo"]


def test_of_several_rules_the_first_that_fits() -> None:
    register_attention(Odd, [AttentionRule("q", "k", "v", "o"), odd_rule()])
    assert names(attention_grids(Odd())) == ["qk", "vo"]
    register_attention(Odd, AttentionRule("q", "k", "v", "o"))
    with pytest.raises(ValueError, match="the rule of Odd does not fit"):
        attention_grids(nn.Sequential(Odd()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "5 heads do not divide the 16 of inner.wq"),
        ({"heads": "nothing"}, "neither the module nor its configuration has a number nothing"),
        ({"head_dim": 3}, "head_dim 3 does not divide the 16 of inner.wq"),
        ({"output": ("a", "b")}, "has inner.wq and inner.wkv but no linear a or b"),
        ({"key": Joined("inner.wkv", "kv")}, "does not divide the 14"),
        ({"value": "inner.none"}, "the rule of Odd does not fit"),
        ({"refuse": {"after": "because"}}, "because"),
    ],
)
def test_a_rule_that_cannot_be_followed_says_why(options: dict[str, Any], message: str) -> None:
    given = {**vars(odd_rule()), **options}
    register_attention(Odd, AttentionRule(**given))
    with pytest.raises(ValueError, match=message):
        attention_grids(Odd())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: odd_rule(between={"kq": "why"}), r"between is by 'qk' and 'vo', got \['kq'\]"),
        (lambda: Joined("w", "qkx"), "letters q, k and v, got 'qkx'"),
        (lambda: Joined("w", "kk"), "got 'kk'"),
        (lambda: PerHead("w", ("a", "b"), 2), "there is no segment 2 of 2"),
        (lambda: AttentionRule(Joined("w", "kv"), "k", "v", "o"), "has no 'q'"),
    ],
)
def test_a_rule_that_contradicts_itself(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# Left out, and why -------------------------------------------------------------------------------


def test_layers_that_cannot_be_read_do_not_hide_the_others() -> None:
    model = nn.ModuleDict({"good": Projections(head_dim=RANK), "bad": Projections(head_dim=5)})
    assert names(attention_grids(model)) == ["good.qk", "good.vo"]
    assert reasons(model) == {"bad": "head_dim 5 does not divide the 16 of q_proj"}


def test_frozen_parameters_are_named() -> None:
    tower: Any = Tower(bias="q")
    tower.blocks[0].q_proj.bias.requires_grad_(False)
    assert reasons(tower) == {"blocks.0.qk": "frozen: blocks.0.q_proj.bias"}


def test_weights_that_are_no_parameters() -> None:
    tower: Any = Tower()
    orthogonal(tower.blocks[0].k_proj)
    found = reasons(tower)
    assert "k_proj" in str(found["blocks.0"])
    assert names(attention_grids(tower)) == ["blocks.1.qk", "blocks.1.vo"]


def test_flattened_weights() -> None:
    """As a wrapper leaves them that keeps all parameters of a module in one."""
    tower = Tower()
    linear = next(m for m in tower.blocks[1].modules() if isinstance(m, nn.Linear))
    linear.weight = nn.Parameter(linear.weight.detach().flatten())
    assert "is no matrix: find grids before a wrapper flattens" in str(reasons(tower)["blocks.1"])


def test_a_linear_with_a_forward_of_its_own() -> None:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.round())

    tower: Any = Tower()
    tower.blocks[1].v_proj = Rounded(WIDTH, 2 * RANK)
    assert "Rounded, not a plain linear" in str(reasons(tower)["blocks.1"])


def test_heads_larger_than_their_inputs() -> None:
    layer = Projections(num_heads=1)
    layer.q_proj = layer.k_proj = nn.Linear(WIDTH, 4 * RANK)  # rank 16 of 12 inputs
    layer.v_proj = nn.Linear(WIDTH, 4 * RANK)
    assert "rank 16 is above the height" in str(reasons(layer)["vo"])


def test_a_repeated_layer_is_one_product() -> None:
    layer = Projections(head_dim=RANK)
    model = nn.ModuleList([layer, layer, layer])
    assert names(attention_grids(model)) == ["0.qk", "0.vo"]
    assert reasons(model) == {
        f"{k}.{pair}": f"the same product as 0.{pair}" for k in (1, 2) for pair in ("qk", "vo")
    }


def test_layers_with_all_weights_tied_are_one_product() -> None:
    tower: Any = randomized(Tower())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(tower.blocks[1], name).weight = getattr(tower.blocks[0], name).weight
    grids = attention_grids(tower)
    assert names(grids) == ["blocks.0.qk", "blocks.0.vo"]
    x, generator = randn(2, 5, WIDTH), torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = tower(x)
        for grid in grids:
            move_along_gauge(members_read(grid), generator)
        assert float((tower(x) - before).abs().max() / before.abs().max()) < 1e-12


def test_a_factor_in_two_products_is_in_none() -> None:
    tower: Any = Tower()
    tower.blocks[1].q_proj.weight = tower.blocks[0].q_proj.weight
    assert names(attention_grids(tower)) == ["blocks.0.vo", "blocks.1.vo"]
    where = "one parameter in several places: blocks.0.q_proj.weight, blocks.1.q_proj.weight"
    assert reasons(tower) == {f"blocks.{k}.qk": where for k in range(2)}


def test_keys_that_are_values() -> None:
    layer = Projections(head_dim=RANK)
    layer.v_proj = layer.k_proj
    with pytest.raises(ValueError, match=r"several places: k_proj\.weight, v_proj\.weight"):
        attention_grids(layer)


def test_clamped_and_shared_states() -> None:
    class Config:
        clip_qkv: float | None = None
        num_kv_shared_layers = 0

    layer: Any = Projections(head_dim=RANK)
    layer.config = Config()
    assert len(attention_grids(layer)) == 2
    layer.config.clip_qkv = 8.0
    assert all("clamped (config.clip_qkv)" in str(r) for r in reasons(layer).values())
    layer.config.clip_qkv, layer.config.num_kv_shared_layers = None, 2
    assert all("num_kv_shared_layers" in str(r) for r in reasons(layer).values())
    assert len(reasons(layer)) == 2


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("q_ln", ["vo"]),
        ("norm_k", ["vo"]),
        ("v_norm", ["qk"]),
        ("gate_proj", ["qk"]),
        ("attn_sub_norm", ["qk"]),
        ("relative_k_proj", ["vo"]),
        ("relative_attention_bias", ["qk", "vo"]),
        ("attn_dropout", ["qk", "vo"]),
        ("mystery", []),
    ],
)
def test_other_parts_of_a_layer_go_by_their_names(name: str, pairs: list[str]) -> None:
    layer = Projections(head_dim=RANK)
    setattr(layer, name, nn.Dropout() if "dropout" in name else nn.Linear(RANK, RANK))
    assert names(inspect(layer).grids) == pairs


def test_functions_that_forward_calls() -> None:
    class Turning(Projections):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(apply_rotary(x))

    class Normalizing(Projections):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.normalize(x))

    def apply_rotary(x: Tensor) -> Tensor:
        return x

    layer = nn.ModuleList([Turning(head_dim=RANK), Normalizing(head_dim=RANK)])
    found = reasons(layer)
    assert found.keys() == {"0.qk", "1.qk", "1.vo"}
    assert "apply_rotary in forward" in str(found["0.qk"])
    assert all("calls normalize" in str(found[f"1.{pair}"]) for pair in ("qk", "vo"))


def test_attention_without_a_rule_is_named() -> None:
    model = transformer("FalconModel", {}, hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=4, vocab_size=10)()  # fmt: skip
    assert reasons(model) == {
        "h.0.self_attention": "no rule for FalconAttention; see rankfold.register_attention"
    }


def test_latent_attention_says_what_it_leaves_out() -> None:
    found = reasons(transformer("DeepseekV3Model", LATENT, q_lora_rank=6)())
    layer = {n.rpartition(".")[2]: r for n, r in found.items() if n.startswith("layers.1")}
    assert layer == {
        "q_a·q_b": "q_a_layernorm stands between the factors",
        "kv_a·kv_b": "kv_a_layernorm stands between the factors",
        "q_rope·k_rope": "rotary embeddings turn this part of queries and keys",
    }
    without = reasons(transformer("DeepseekV2Model", LATENT, q_lora_rank=None)())
    assert not any("q_a" in name for name in without)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek-v3", "bert", "multihead"])
def test_models_on_the_meta_device(family: str) -> None:
    here = attention_grids(FAMILIES[family].build())
    with torch.device("meta"):
        model = FAMILIES[family].build()
    grids = attention_grids(model)
    assert names(grids) == names(here)
    RiemannianSGD(grids, lr=0.1, geometry="fixed-quotient")


def test_an_output_bias_stays_outside() -> None:
    model = FAMILIES["llama"].build()
    inside = {id(p) for grid in attention_grids(model, pairs=("qk", "vo")) for p in grid.params()}
    attention = model.model.layers[0].self_attn
    assert all(id(getattr(attention, f"{x}_proj").bias) in inside for x in "qkv")
    assert id(attention.o_proj.bias) not in inside


def test_neither_transformers_nor_peft_is_imported() -> None:
    code = "import rankfold, sys; assert not {'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
