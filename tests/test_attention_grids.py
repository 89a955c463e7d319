"""attention_grids: what it finds, what it leaves out, and that what it finds is exact."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import BitNetConfig, LlamaConfig, OPTConfig, Qwen3Config

import rankfold
from rankfold import Grid, attention_grids

from .gauge import members_read, move, move_along_gauge, random_gauge
from .layout_cases import TOKENS, VOCABULARY, causal_lm, randn, randomized

WIDTH, RANK = 12, 4


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_names_are_those_of_the_model_that_was_compiled() -> None:
    """In grids, in reasons and in parameters that are covered in part."""
    model: Any = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)))
    model[0].self_attn.out_proj.weight.requires_grad_(False)
    expected = rankfold.inspect(model).as_dict()
    model[1] = torch.compile(model[1], backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    found = rankfold.inspect(compiled).as_dict()
    assert {**found, "model": "Sequential"} == expected
    assert expected["partly_covered"].keys() == {"0.self_attn.in_proj_weight"} | {
        "0.self_attn.in_proj_bias"
    }
    assert "0.self_attn.out_proj.weight" in expected["skipped"][0]["reason"]
    assert [grid.name for grid in attention_grids(compiled)] == [
        grid.name for grid in attention_grids(model)
    ]


class Projections(nn.Module):
    """Grouped-query attention on four linears, as most language models spell it."""

    def __init__(
        self, heads: int = 4, groups: int = 2, bias: str = "", output: str = "o_proj", **extra: Any
    ) -> None:
        super().__init__()
        sizes = {"q": heads, "k": groups, "v": groups}
        for name, count in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(WIDTH, count * RANK, bias=name in bias))
        self.output = output
        setattr(self, output, nn.Linear(heads * RANK, WIDTH, bias="o" in bias))
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, f"{name}_proj")(x) for name in "qkv")
        q, k, v = (y.unflatten(-1, (-1, RANK)).transpose(1, 2) for y in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        attended: Tensor = getattr(self, self.output)(mixed.transpose(1, 2).flatten(2))
        return attended


class Tower(nn.Module):
    """Two residual layers of projections."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Projections(head_dim=RANK, **options) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 16, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tiny(config: Callable[..., Any], **options: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    return causal_lm(config(**{**VOCABULARY, **sizes, **options}))


def llama() -> Any:
    """Rotary embeddings, grouped queries, and biases."""
    return tiny(
        LlamaConfig, head_dim=RANK, num_key_value_heads=2, attention_bias=True, intermediate_size=8
    )


def opt() -> Any:
    """Learned positions, and biases everywhere."""
    return tiny(OPTConfig, ffn_dim=16, word_embed_proj_dim=WIDTH, max_position_embeddings=16)


def names(grids: list[Grid]) -> list[str | None]:
    return [grid.name for grid in grids]


def heads_of(module: Any) -> Callable[[], Tensor]:
    """The output of an nn.MultiheadAttention, attention weights included."""
    widths = (module.embed_dim, module.kdim, module.vdim)
    q, k, v = (randn(2, 5, width, seed=s) for s, width in enumerate(widths))

    def output() -> Tensor:
        mixed, attention = module(q, k, v, average_attn_weights=False)
        return torch.cat([mixed.flatten(), attention.flatten()])

    return output


def output_of(model: Any) -> Callable[[], Tensor]:
    if isinstance(model, nn.MultiheadAttention):
        return heads_of(model)
    if hasattr(model, "config"):
        return lambda: model(TOKENS).logits
    return lambda: model(randn(2, 5, WIDTH))


# What is found -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_is_read_from_its_fused_weight(bias: bool) -> None:
    module: Any = nn.MultiheadAttention(WIDTH, 3, bias=bias)
    qk, vo = attention_grids(module)
    assert names([qk, vo]) == ["qk", "vo"]
    assert all(grid.groups == 3 and grid.rank == RANK for grid in (qk, vo))
    assert (qk.lefts, qk.rights, vo.lefts, vo.rights) == (1, 1, 1, 1)
    fused, fused_bias = module.in_proj_weight, module.in_proj_bias
    parts = (qk.left[0], qk.right[0], vo.right[0])
    assert all(part.param is fused and part.bias is fused_bias for part in parts)
    assert [part.start for part in parts] == [0, WIDTH, 2 * WIDTH]
    assert vo.left[0].param is module.out_proj.weight
    assert vo.left[0].bias is None


