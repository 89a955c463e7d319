"""Parameters in any layout, on the modules that really use them.

Every case (see `layout_cases`) has its factors twice: as grids, and as slices written out by hand.
That a module multiplies the slices is shown by the gauge, which its output does not notice; that
the grids read them, by comparing the two; that a step writes them, by stepping plain m×r copies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import Factor, Grid
from rankfold.geometries import GEOMETRIES
from rankfold.stacks import Plan

from .gauge import Block, Member, members_read, move, move_along_gauge, random_gauge
from .layout_cases import CASES, HEADS, RANK, WIDTH, Case, Of, randn, randomized

Build = Callable[[], Case]
OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
ISOMETRIES = [name for name in GEOMETRIES if name.startswith("isometry")]
every_case = pytest.mark.parametrize("build", CASES.values(), ids=CASES)
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def value(param: Tensor) -> Tensor:
    return param.detach()


def gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def momentum_in(optimizer: rankfold.RiemannianSGD) -> Of:
    return lambda param: optimizer.state[param]["momentum"]


def flat(grids: Sequence[Sequence[Member]]) -> list[Block]:
    """All factors of all members, left before right."""
    return [block for members in grids for m in members for side in m for block in side]


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def prepare(geometry: str, grids: list[Grid]) -> None:
    if geometry in ISOMETRIES:
        with pytest.warns(UserWarning, match="singular values"):
            rankfold.orthonormalize_(grids)


# Reading -----------------------------------------------------------------------------------------


@every_case
def test_the_output_does_not_notice_the_gauge_of_the_slices(
    build: Build, generator: torch.Generator
) -> None:
    case = build()
    with torch.no_grad():
        before = case.output()
        for members in case.members(value):
            move_along_gauge(members, generator)
            assert difference(case.output(), before) <= 1e-10 * float(before.abs().max())


@every_case
def test_the_output_notices_every_factor(build: Build, generator: torch.Generator) -> None:
    """Without this the gauge would be invisible wherever a slice is not used at all."""
    case = build()
    with torch.no_grad():
        before = case.output()
        for block in flat(case.members(value)):
            kept = [part.clone() for part in block]
            move([block], random_gauge(block[0].shape[1], generator))
            assert difference(case.output(), before) > 1e-3
            for part, old in zip(block, kept, strict=True):
                part.copy_(old)
        assert torch.equal(case.output(), before)


@every_case
def test_factors_read_the_slices_in_order(build: Build) -> None:
    case = build()
    by_hand = case.members(value)
    read = [members_read(grid) for grid in case.grids]
    assert [len(members) for members in read] == [len(members) for members in by_hand]
    for here, there in zip(flat(read), flat(by_hand), strict=True):
        for a, b in zip(here, there, strict=True):
            # The same elements of the same memory, not only the same numbers.
            assert a.shape == b.shape
            for corner in ((0, 0), (-1, 0), (0, -1)):
                assert a[corner].data_ptr() == b[corner].data_ptr()


def _wrong_layouts() -> dict[str, tuple[str, Callable[[Any], Grid]]]:
    """For a case and its module, a grid that is not the module's product, one mistake each."""
    heads: dict[str, Any] = {"rank": RANK, "blocks": HEADS}

    def interleaved(m: Any) -> Grid:
        w, stride = m.in_proj_weight, 3 * RANK
        left = Factor(w, axis=0, **heads, stride=stride)
        return Grid(left, Factor(w, axis=0, **heads, start=RANK, stride=stride), groups=HEADS)

    def contiguous(m: Any) -> Grid:
        layer = m.gpt_neox.layers[0].attention.query_key_value
        left = Factor(layer.weight, axis=0, **heads, bias=layer.bias)
        right = Factor(layer.weight, axis=0, **heads, start=WIDTH, bias=layer.bias)
        return Grid(left, right, groups=HEADS)

    def conv_axis(m: Any) -> Grid:
        layer = m.transformer.h[0].attn
        left = Factor(layer.c_proj.weight, axis=1, blocks=HEADS)
        right = Factor(
            layer.c_attn.weight, axis=1, **heads, start=2 * WIDTH, bias=layer.c_attn.bias
        )
        return Grid(left, right, groups=HEADS)

    def spread_groups(m: Any) -> Grid:
        heads = [Factor(m.q.weight, axis=0, start=h * RANK, rank=RANK) for h in (0, 2, 1, 3)]
        return Grid(heads, Factor(m.k.weight, axis=0, blocks=2), groups=2)

    def without_bias(m: Any) -> Grid:
        return Grid(
            Factor(m.q.weight, axis=0, blocks=3), Factor(m.k.weight, axis=0, blocks=3), groups=3
        )

    def one_off(m: Any) -> Grid:
        left = Factor(m.q.weight, axis=0, start=1, rank=RANK, blocks=2)
        return Grid(left, Factor(m.k.weight, axis=0, start=1, rank=RANK, blocks=2), groups=2)

    def axis(m: Any) -> Grid:
        return Grid(
            Factor(m.q.weight, axis=1, blocks=3), Factor(m.k.weight, axis=1, blocks=3), groups=3
        )

    def start(m: Any) -> Grid:
        w = m.in_proj_weight
        return Grid(
            Factor(w, axis=0, **heads), Factor(w, axis=0, **heads, start=2 * WIDTH), groups=HEADS
        )

    def one_member(m: Any) -> Grid:
        return Grid(Factor(m.up, blocks=2), Factor(m.down, axis=3, rank=RANK), groups=6)

    return {
        "axis": ("linear", axis),
        "axis-of-conv1d": ("gpt2", conv_axis),
        "axis-of-stack": ("experts", one_member),
        "start": ("multihead", start),
        "start-inside-a-head": ("linear", one_off),
        "stride-for-contiguous": ("multihead", interleaved),
        "no-stride-for-interleaved": ("gpt-neox", contiguous),
        "heads-dealt-round-robin": ("linear-grouped", spread_groups),
        "bias-left-behind": ("linear-bias", without_bias),
    }


