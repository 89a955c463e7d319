"""The language model of the laboratory: the paper's to the letter, and exact where it must be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankfold
from rankfold.checks import orthonormality_defect
from rankfold.geometries import GEOMETRIES
from rankfold.lab.model import MODEL_PRESETS, Decoder, ModelConfig, aligned_logits, rotate

from .gauge import members_read, move_along_gauge

VOCABULARY = 50
TINY = MODEL_PRESETS["tiny"]
PLAIN = [
    TINY,
    MODEL_PRESETS["tiny-gqa"],
    replace(TINY, kv_heads=2, head_width=24),
    replace(TINY, kv_heads=2, biases=True, learned_norms=True),
]
BENT = [replace(TINY, rope=True), replace(TINY, qk_norm=True)]


def some_tokens(batch: int = 3, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


def decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    return Decoder(config, VOCABULARY, seed=seed)


def roughened(config: ModelConfig) -> Decoder:
    """A model in float64 with every weight off its start, so that no bias is zero."""
    model = decoder(config).double()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.1)
    return model


def sizes(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def change_along_gauge(model: Decoder, pair: str) -> float:
    """Relative change of the logits when the grids of this pair move along their gauge."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        before = model.logits(some_tokens())
        for grid in model.grids():
            assert grid.name is not None
            if grid.name.endswith(pair):
                move_along_gauge(members_read(grid), generator)
        return float((model.logits(some_tokens()) - before).norm() / before.norm())


