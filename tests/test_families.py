"""Every family on a small model of its real class: products found are products computed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rankfold import RiemannianSGD, attention_grids, inspect

from .families import FAMILIES, Family, output_of
from .gauge import members_read, move, move_along_gauge, random_gauge
from .layout_cases import randomized

# Weights are float64, but many of these models take norms and softmaxes in float32.
UNMOVED, MOVED = 1e-6, 1e-4


EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
BENT = {name: family for name, family in FAMILIES.items() if family.bent}
EXACT = {name: family for name, family in FAMILIES.items() if family.exact}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Models are built on a fixed seed of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def change(output: Tensor, before: Tensor) -> float:
    return float((output - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("family", EXACT.values(), ids=EXACT)
def test_what_is_found_is_what_the_model_computes(
    family: Family, generator: torch.Generator
) -> None:
    model = randomized(family.build())
    output = output_of(model)
    grids = attention_grids(model)
    assert sorted({str(g.name).rpartition(".")[2] for g in grids}) == family.exact
    with torch.no_grad():
        before = output()
        for grid in grids:
            members = members_read(grid)
            kept = [[p.clone() for p in block] for m in members for side in m for block in side]
            move_along_gauge(members, generator)
            assert change(output(), before) <= UNMOVED, grid.name
            # One factor alone is noticed, so that the line above could have failed.
            move(members[-1].left[-1:], random_gauge(grid.rank, generator))
            assert change(output(), before) > MOVED, grid.name
            blocks = [block for m in members for side in m for block in side]
            for block, old in zip(blocks, kept, strict=True):
                for part, value in zip(block, old, strict=True):
                    part.copy_(value)


@pytest.mark.parametrize("family", BENT.values(), ids=BENT)
def test_what_is_left_out_is_bent_and_says_why(family: Family, generator: torch.Generator) -> None:
    model = randomized(family.build())
    output = output_of(model)
    for pair, word in family.bent.items():
        reasons = {p.reason for p in inspect(model).skipped if p.kind == pair}
        assert reasons
        assert all(re.search(word, str(reason)) for reason in reasons), reasons
        with torch.no_grad():
            before = output()
            for grid in attention_grids(model, pairs=pair):
                move_along_gauge(members_read(grid), generator)
                assert change(output(), before) > MOVED, grid.name
                before = output()


@EVERY
def test_gradients_agree_where_the_product_is_exact_and_nowhere_else(family: Family) -> None:
    model = randomized(family.build())
    output = output_of(model)
    seen = inspect(model, lambda: output().sin().sum())
    assert {product.kind for product in seen.found} == set(family.exact)
    for product in seen.found:
        assert product.inconsistency is not None
        assert product.inconsistency < 1e-5, product
    for product in seen.skipped:
        if product.grid is not None:
            assert product.inconsistency is not None
            assert product.inconsistency > 1e-2, product


@pytest.mark.parametrize("family", EXACT.values(), ids=EXACT)
def test_one_step_lowers_the_loss(family: Family) -> None:
    model = randomized(family.build())
    output = output_of(model)
    target = output().detach().roll(1)
    optimizer = RiemannianSGD(attention_grids(model), lr=1e-4, geometry="fixed-quotient")

    def loss() -> Tensor:
        return (output() - target).square().mean()

    before = loss()
    torch.autograd.backward(before)
    optimizer.step()
    assert loss().item() < before.item()