def test_widths_of_keys_and_values_keep_weights_apart() -> None:
    module: Any = nn.MultiheadAttention(WIDTH, 3, kdim=7, vdim=5, bias=False)
    qk, vo = attention_grids(module)
    assert (qk.left[0].param, qk.right[0].param) == (module.q_proj_weight, module.k_proj_weight)
    assert (vo.left[0].param, vo.right[0].param) == (module.out_proj.weight, module.v_proj_weight)
    assert [f.height for f in (qk.left[0], qk.right[0], vo.left[0], vo.right[0])] == [12, 7, 12, 5]


@pytest.mark.parametrize("bias", ["", "q", "v", "qkvo"])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2), (4, 1)])
def test_projections_form_one_member_a_key_head(heads: int, groups: int, bias: str) -> None:
    layer: Any = Projections(heads, groups, bias, head_dim=RANK)
    qk, vo = attention_grids(layer)
    assert [grid.groups for grid in (qk, vo)] == [groups, groups]
    assert [(grid.lefts, grid.rights) for grid in (qk, vo)] == [(heads // groups, 1)] * 2
    found = {"q": qk.left[0], "k": qk.right[0], "v": vo.right[0], "o": vo.left[0]}
    for name, factor in found.items():
        assert factor.param is getattr(layer, f"{name}_proj").weight
        carried = getattr(layer, f"{name}_proj").bias if name != "o" else None
        assert factor.bias is carried


@pytest.mark.parametrize(
    "extra",
    [
        {"head_dim": RANK},
        {"num_heads": 4},
        {"n_head": 4},
        {"config": SimpleNamespace(head_dim=RANK, num_attention_heads=99)},
        {"config": SimpleNamespace(num_attention_heads=4)},
        {"head_dim": RANK, "num_heads": 8, "output": "out_proj"},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_the_size_of_a_head_is_looked_up(extra: dict[str, Any]) -> None:
    assert [grid.rank for grid in attention_grids(Projections(**extra))] == [RANK, RANK]


def test_names_are_paths_of_modules() -> None:
    layers = ["layers.0.self_attn", "layers.1.self_attn"]
    both = [f"{layer}.{pair}" for layer in layers for pair in ("qk", "vo")]
    assert names(attention_grids(encoder())) == both
    mixed = nn.ModuleDict({"a": Tower(), "b": nn.MultiheadAttention(WIDTH, 3)})
    places = ["a.blocks.0", "a.blocks.1", "b"]
    assert names(attention_grids(mixed)) == [f"{x}.{p}" for x in places for p in ("qk", "vo")]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("qk", ["qk"]),
        ("vo", ["vo"]),
        (("qk",), ["qk"]),
        (["vo"], ["vo"]),
        (("vo", "qk"), ["qk", "vo"]),
        (iter(("qk", "vo")), ["qk", "vo"]),
        (None, ["qk", "vo"]),
    ],
)
def test_pairs_are_those_asked_for(pairs: Any, expected: list[str]) -> None:
    found = names(attention_grids(Tower(), pairs=pairs))
    assert found == [f"blocks.{k}.{pair}" for k in range(2) for pair in expected]


# What is left out --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["q_norm", "k_norm", "qk_norm"])
def test_a_norm_on_queries_or_keys_leaves_out_their_product(norm: str) -> None:
    layer = Projections(head_dim=RANK)
    setattr(layer, norm, nn.LayerNorm(RANK))
    assert names(attention_grids(layer)) == ["vo"]
    assert names(attention_grids(layer, pairs=("qk", "vo"))) == ["qk", "vo"]
    setattr(layer, norm, None)
    assert names(attention_grids(layer)) == ["qk", "vo"]


@pytest.mark.parametrize("name", ["rotary_emb", "rope"])
@pytest.mark.parametrize("level", ["model", "layer"])
def test_rotary_embeddings_leave_out_the_product_of_queries_and_keys(name: str, level: str) -> None:
    tower: Any = Tower()
    owner = tower if level == "model" else tower.blocks[1]
    setattr(owner, name, nn.Identity())
    rotated = [0, 1] if level == "model" else [1]
    expected = [
        f"blocks.{k}.{p}" for k in (0, 1) for p in ("qk", "vo") if p == "vo" or k not in rotated
    ]
    assert names(attention_grids(tower)) == expected
    assert len(attention_grids(tower, pairs=("qk", "vo"))) == 4


def test_a_class_that_is_called_rotary() -> None:
    class RoPEProjections(Projections):
        pass

    class European(Projections):
        pass

    assert names(attention_grids(RoPEProjections(head_dim=RANK))) == ["vo"]
    assert names(attention_grids(European(head_dim=RANK))) == ["qk", "vo"]


def test_rotary_embeddings_elsewhere_do_not_matter() -> None:
    model = nn.ModuleDict({"text": Tower(), "image": Tower()})
    model["text"].rotary_emb = nn.Identity()
    expected = [f"text.blocks.{k}.vo" for k in (0, 1)]
    expected += [f"image.blocks.{k}.{p}" for k in (0, 1) for p in ("qk", "vo")]
    assert names(attention_grids(model)) == expected


def test_llama_gives_output_value_and_both_on_request() -> None:
    model = llama()
    paths = [f"model.layers.{k}.self_attn" for k in range(2)]
    assert names(attention_grids(model)) == [f"{path}.vo" for path in paths]
    both = attention_grids(model, pairs=("qk", "vo"))
    assert names(both) == [f"{path}.{p}" for path in paths for p in ("qk", "vo")]
    assert [(g.groups, g.lefts, g.rights, g.rank) for g in both] == [(2, 2, 1, RANK)] * 4


def test_frozen_factors_are_left_out() -> None:
    tower: Any = Tower(bias="qkv")
    tower.blocks[0].q_proj.weight.requires_grad_(False)
    tower.blocks[1].v_proj.bias.requires_grad_(False)
    tower.blocks[1].o_proj.requires_grad_(False)
    assert names(attention_grids(tower)) == ["blocks.0.vo", "blocks.1.qk"]
    assert names(attention_grids(tower, pairs="qk")) == ["blocks.1.qk"]
    fused: Any = encoder()
    fused.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    fused.layers[1].self_attn.out_proj.weight.requires_grad_(False)
    assert names(attention_grids(fused)) == ["layers.1.self_attn.qk"]
    fused.requires_grad_(False)
    with pytest.raises(ValueError, match="no attention products found in TransformerEncoder"):
        attention_grids(fused)


# Errors ------------------------------------------------------------------------------------------


def test_nothing_found() -> None:
    with pytest.raises(ValueError, match=r"no attention products found in Linear.*rankfold\.Grid"):
        attention_grids(nn.Linear(3, 3))


@pytest.mark.parametrize("pairs", ["ov", ("qk", "kv"), (), "", "qkvo"])
def test_unknown_pairs(pairs: Any) -> None:
    with pytest.raises(ValueError, match="pairs must be 'qk', 'vo' or both, got"):
        attention_grids(Tower(), pairs=pairs)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Projections(head_dim=5), "head_dim 5 does not divide the 16 of q_proj"),
        (Projections(), "cannot tell the size of a head; give .* head_dim or num_heads"),
        (Projections(3, 2, head_dim=RANK), "3 query heads, 2 key heads.* do not form groups"),
        (Projections(head_dim=RANK, output="last"), "no linear o_proj or out_proj or dense"),
        (nn.MultiheadAttention(WIDTH, 3, add_bias_kv=True), "add_bias_kv .* by hand"),
        (nn.MultiheadAttention(WIDTH, 3, kdim=7), "one fused bias.* use bias=False"),
    ],
)
def test_layers_that_cannot_be_read_are_named(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=f"deep.0: .*{message}"):
        attention_grids(nn.ModuleDict({"deep": nn.ModuleList([layer])}))
    with pytest.raises(ValueError, match=f"the module itself: .*{message}"):
        attention_grids(layer)