@pytest.mark.parametrize(("name", "wrong"), _wrong_layouts().values(), ids=_wrong_layouts())
def test_the_output_notices_a_wrong_layout(
    name: str, wrong: Callable[[Any], Grid], generator: torch.Generator
) -> None:
    case = CASES[name]()
    with torch.no_grad():
        before = case.output()
        move_along_gauge(members_read(wrong(case.module)), generator)
        assert difference(case.output(), before) > 1e-2


# Writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["fixed-embedded", "isometry-quotient"])
@every_case
def test_steps_are_those_of_plain_copies(build: Build, geometry: str) -> None:
    case = build()
    prepare(geometry, case.grids)
    optimizer = rankfold.RiemannianSGD(case.grids, geometry=geometry, **OPTIONS)
    copies = [nn.Parameter(torch.cat(block)) for block in flat(case.members(value))]
    unused = iter(copies)
    separate = []
    for members in case.members(value):
        for left, right in members:
            grid = Grid([next(unused) for _ in left], [next(unused) for _ in right])
            separate.append(rankfold.RiemannianSGD([grid], geometry=geometry, **OPTIONS))
    there = [(param, param.data_ptr()) for param in case.params()]
    start = [c.detach().clone() for c in copies]
    for _ in range(3):
        case.backward()
        for twin, block in zip(copies, flat(case.members(gradient)), strict=True):
            twin.grad = torch.cat(block)
        for other in (optimizer, *separate):
            other.step()
        for twin, block in zip(copies, flat(case.members(value)), strict=True):
            assert difference(torch.cat(block), twin.detach()) <= 1e-12
    assert all(difference(c.detach(), s) > 1e-4 for c, s in zip(copies, start, strict=True))
    momenta = {c: other.state[c]["momentum"] for other in separate for c in other.state}
    for twin, block in zip(copies, flat(case.members(momentum_in(optimizer))), strict=True):
        assert difference(torch.cat(block), momenta[twin]) <= 1e-12 * float(momenta[twin].norm())
    for (before, pointer), after in zip(there, case.params(), strict=True):
        assert before is after
        assert after.data_ptr() == pointer