@pytest.mark.parametrize(("preset", "kv_heads"), [("paper-mha", 8), ("paper-gqa", 1)])
def test_the_papers_models_have_the_papers_sizes(preset: str, kv_heads: int) -> None:
    model = decoder(MODEL_PRESETS[preset])
    attention = 2 * 512 * (8 * 64) + 2 * 512 * (kv_heads * 64)
    feedforward = 2 * 512 * 2048
    assert sizes(model) == 6 * (attention + feedforward) + 2 * VOCABULARY * 512
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dim() for p in model.parameters()} == {2}
    assert [g.name for g in model.grids()] == [
        f"layer{i}.{p}" for i in range(6) for p in ("qk", "vo")
    ]
    assert {(g.groups, g.lefts, g.rights, g.rank) for g in model.grids()} == {
        (kv_heads, 8 // kv_heads, 1, 64)
    }
    assert model.logits(some_tokens()).shape == (3, 12, VOCABULARY)
    loss = model(some_tokens())
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    # Nothing norms the input of the unembedding, so logits of variance 1.3 add half of that.
    assert -0.2 < loss.item() - math.log(VOCABULARY) < 1.2


def test_all_options_together() -> None:
    config = replace(
        TINY, kv_heads=2, head_width=24, biases=True, rope=True, qk_norm=True, learned_norms=True
    )
    inner, shared = 4 * 24, 2 * 24
    weights = 2 * 64 * inner + 2 * 64 * shared + 2 * 64 * 256
    biases = inner + 2 * shared + 64 + 256 + 64
    norms = 2 * 64 + 2 * 24
    model = decoder(config)
    assert sizes(model) == 2 * (weights + biases + norms) + 64 + 2 * VOCABULARY * 64
    model(some_tokens()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("config", [*PLAIN, *BENT])
def test_the_first_loss_is_that_of_guessing(config: ModelConfig) -> None:
    assert abs(decoder(config)(some_tokens()).item() - math.log(VOCABULARY)) < 0.5


@pytest.mark.parametrize("config", [*PLAIN, *BENT])
def test_later_tokens_do_not_change_earlier_predictions(config: ModelConfig) -> None:
    model, tokens = roughened(config), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_the_loss_is_the_mean_over_all_next_tokens() -> None:
    model, tokens = decoder(TINY), some_tokens()
    logits = model.logits(tokens)
    losses = [
        logits[b, t].logsumexp(0) - logits[b, t, tokens[b, t + 1]]
        for b in range(tokens.shape[0])
        for t in range(tokens.shape[1] - 1)
    ]
    torch.testing.assert_close(model(tokens), torch.stack(losses).mean())


def test_the_model_is_the_one_written_out_by_hand() -> None:
    """One layer, one sequence, one head and one row of scores at a time."""
    config = replace(TINY, layers=1, kv_heads=2, final_norm=False)
    model, tokens = roughened(config), some_tokens(batch=1)
    weights = dict(model.named_parameters())

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()

    def part(name: str) -> Tensor:
        return weights[f"layers.0.attention.{name}.weight"]

    x = weights["embedding.weight"][tokens[0]]
    y, added = normed(x), torch.zeros_like(x)
    for head in range(4):
        own, shared = (
            slice(16 * head, 16 * head + 16),
            slice(16 * (head // 2), 16 * (head // 2) + 16),
        )
        scores = (y @ part("q")[own].T) @ (y @ part("k")[shared].T).T / 4
        for t in range(len(x)):
            mixed = scores[t, : t + 1].softmax(0) @ (y @ part("v")[shared].T)[: t + 1]
            added[t] += part("o")[:, own] @ mixed
    x = x + added
    up, down = weights["layers.0.up.weight"], weights["layers.0.down.weight"]
    x = x + (normed(x) @ up.T).clamp_min(0) ** 2 @ down.T
    torch.testing.assert_close(model.logits(tokens)[0], x @ weights["unembedding.weight"].T)


def test_norms_of_small_inputs_are_the_same_in_bfloat16() -> None:
    """An epsilon of bfloat16's own precision would swallow a fresh embedding."""
    layer = Decoder(replace(TINY, layers=1), 50257).layers[0]
    x = torch.full((1, 64), 0.0026, dtype=torch.bfloat16)
    out = layer.get_submodule("attention_norm")(x)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.02, atol=0)


@pytest.mark.parametrize("pair", ["qk", "vo"])
@pytest.mark.parametrize("config", PLAIN)
def test_logits_depend_on_products_alone(config: ModelConfig, pair: str) -> None:
    assert change_along_gauge(roughened(config), pair) < 1e-12


@pytest.mark.parametrize("config", BENT)
def test_positions_and_norms_between_queries_and_keys_bend_their_products(
    config: ModelConfig,
) -> None:
    assert change_along_gauge(roughened(config), "vo") < 1e-12
    assert change_along_gauge(roughened(config), "qk") > 1e-3


def test_rotated_products_depend_on_distance() -> None:
    generator = torch.Generator().manual_seed(8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)
    scores = (rotate(q.expand(1, 1, 6, 8)) @ rotate(k.expand(1, 1, 6, 8)).mT)[0, 0]
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[0, 0], (q * k).sum())
    assert scores[0].diff().abs().min() > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_repeated_keys_and_values(kv_heads: int) -> None:
    grouped = roughened(replace(TINY, kv_heads=kv_heads, biases=True))
    repeated = roughened(replace(TINY, biases=True))
    state = grouped.state_dict()
    for name, value in state.items():
        if ".k." in name or ".v." in name:
            heads = value.unflatten(0, (kv_heads, 16))
            state[name] = heads.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    torch.testing.assert_close(repeated.logits(some_tokens()), grouped.logits(some_tokens()))


@pytest.mark.parametrize(
    ("name", "domain"),
    [("embedding", VOCABULARY), ("unembedding", 64), ("layers.1.up", 64), ("layers.1.down", 256)],
)
def test_matrices_start_uniform_by_their_domain(name: str, domain: int) -> None:
    weight, bound = decoder(TINY).get_parameter(f"{name}.weight"), domain**-0.5
    assert 0.99 * bound < weight.max() <= bound
    assert -bound <= weight.min() < -0.99 * bound
    assert abs(weight.mean()) < 0.05 * bound
    assert abs(weight.square().mean() / (bound**2 / 3) - 1) < 0.1


def test_biases_start_at_zero_and_scales_at_one() -> None:
    model = decoder(replace(TINY, biases=True, learned_norms=True, qk_norm=True))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.testing.assert_close(p, torch.zeros_like(p), rtol=0, atol=1e-12)
        elif "norm" in name:
            assert (p == 1).all()


def test_a_seed_decides_the_weights_and_nothing_else_does() -> None:
    config = replace(TINY, kv_heads=2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = decoder(config)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = decoder(config), decoder(config, seed=1)
    rounded = decoder(replace(config, weights="bfloat16"))
    biased = dict(decoder(replace(config, biases=True)).named_parameters())
    for (name, p), same, different, low in zip(
        first.named_parameters(),
        again.parameters(),
        other.parameters(),
        rounded.parameters(),
        strict=True,
    ):
        assert torch.equal(p, same)
        assert torch.equal(p.bfloat16(), low)
        assert not torch.isclose(p, different).any(1).all()
        torch.testing.assert_close(p, biased[name])


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [*PLAIN, *BENT])
def test_factors_start_orthonormal(config: ModelConfig, weights: str) -> None:
    tolerance = 2e-6 if weights == "float32" else 2e-2
    for grid in decoder(replace(config, weights=weights)).grids():
        for left, right in members_read(grid):
            for block in (*left, *right):
                assert orthonormality_defect(torch.cat(block)) < tolerance


@pytest.mark.parametrize("config", [*PLAIN, *BENT])
def test_every_parameter_is_in_one_list(config: ModelConfig) -> None:
    model = decoder(config)
    attention, others = model.attention_parameters(), model.other_parameters()
    listed = [id(p) for p in (*attention, *others)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters()}
    names = {name for name, p in model.named_parameters() if any(p is q for q in attention)}
    kinds = ["weight", "bias"] if config.biases else ["weight"]
    wanted = {
        f"layers.{i}.attention.{x}.{kind}" for i in range(2) for x in "qkvo" for kind in kinds
    }
    assert names == {name for name in wanted if not name.endswith("o.bias")}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("config", [TINY, MODEL_PRESETS["tiny-gqa"], replace(TINY, biases=True)])
def test_a_step_lowers_the_loss(config: ModelConfig, geometry: str) -> None:
    model, tokens = decoder(config), some_tokens()
    optimizers = (
        rankfold.RiemannianSGD(model.grids(), lr=0.02, geometry=geometry),
        torch.optim.AdamW(model.other_parameters(), lr=1e-3),
    )
    losses = [model(tokens)]
    losses[0].backward()
    for optimizer in optimizers:
        optimizer.step()
        losses.append(model(tokens))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"feedforward": -1}, "feedforward must be at least 1"),
        ({"width": 8}, "head_width must be at most width"),
        ({"rope": True, "head_width": 15}, "rope needs an even head_width"),
        ({"weights": "float16"}, "weights must be one of bfloat16, float32"),
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary must be at least 1"):
        Decoder(TINY, 0)
    with pytest.raises(ValueError, match="2 or more tokens"):
        decoder(TINY)(some_tokens(length=1))


@pytest.mark.parametrize("vocabulary", [1, 50, 64, 65])
def test_wider_logits_predict_the_same(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(3, 12, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, 16, generator=generator, dtype=torch.float64)
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (36,), generator=generator)

    def gradients(logits: Tensor) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(logits.flatten(0, 1), targets)
        return (loss, *torch.autograd.grad(loss, (x, weight)))

    wider = aligned_logits(x, weight)
    assert wider.shape == (3, 12, 128 if vocabulary == 65 else 64)
    torch.testing.assert_close(gradients(wider), gradients(x @ weight.T), rtol=1e-12, atol=1e-14)