# The products are exact --------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Any]] = {
    "multihead": lambda: nn.MultiheadAttention(WIDTH, 3, bias=False, batch_first=True),
    "multihead-bias": lambda: nn.MultiheadAttention(WIDTH, 3, batch_first=True),
    "multihead-sequence-first": lambda: nn.MultiheadAttention(WIDTH, 3),
    "multihead-zero-attention": lambda: nn.MultiheadAttention(WIDTH, 3, add_zero_attn=True),
    "multihead-kdim-vdim": lambda: nn.MultiheadAttention(WIDTH, 3, kdim=7, vdim=5, bias=False),
    "encoder": encoder,
    "encoder-batch-first": lambda: encoder(batch_first=True, norm_first=True),
    "projections": lambda: Tower(heads=3, groups=3),
    "projections-bias": lambda: Tower(heads=3, groups=3, bias="qkvo"),
    "projections-some-bias": lambda: Tower(bias="qv"),
    "projections-grouped": lambda: Tower(bias="qkvo", output="out_proj"),
    "projections-one-key": lambda: Tower(groups=1),
    "llama": llama,
    "opt": opt,
    "qwen3": lambda: tiny(Qwen3Config, head_dim=RANK, num_key_value_heads=2, intermediate_size=8),
}


@pytest.mark.parametrize("model", MODELS)
def test_no_output_notices_the_gauge(model: str, generator: torch.Generator) -> None:
    module = randomized(MODELS[model]())
    output = output_of(module)
    with torch.no_grad():
        before = output()
        for grid in attention_grids(module):
            members = members_read(grid)
            move_along_gauge(members, generator)
            assert float((output() - before).abs().max()) <= 1e-10 * float(before.abs().max())
            # One factor alone is noticed, so that the line above could have failed.
            moved = [part.clone() for part in members[-1].left[-1]]
            move(members[-1].left[-1:], random_gauge(grid.rank, generator))
            assert float((output() - before).abs().max()) > 1e-3
            for part, old in zip(members[-1].left[-1], moved, strict=True):
                part.copy_(old)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_what_is_left_out_is_not_exact(model: str, generator: torch.Generator) -> None:
    module = randomized(MODELS[model]())
    output = output_of(module)
    with torch.no_grad():
        before = output()
        for grid in attention_grids(module, pairs="qk"):
            move_along_gauge(members_read(grid), generator)
            assert float((output() - before).abs().max()) > 1e-3