def _each_grid_alone() -> dict[str, tuple[Build, int]]:
    sizes = {name: 4 if name == "gpt2" else 1 if name == "ragged" else 2 for name in CASES}
    return {f"{n}-{k}": (build, k) for n, build in CASES.items() for k in range(sizes[n])}


@pytest.mark.parametrize(("build", "k"), _each_grid_alone().values(), ids=_each_grid_alone())
def test_nothing_outside_the_grid_is_touched(build: Build, k: int) -> None:
    case = build()
    grid = case.grids[k]
    covered: dict[Tensor, Tensor] = {}
    covered |= {param: torch.zeros(param.shape, dtype=torch.bool) for param in case.params()}
    for block in flat([case.members(covered.__getitem__)[k]]):
        for part in block:
            part.fill_(True)
    assert {p for p, mask in covered.items() if mask.any()} == set(grid.params())
    optimizer = rankfold.RiemannianSGD([grid], geometry="fixed-embedded", **OPTIONS)
    case.backward()
    # Values that any arithmetic would spread or change.
    strange = torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=torch.float64)
    for param, mask in covered.items():
        outside = (~mask).sum()
        param.data[~mask] = strange.repeat(int(outside) // 4 + 1)[:outside]
        gradient(param)[~mask] = math.nan
    before = {param: param.detach().clone() for param in covered}
    for _ in range(3):
        optimizer.step()
    for param, mask in covered.items():
        bits, old_bits = (x.detach().view(torch.int64) for x in (param, before[param]))
        assert torch.equal(bits[~mask], old_bits[~mask])
        assert param.detach()[mask].isfinite().all()
        assert (param in optimizer.state) == bool(mask.any())
        if mask.any():
            assert (bits[mask] != old_bits[mask]).all()
            momentum = optimizer.state[param]["momentum"]
            assert momentum.shape == param.shape
            assert not momentum[~mask].any()
            assert momentum[mask].all()


def test_nothing_outside_the_grid_is_touched_in_bfloat16() -> None:
    """There the parameter is written from a float32 master, the part no grid covers with it."""
    module: Any = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.bfloat16)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    strange = torch.tensor([-0.0, math.inf, 1e-40, 1 / 3], dtype=torch.bfloat16)
    for param, seed in ((weight, 1), (bias, 2)):
        param.data.copy_(randn(*param.shape, seed=seed))
        param.data[2 * WIDTH :] = strange.repeat(WIDTH // 4).view(-1, *[1] * (param.dim() - 1))
    grids = rankfold.attention_grids(module, pairs="qk")
    optimizer = rankfold.RiemannianSGD(grids, geometry="fixed-quotient", **OPTIONS)
    before = [param.detach().clone() for param in (weight, bias)]
    q, k, q_bias, k_bias = (x.detach()[i * WIDTH :][:WIDTH] for x in before for i in (0, 1))
    for _ in range(3):
        # Of Σ_h tr(Q_h K_hᵀ) with the biases as rows: each side's gradient is the other side.
        weight.grad = torch.cat([k, q, torch.full_like(q, math.nan)])
        bias.grad = torch.cat([k_bias, q_bias, torch.full_like(q_bias, math.nan)])
        optimizer.step()
    for param, old in zip((weight, bias), before, strict=True):
        bits, old_bits = (x.detach().view(torch.int16) for x in (param, old))
        assert torch.equal(bits[2 * WIDTH :], old_bits[2 * WIDTH :])
        assert (bits[: 2 * WIDTH] != old_bits[: 2 * WIDTH]).float().mean() > 0.5


# Batches -----------------------------------------------------------------------------------------


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    return randomized(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)).train()


def train(model: Any, optimizers: Sequence[rankfold.RiemannianSGD]) -> None:
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(model(randn(2, 5, WIDTH)).sin().sum())
        for optimizer in optimizers:
            optimizer.step()


