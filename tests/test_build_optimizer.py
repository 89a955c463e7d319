"""build_optimizer: every trainable parameter once, and where it goes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import rankfold
from rankfold import Factor, Grid
from rankfold.defaults import RECOMMENDED

from .families import FAMILIES
from .toys import Toy, saying
from .whole_models import WIDTH, ZOO, Language, adapted, batch, llama, loss_of, nested, opt, train


def trainable(model: nn.Module) -> list[int]:
    return [id(p) for p in model.parameters() if p.requires_grad]


def held(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def names_of(optimizer: Optimizer, kind: str) -> set[str]:
    """The parameters of the optimizer of this kind."""
    groups = [group for group in optimizer.param_groups if group["optimizer"] == kind]
    return {name for group in groups for name in group["param_names"]}


def group_of(optimizer: Optimizer, name: str) -> dict[str, Any]:
    (group,) = (g for g in optimizer.param_groups if name in g["param_names"])
    return group


@pytest.mark.parametrize("base", ["adamw", "sgd", "muon", torch.optim.Adagrad, torch.optim.Rprop])
@pytest.mark.parametrize("name", ZOO)
def test_every_trainable_parameter_is_in_one_group(name: str, base: Any) -> None:
    model = ZOO[name]()
    optimizer = rankfold.build_optimizer(model, base=base)
    assert sorted(held(optimizer)) == sorted(trainable(model))
    inner = [i for part in optimizer.optimizers for i in held(part)]
    assert sorted(inner) == sorted(trainable(model))
    grids = {id(p) for grid in rankfold.attention_grids(model) for p in grid.params()}
    assert set(held(optimizer.products)) == grids
    wrappers = re.compile(r"_orig_mod\.|^module\.")
    by_id = {id(p): wrappers.sub("", n) for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["param_names"] == [by_id[id(p)] for p in group["params"]]


def test_the_products_have_what_is_recommended() -> None:
    optimizer = rankfold.build_optimizer(Language())
    (group,) = optimizer.products.param_groups
    assert {name: group[name] for name in RECOMMENDED} == RECOMMENDED
    (group,) = rankfold.build_optimizer(
        Language(), 0.25, geometry="fixed-quotient", momentum=0.5, damping=0.1
    ).products.param_groups
    changed = {"lr": 0.25, "geometry": "fixed-quotient", "momentum": 0.5, "damping": 0.1}
    changed["growth"] = 0.0  # which is not for products that start at zero
    assert {name: group[name] for name in {**RECOMMENDED, **changed}} == {**RECOMMENDED, **changed}


def test_grids_and_groups_of_grids_can_be_given() -> None:
    model = Language()
    both = rankfold.attention_grids(model)
    first = [grid for grid in both if str(grid.name).startswith("layers.0")]
    second = [grid for grid in both if grid not in first]
    one = rankfold.build_optimizer(model, grids=iter(first))
    assert set(held(one.products)) == {id(p) for grid in first for p in grid.params()}
    assert sorted(held(one)) == sorted(trainable(model))
    groups: list[dict[str, Any]] = [{"grids": iter(first), "lr": 0.5}, {"grids": second}]
    two = rankfold.build_optimizer(model, grids=groups)
    assert [g["lr"] for g in two.products.param_groups] == [0.5, RECOMMENDED["lr"]]
    assert sorted(held(two)) == sorted(trainable(model))


def test_a_model_of_products_alone() -> None:
    """The base optimizer has nothing to do until it is given something."""
    model = Toy()
    optimizer = rankfold.build_optimizer(model, grids=model.grids())
    assert sorted(held(optimizer)) == sorted(trainable(model))
    assert [len(part.param_groups) for part in optimizer.optimizers] == [1, 0]
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    model.loss(0).backward()
    extra.grad = torch.ones(3)
    optimizer.step()
    assert (extra < 1).all()


def test_adapters_are_trained_as_products() -> None:
    """And attention only where it is trained, too."""
    model = adapted()
    rankfold.full_rank_start_(model)
    optimizer = rankfold.build_optimizer(model)
    assert sorted(held(optimizer.products)) == sorted(trainable(model)) == sorted(held(optimizer))
    assert len(trainable(model)) == 8
    losses = []
    tokens = batch(0)
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# Base optimizers --------------------------------------------------------------------------------


def test_options_reach_the_base_optimizer() -> None:
    options: dict[str, Any] = {"betas": (0.5, 0.75), "weight_decay": 0.25, "foreach": True}
    optimizer = rankfold.build_optimizer(Language(), base_lr=0.5, base_options=options)
    base = optimizer.optimizers[1]
    assert type(base) is torch.optim.AdamW
    for group in base.param_groups:
        assert group["lr"] == 0.5
        assert group["betas"] == (0.5, 0.75)
        assert group["foreach"] is True
    unset = rankfold.build_optimizer(Language(), base="sgd").optimizers[1]
    assert type(unset) is torch.optim.SGD
    assert unset.param_groups[0]["lr"] == torch.optim.SGD([torch.zeros(1)]).defaults["lr"]


def test_vectors_do_not_decay_unless_asked() -> None:
    options = {"weight_decay": 0.25}
    optimizer = rankfold.build_optimizer(Language(), base_options=options)
    matrices, vectors = optimizer.optimizers[1].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert "norm.weight" in vectors["param_names"]
    alike = rankfold.build_optimizer(Language(), base_options=options, decay_vectors=True)
    (group,) = alike.optimizers[1].param_groups
    assert group["weight_decay"] == 0.25
    assert {p.dim() for p in group["params"]} == {1, 2}
    undecayed = rankfold.build_optimizer(Language(), base=torch.optim.Rprop).optimizers[1]
    (group,) = undecayed.param_groups
    assert "weight_decay" not in group


def test_muon_takes_hidden_matrices() -> None:
    for model, hidden, not_hidden in (
        (Language(), {"layers.0.linear1.weight"}, {"tokens.weight", "lm_head.weight"}),
        (Language(tied=True), {"layers.1.linear2.weight"}, {"tokens.weight"}),
        (
            llama(),
            {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"},
            {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"},
        ),
        (opt(), {"model.decoder.layers.0.fc1.weight"}, {"model.decoder.embed_positions.weight"}),
        (nested(), {"mixing", "decoder.linear1.weight"}, {"pos_embedding", "stem.weight", "scale"}),
    ):
        optimizer = rankfold.build_optimizer(model, base="muon")
        assert names_of(optimizer, "Muon") >= hidden
        assert names_of(optimizer, "AdamW") >= not_hidden
        assert {p.dim() for p in optimizer.optimizers[1].param_groups[0]["params"]} == {2}


def test_what_muon_takes_can_be_told() -> None:
    optimizer = rankfold.build_optimizer(
        Language(), base="muon", hidden=lambda name, param: "linear1" in name
    )
    expected = {f"layers.{k}.linear1.weight" for k in range(2)}
    assert names_of(optimizer, "Muon") == expected


def test_options_of_muon_and_its_adamw() -> None:
    chosen: dict[str, Any] = {"weight_decay": 0.5, "momentum": 0.75, "adamw": {"eps": 0.125}}
    optimizer = rankfold.build_optimizer(Language(), base="muon", base_lr=0.25, base_options=chosen)
    assert chosen["adamw"] == {"eps": 0.125}
    muon = group_of(optimizer, "layers.0.linear1.weight")
    adamw = group_of(optimizer, "tokens.weight")
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.25, 0.5, 0.75)
    assert muon["adjust_lr_fn"] == "match_rms_adamw"
    assert (adamw["lr"], adamw["weight_decay"], adamw["eps"]) == (0.25, 0.5, 0.125)
    optimizer = rankfold.build_optimizer(
        Language(),
        base="muon",
        base_lr=0.25,
        base_options={"adjust_lr_fn": "original", "adamw": {"lr": 0.0625}},
    )
    assert group_of(optimizer, "layers.0.linear1.weight")["adjust_lr_fn"] == "original"
    assert group_of(optimizer, "tokens.weight")["lr"] == 0.0625


@pytest.mark.parametrize(
    ("base", "lr"),
    [("adamw", 0.01), ("sgd", 0.2), ("muon", 0.01), (torch.optim.Adagrad, 0.03)],
)
def test_any_base_learns(base: Any, lr: float) -> None:
    model = Language()
    optimizer = rankfold.build_optimizer(model, base=base, base_lr=lr)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = sum(loss_of(model, step).item() for step in range(4))
    train(model, optimizer, [0, 1, 2, 3] * 6)
    assert sum(loss_of(model, step).item() for step in range(4)) < 0.8 * start
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())


# What is refused --------------------------------------------------------------------------------


def test_fused_weights_covered_in_part_are_refused_with_their_rows() -> None:
    model = Language()
    for pair, rows in (("vo", "0–23"), ("qk", "24–35")):
        grids = rankfold.attention_grids(model, pairs=pair)
        words = saying(
            f"rows {rows} of layers.0.self_attn.in_proj_weight; ",
            f"entries {rows} of layers.0.self_attn.in_proj_bias; ",
            "in no grid",
        )
        with pytest.raises(ValueError, match=words):
            rankfold.build_optimizer(model, grids=grids)
    stacked = nn.Linear(WIDTH, 8, bias=False)
    heads = [Factor(stacked.weight, axis=0, rank=2, start=k) for k in (0, 5)]
    with pytest.raises(ValueError, match=r"rows 2–4, 7 of weight"):
        rankfold.build_optimizer(stacked, grids=[Grid(heads[0], heads[1])])
    sideways = nn.Linear(6, WIDTH, bias=False)
    halves = [Factor(sideways.weight, axis=1, rank=2, start=k) for k in (0, 4)]
    with pytest.raises(ValueError, match=r"columns 2–3 of weight"):
        rankfold.build_optimizer(sideways, grids=[Grid(halves[0], halves[1])])


class Fused(nn.Module):
    """Rotated queries and keys beside values in one weight, as in GPT-NeoX; another layer not."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.rotated = nn.MultiheadAttention(WIDTH, 3)
        self.rotated.rotary_emb = nn.Identity()
        if plain:
            self.plain = nn.MultiheadAttention(WIDTH, 3)