def test_layers_of_a_rotary_model_given_without_it() -> None:
    assert {grid.name for grid in attention_grids(llama().model.layers)} == {
        "0.self_attn.vo",
        "1.self_attn.vo",
    }


def test_a_norm_between_values_and_output(generator: torch.Generator) -> None:
    sizes = {"hidden_size": 4 * RANK, "num_key_value_heads": 2, "intermediate_size": 8}
    module = randomized(tiny(BitNetConfig, **sizes))
    output = output_of(module)
    with torch.no_grad():
        before = output()
        try:
            found = attention_grids(module)
        except ValueError:
            return  # nothing is exact here
        for grid in found:
            move_along_gauge(members_read(grid), generator)
            assert float((output() - before).abs().max()) <= 1e-10 * float(before.abs().max())


def test_a_name_that_only_contains_rope() -> None:
    tower: Any = Tower()
    tower.properties = {}
    assert len(attention_grids(tower)) == 4


def test_a_number_of_heads_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="6"):
        attention_grids(Projections(num_heads=6))


def test_the_grids_can_be_optimized() -> None:
    model = randomized(opt())  # without dropout
    optimizer = rankfold.RiemannianSGD(attention_grids(model), lr=0.02, geometry="fixed-quotient")
    losses = []
    for _ in range(20):
        model.zero_grad()
        loss = model(TOKENS, labels=TOKENS).loss
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1, losses
