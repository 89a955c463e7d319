"""Muon on heads against torch's, and on pairs against its definition."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import _muon as theirs

from rankfold.lab import muon
from rankfold.lab.config import OptimizerConfig
from rankfold.lab.dion import Dion
from rankfold.lab.model import Decoder, ModelConfig
from rankfold.lab.muon import Muon, Whitened, sign
from rankfold.lab.optimizers import build
from rankfold.stacks import grad_of, itself
from rankfold.whitening import Manner

from .gauge import Member, members_read, move_along_gauge
from .lab_runs import killed_at, run, same_weights, small, write_corpus
from .test_tilt import tilted
from .watching import Deny, DenyReading, Watch

NAMES = ("muon", "whitened", "dion")
# Query heads, key/value heads, biases: single pairs, 2×1 grids, and a row of bias on some sides.
MODELS = [(4, 4, False), (4, 2, False), (4, 2, True)]
TOKENS = torch.arange(24).view(2, 12) % 11
LR, MOMENTUM, DECAY = 0.05, 0.9, 0.1


def decoder(
    heads: int = 4,
    kv_heads: int = 4,
    biases: bool = False,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    config = ModelConfig(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        width=16,
        head_width=4,
        feedforward=32,
        biases=biases,
        final_norm=True,
        weights="float32",
    )
    return Decoder(config, 11, seed=3).to(dtype)


def differentiate(model: Decoder) -> None:
    """Gradients in the model's own precision, which its loss in float32 would lose."""
    model.zero_grad()
    logits = model.logits(TOKENS)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()