def test_found_products_in_partly_covered_weights_go_to_the_base() -> None:
    model = Fused(plain=True)
    words = saying("rotated.vo cannot be", "rows 0–23 of rotated.in_proj_weight", "pairs=", "base")
    with pytest.warns(UserWarning, match=words):
        optimizer = rankfold.build_optimizer(model)
    assert names_of(optimizer, "RiemannianSGD") == {
        f"plain.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight")
    }
    assert names_of(optimizer, "AdamW") >= {"rotated.in_proj_weight", "rotated.out_proj.weight"}
    assert sorted(held(optimizer)) == sorted(trainable(model))


def test_products_are_left_out_until_none_is_in_a_partly_covered_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second weight is covered whole, but half of it by a grid that goes for its first."""
    weights = nn.ParameterList(torch.randn(8, 4) for _ in range(4))
    first, second = (Factor(weights[k], rank=2) for k in range(2))
    half = Factor(weights[1], rank=2, start=2)
    grids = [
        Grid(first, second, name="one"),
        Grid(half, Factor(weights[2], rank=2), name="two"),
        Grid(Factor(weights[2], rank=2, start=2), Factor(weights[3], rank=2), name="three"),
        Grid(Factor(weights[3], rank=2, start=2), nn.Parameter(torch.randn(3, 2)), name="four"),
    ]
    monkeypatch.setattr(rankfold.adapters, "attention_grids", lambda _, **__: grids)
    with pytest.raises(
        ValueError, match=saying("one, two, three, four cannot", "columns 2–3 of 0")
    ):
        rankfold.build_optimizer(weights)


def test_what_no_product_covers_is_not_said_to_be_in_one() -> None:
    """Rotated rows of latent attention are in no product, whatever pairs are asked for."""
    model = FAMILIES["deepseek-v3"].build()
    with pytest.raises(ValueError, match=saying("q_b_proj", "No product of the model")) as refused:
        rankfold.build_optimizer(model)
    assert "pairs=" not in str(refused.value)


def test_no_product_left_is_an_error() -> None:
    with pytest.raises(ValueError, match=saying("rotated.vo cannot be", "rows 0–23", "pairs=")):
        rankfold.build_optimizer(Fused(plain=False))


def test_other_refusals() -> None:
    model, other = Language(), Language()
    with pytest.raises(ValueError, match="not one of the model"):
        rankfold.build_optimizer(model, grids=rankfold.attention_grids(other))
    with pytest.raises(ValueError, match=saying("unknown base 'adam'", "adamw, muon, sgd")):
        rankfold.build_optimizer(model, base="adam")
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        rankfold.build_optimizer(model, base=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="hidden tells which weights are Muon's"):
        rankfold.build_optimizer(model, hidden=lambda *_: True)
    with pytest.raises(TypeError, match="a class of torch optimizers"):
        rankfold.build_optimizer(model, base=nn.Linear)  # type: ignore[arg-type]
    for no_model in (model.parameters(), [*model.parameters()]):
        with pytest.raises(TypeError, match="expected a model"):
            rankfold.build_optimizer(no_model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no attention products found in Linear"):
        rankfold.build_optimizer(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="rate"):
        rankfold.build_optimizer(model, rate=1)
    frozen = Language()
    grids = rankfold.attention_grids(frozen)
    frozen.layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen"):
        rankfold.build_optimizer(frozen, grids=grids)


def test_options_that_are_nobodys() -> None:
    model = Language()
    for name, words in (
        ("momentun", "is 'momentum' meant"),
        ("betas", "base_options={'betas': ...}"),
        ("eps", "base_options={'eps': ...}"),
    ):
        with pytest.raises(TypeError, match=saying(f"no option {name!r}", words)):
            rankfold.build_optimizer(model, **{name: 0.5})  # type: ignore[arg-type]
    for build in (rankfold.build_optimizer, rankfold.recommended):
        words = "unknown geometry 'fixed_quotient'; there are fixed-embedded"
        with pytest.raises(ValueError, match=saying(words)):
            build(model, geometry="fixed_quotient")
    with pytest.raises(ValueError, match=saying("base='muon'")):
        rankfold.build_optimizer(model, base=torch.optim.Muon)


def test_isometries_ask_for_orthonormal_factors() -> None:
    model = Language()
    options: dict[str, Any] = {"geometry": "isometry-quotient", "normalize": "metric"}
    with pytest.raises(ValueError, match=re.escape("rankfold.orthonormalize_(grids)")):
        rankfold.build_optimizer(model, **options)
    with pytest.warns(UserWarning, match="about to be trained"):
        rankfold.orthonormalize_(rankfold.attention_grids(model))
    train(model, rankfold.build_optimizer(model, **options), range(2))


# What it looks like -----------------------------------------------------------------------------


def test_shown_as_which_parameter_goes_where() -> None:
    model = Language()
    lines = repr(rankfold.build_optimizer(model, 0.5, base_lr=0.25)).splitlines()
    total = sum(p.numel() for p in model.parameters())
    assert lines[0] == f"CombinedOptimizer of {total:,} elements ("
    assert lines[1].startswith(
        "  [0] RiemannianSGD(geometry=fixed-quotient, lr=0.5, momentum=0.8, "
    )
    assert lines[1].endswith(": 4 grids of 12 members (6 at 8·lr and 4·lr), 1,224 elements")
    plain = repr(rankfold.build_optimizer(model, vo_rate=1.0, output_rate=1.0)).splitlines()
    assert plain[1].endswith(": 4 grids of 12 members, 1,224 elements")
    assert lines[2:5] == [
        "        layers.*.self_attn.in_proj_weight  ×2",
        "        layers.*.self_attn.in_proj_bias  ×2",
        "        layers.*.self_attn.out_proj.weight  ×2",
    ]
    assert "  [1] AdamW(lr=0.25, betas=(0.9, 0.999), weight_decay=0.01): 1,416 elements" in lines
    assert "        lm_head.weight" in lines
    unnamed = rankfold.CombinedOptimizer([torch.optim.SGD([torch.zeros(2, 3)])])
    assert "        (2, 3)" in repr(unnamed).splitlines()


def test_names_are_those_of_the_module_that_was_compiled() -> None:
    model = Language()
    layer: Any = torch.compile(model.layers[1], backend="eager")
    model.layers[1] = layer
    whole: Any = torch.compile(model, backend="eager")
    optimizer = rankfold.build_optimizer(whole)
    assert names_of(optimizer, "RiemannianSGD") | names_of(optimizer, "AdamW") == {
        name for name, _ in Language().named_parameters()
    }
    tensors: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in tensors]
    train(whole, optimizer, range(2))
    assert not any(torch.equal(x, y) for x, y in zip(before, tensors, strict=True))