def assert_same(one: Any, other: Any, start: Any) -> None:
    """Equal parameters, and not because nothing has moved."""
    parts = zip(one.named_parameters(), other.parameters(), start.parameters(), strict=True)
    for (name, a), b, c in parts:
        assert difference(a, b) <= 1e-12
        if "proj_weight" in name:
            assert difference(a, c) > 1e-3


@every_geometry
def test_a_batch_and_a_loop_agree(geometry: str) -> None:
    batch = encoder()
    prepare(geometry, rankfold.attention_grids(batch))
    loop, start = copy.deepcopy(batch), copy.deepcopy(batch)
    grids = rankfold.attention_grids(batch)
    train(batch, [rankfold.RiemannianSGD(grids, geometry=geometry, **OPTIONS)])
    layers = [rankfold.attention_grids(layer) for layer in loop.layers]
    train(loop, [rankfold.RiemannianSGD(g, geometry=geometry, **OPTIONS) for g in layers])
    assert_same(batch, loop, start)


@every_geometry
def test_many_layouts_in_one_optimizer(geometry: str) -> None:
    """Grids of one shape from different layouts share a stack: fused, separate and transposed."""
    together, apart = ([build() for build in CASES.values()] for _ in range(2))
    for cases in (together, apart):
        prepare(geometry, [grid for case in cases for grid in case.grids])
    grids = [grid for case in together for grid in case.grids]
    plan = Plan([(str(k), grid) for k, grid in enumerate(grids)])
    assert max(len(stack.sources) for stack in plan.stacks) >= 4
    one = rankfold.RiemannianSGD(grids, geometry=geometry, **OPTIONS)
    many = [rankfold.RiemannianSGD(case.grids, geometry=geometry, **OPTIONS) for case in apart]
    for _ in range(3):
        for case in (*together, *apart):
            case.backward()
        for optimizer in (one, *many):
            optimizer.step()
    for here, there in zip(together, apart, strict=True):
        for a, b in zip(here.params(), there.params(), strict=True):
            assert difference(a, b) <= 1e-12


@every_geometry
@pytest.mark.parametrize("order", [(2, 0, 1, 3), (3, 2, 1, 0), (0, 2, 3, 1), (0, 2)])
def test_parameters_in_uneven_order(geometry: str, order: tuple[int, ...]) -> None:
    """The fused weights lie in the order of the first grids; the others take them in another."""
    shuffled = encoder()
    prepare(geometry, rankfold.attention_grids(shuffled))
    plain, start = copy.deepcopy(shuffled), copy.deepcopy(shuffled)

    def grids(model: Any) -> tuple[list[Grid], list[Grid]]:
        found = rankfold.attention_grids(model)
        return found[0::2], found[1::2]

    first, second = grids(shuffled)
    listed = first + [second[k] for k in order]
    plan = Plan([(str(grid.name), grid) for grid in listed])
    kinds = {type(s.right[0].weight.positions) for stack in plan.stacks for s in stack.sources}
    assert kinds == ({slice} if order == (0, 2) else {slice, Tensor})
    train(shuffled, [rankfold.RiemannianSGD(listed, geometry=geometry, **OPTIONS)])
    qk, vo = grids(plain)
    pairs = [[g, vo[k]] if k in order else [g] for k, g in enumerate(qk)]
    train(plain, [rankfold.RiemannianSGD(pair, geometry=geometry, **OPTIONS) for pair in pairs])
    assert_same(shuffled, plain, start)


def test_a_bias_wider_than_its_weight_keeps_its_precision() -> None:
    q, k = nn.Linear(8, 6), nn.Linear(8, 6)
    for linear in (q, k):
        linear.bias = nn.Parameter(torch.linspace(0.1, 0.7, 6, dtype=torch.float64) / 3)
    grid = Grid(
        Factor(q.weight, axis=0, blocks=2, bias=q.bias),
        Factor(k.weight, axis=0, blocks=2, bias=k.bias),
        groups=2,
    )
    before = [p.detach().clone() for p in grid.params()]
    for param in grid.params():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="inconsistent"):
        rankfold.RiemannianSGD([grid], 0.0, geometry="fixed-quotient").step()
    assert all(torch.equal(p, q) for p, q in zip(grid.params(), before, strict=True))