def blocks(model: Decoder, of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """The m×r blocks of ``of(param)``, a row of bias below."""
    for grid in model.grids():
        for _, _, factor in grid.factors():
            found = factor.view_blocks(of(factor.param)[None])[0]
            if factor.bias is not None:
                found = torch.cat([found, factor.view_bias(of(factor.bias)[None])[0]], -2)
            yield from found.detach().clone()


def exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


# Muon --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 16), (7, 7), (5, 9)])
def test_signs_are_those_of_torch(shape: tuple[int, int]) -> None:
    """In a batch as one by one, but for sums in another order: nearer than bfloat16 is to exact."""
    torch.manual_seed(0)
    x = torch.randn(6, *shape) * torch.logspace(-3, 3, 6)[:, None, None]
    x[-1] = 0
    ours = sign(x)
    coefficients = (theirs.DEFAULT_A, theirs.DEFAULT_B, theirs.DEFAULT_C)
    single = torch.stack(
        [theirs._zeropower_via_newtonschulz(y, coefficients, 5, theirs.EPS) for y in x]
    )
    assert (ours - single).norm() < (ours - sign(x, torch.float64)).norm()
    assert not ours[-1].any()


def test_signs_are_near_one() -> None:
    u, _, vh = torch.linalg.svd(torch.randn(5, 12, 8, dtype=torch.float64), full_matrices=False)
    x = u * torch.logspace(0, -1.5, 8, dtype=torch.float64) @ vh
    values = torch.linalg.svdvals(sign(x, torch.float64))
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize(("tilt", "balance"), [(0.25, 0.0), (0.0, 0.5), (0.5, 1.0)])
def test_muon_with_a_tilt_takes_its_directions(tilt: float, balance: float) -> None:
    """The first step, of the gradients themselves: those of the definition, block by block."""
    model = decoder(4, 2, biases=True, dtype=torch.float64)
    before = list(blocks(model, itself))
    differentiate(model)
    gradients = list(blocks(model, grad_of))
    manner = Manner(1e-30, tilt, balance)
    ours = Muon(model.grids(), LR, momentum=0.0, weight_decay=0.0, masters=False, manner=manner)
    ours.step()
    for old, new, gradient in zip(before, blocks(model, itself), gradients, strict=True):
        wanted = tilted(gradient, 4, tilt, balance)
        scale = LR * math.sqrt(len(old) / 4)
        torch.testing.assert_close((old - new) / scale, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "biases"), MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_is_torchs_on_every_head(
    heads: int, kv_heads: int, biases: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps from the same gradients, of which each block is a parameter of its own to torch.

    Once with torch's iteration as it is, where a batch may be summed in another order: within what
    bfloat16 costs, some percent of the way. Once with both iterations in float32, which shows that
    all else is the same: five steps make rounding of the smallest singular values 485 times larger.
    """
    if dtype == torch.float32:
        monkeypatch.setattr(
            theirs, "_zeropower_via_newtonschulz", lambda x, *_: sign(x[None], dtype)[0]
        )
    model = decoder(heads, kv_heads, biases)
    start = list(blocks(model, itself))
    params = [nn.Parameter(x.clone()) for x in start]
    reference = torch.optim.Muon(params, LR, weight_decay=DECAY, momentum=MOMENTUM)
    ours = Muon(
        model.grids(),
        LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        masters=True,
        sign_dtype=dtype,
    )
    for step in range(5):
        differentiate(model)
        for param, gradient in zip(params, blocks(model, grad_of), strict=True):
            param.grad = gradient
        rate = LR / (step + 1)
        ours.set_lr(rate)
        reference.param_groups[0]["lr"] = rate
        ours.step()
        reference.step()
        share = 0.05 if dtype == torch.bfloat16 else 485 * 2**-24
        for found, wanted, first in zip(blocks(model, itself), params, start, strict=True):
            assert (found - wanted).norm() < share * (wanted - first).norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masters", [True, False])
def test_bfloat16_weights(name: str, masters: bool) -> None:
    """With masters it is float32, rounded; without, small steps are lost to rounding."""
    model = decoder(dtype=torch.bfloat16)
    wide = decoder().requires_grad_()
    wide.load_state_dict(model.state_dict())
    config = OptimizerConfig(name, lr=1e-6, momentum=MOMENTUM, weight_decay=DECAY, masters=masters)
    optimizers = [build(m, config)[0] for m in (model, wide)]
    before = [p.detach().clone() for p in model.attention_parameters()]
    for _ in range(200):
        differentiate(model)
        pairs = zip(model.parameters(), wide.parameters(), strict=True)
        for narrow, param in pairs:
            assert narrow.grad is not None
            param.grad = narrow.grad.float()
        for optimizer in optimizers:
            assert optimizer is not None
            optimizer.step()
    after = model.attention_parameters()
    if masters:
        assert all(map(torch.equal, after, (p.bfloat16() for p in wide.attention_parameters())))
        assert not all(map(torch.equal, after, before))
    else:
        big = [p.abs() > 0.1 for p in before]  # whose spacing in bfloat16 a step does not cross
        assert all(torch.equal(x[b], y[b]) for x, y, b in zip(after, before, big, strict=True))


# Pairs -------------------------------------------------------------------------------------------


def stacked(blocks: list[list[Tensor]]) -> Tensor:
    return torch.cat([rows for block in blocks for rows in block])


def products(model: Decoder) -> list[Tensor]:
    members = [member for grid in model.grids() for member in members_read(grid)]
    return [stacked(m.left) @ stacked(m.right).T for m in members]


@pytest.mark.parametrize(("heads", "kv_heads", "biases"), MODELS)
def test_pairs_do_not_notice_the_gauge(heads: int, kv_heads: int, biases: bool) -> None:
    """The same products from A S and B S⁻ᵀ as from A and B; Muon on heads takes other ones."""
    distance = {}
    for kind in (Whitened, Muon):
        found = []
        for moved in (False, True):
            model = decoder(heads, kv_heads, biases, dtype=torch.float64)
            members = [member for grid in model.grids() for member in members_read(grid)]
            if moved:
                move_along_gauge(members, torch.Generator().manual_seed(5))
            optimizer = kind(
                model.grids(),
                LR,
                momentum=MOMENTUM,
                weight_decay=DECAY,
                masters=True,
                sign_dtype=torch.float64,
            )
            for _ in range(3):
                differentiate(model)
                optimizer.step()
            found.append(products(model))
        pairs = zip(*found, strict=True)
        distance[kind] = max(float((x - y).norm() / x.norm()) for x, y in pairs)
    assert distance[Whitened] < 1e-9
    assert distance[Muon] > 1e-2


def inverse_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x.T @ x)
    return vectors * values.rsqrt() @ vectors.T


def reference_step(point: Member, gradient: Member, momenta: list[Tensor]) -> None:
    """The definition, on one member in place."""
    a, b = map(stacked, point)
    for side, own, other, grad, momentum in zip(
        point, (a, b), (b, a), map(stacked, gradient), momenta, strict=True
    ):
        momentum.mul_(MOMENTUM).add_((1 - MOMENTUM) * grad)
        nesterov = (1 - MOMENTUM) * grad + MOMENTUM * momentum
        root = inverse_root(other)
        new = (1 - LR * DECAY) * own - LR * exact(nesterov @ root, own.dtype) @ root
        rows = [part for block in side for part in block]
        for part, values in zip(rows, new.split([len(part) for part in rows]), strict=True):
            part.copy_(values)


@pytest.mark.parametrize(("heads", "kv_heads", "biases"), MODELS)
def test_pairs_follow_the_definition(
    heads: int, kv_heads: int, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with exact signs in place of the iteration's."""
    monkeypatch.setattr(muon, "sign", exact)
    model, dense = (decoder(heads, kv_heads, biases, dtype=torch.float64) for _ in range(2))
    for m in (model, dense):  # or all factors are orthonormal
        members = [member for grid in m.grids() for member in members_read(grid)]
        move_along_gauge(members, torch.Generator().manual_seed(5))
    optimizer = Whitened(model.grids(), LR, momentum=MOMENTUM, weight_decay=DECAY, masters=True)
    momenta = [[torch.zeros_like(stacked(side)) for side in member] for member in members]
    for _ in range(3):
        differentiate(model)
        optimizer.step()
        differentiate(dense)
        gradients = decoder(heads, kv_heads, biases, dtype=torch.float64)
        for param, gradient in zip(gradients.parameters(), dense.parameters(), strict=True):
            param.data.copy_(grad_of(gradient))
        slopes = [member for grid in gradients.grids() for member in members_read(grid)]
        for point, slope, momentum in zip(members, slopes, momenta, strict=True):
            reference_step(point, slope, momentum)
        for found, wanted in zip(model.parameters(), dense.parameters(), strict=True):
            assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_products_move_by_one(
    condition: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """‖D_A Bᵀ‖₂ = 1 with exact signs, but for the Gram matrix in float32, which costs κ²ε."""
    monkeypatch.setattr(muon, "sign", exact)
    model = decoder()
    scale = size * torch.logspace(0, -1, 4, base=condition)
    for grid in model.grids():
        for left, right in members_read(grid):
            for block in (*left, *right):  # orthonormal so far
                block[0].copy_(block[0] * scale)
    members = [member for grid in model.grids() for member in members_read(grid)]
    before = [[stacked(side).double() for side in member] for member in members]
    optimizer = Whitened(model.grids(), 1.0, momentum=0.0, weight_decay=0.0, masters=True)
    differentiate(model)
    moved = optimizer.plan.gather(grad_of)
    weights = optimizer.plan.gather(itself)
    directions = optimizer._directions(moved, weights)
    for (a, b), d_a, d_b in zip(before, *directions, strict=True):
        for direction, other in ((d_a, b), (d_b, a)):
            values = torch.linalg.svdvals(direction.double() @ other.T)[:4]
            assert (values - 1).abs().max() < 4 * condition**2 * 2**-23 + 1e-5


# Cost --------------------------------------------------------------------------------------------


VIEWS = {
    *("view", "_unsafe_view", "transpose", "slice", "expand", "unsqueeze", "unbind", "split"),
    *("split_with_sizes", "unfold", "select", "detach", "diagonal"),
}


def operations(name: str, heads: int, kv_heads: int, layers: int) -> Counter[str]:
    model = decoder(heads, kv_heads, layers=layers)
    optimizer, _ = build(model, OptimizerConfig(name, momentum=MOMENTUM))
    assert optimizer is not None
    differentiate(model)
    with Watch() as watch:
        optimizer.step()
    return Counter({n: k for n, k in watch.operations.items() if n.split(".")[1] not in VIEWS})


@pytest.mark.parametrize(("name", "most"), [("muon", 70), ("whitened", 120)])
def test_as_many_operations_for_many_heads_and_layers(name: str, most: int) -> None:
    single = [operations(name, heads, heads, layers) for heads, layers in ((2, 2), (8, 2), (2, 9))]
    shared = [operations(name, 3 * n, n, layers) for n, layers in ((2, 2), (8, 2), (2, 9))]
    for found in (single, shared):
        assert found[0] == found[1] == found[2]
        assert sum(found[0].values()) < most


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_nothing(name: str) -> None:
    model = decoder(4, 2, dtype=torch.bfloat16)
    optimizer, _ = build(model, OptimizerConfig(name, momentum=MOMENTUM), graph=True)
    assert optimizer is not None
    assert optimizer.capturable
    differentiate(model)
    with Deny(), DenyReading():
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_graph_has_recorded_stays_in_place(name: str) -> None:
    model = decoder(4, 2, dtype=torch.bfloat16)
    optimizer, _ = build(model, OptimizerConfig(name, momentum=MOMENTUM), graph=True)
    assert isinstance(optimizer, Muon)
    assert optimizer.masters is not None

    def addresses() -> list[int]:
        assert isinstance(optimizer.lr, Tensor)
        buffers = [*optimizer.momenta.values(), *(optimizer.masters or {}).values()]
        buffers += optimizer.bases if isinstance(optimizer, Dion) else []
        return [x.data_ptr() for x in (optimizer.lr, *buffers, *model.parameters())]

    before = addresses()
    kept = copy.deepcopy(optimizer.state_dict())
    differentiate(model)
    optimizer.set_lr(0.5)
    optimizer.step()
    assert float(optimizer.lr) == 0.5
    optimizer.load_state_dict(kept)
    assert addresses() == before
    assert not any(x.any() for x in optimizer.momenta.values())


# Runs --------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_they_learn(name: str, corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, optimizer__name=name, optimizer__lr=2.0**-5, optimizer__momentum=0.9)
    found = run(config, tmp_path / "run")
    still = run(small(corpus, optimizer__name="frozen"), tmp_path / "frozen")
    assert found.status == "finished"
    assert found.training.last_mean(5) < found.training.values[0] - 1
    assert found.training.last_mean(5) < still.training.last_mean(5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer__momentum": 0.9, "model__weights": "bfloat16"},
        {"optimizer__momentum": 0.5, "model__kv_heads": 1, "training__annealing": "cosine"},
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    name: str, options: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    config = small(corpus, training__keep_weights=True, optimizer__name=name, **options)
    whole = run(config, tmp_path / "whole")
    killed_at(config, tmp_path / "cut", 20)
    resumed = run(config, tmp_path / "cut")
    assert resumed.status == "finished"
    assert resumed.training.values == whole.training.values
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
