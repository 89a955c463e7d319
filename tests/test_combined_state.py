"""The state of a CombinedOptimizer: shared with its parts, saved, loaded and copied as one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rankfold
from rankfold import CombinedOptimizer

from .test_combined import BASES, build, schedule
from .toys import clones, same_bits, unchanged
from .whole_models import ZOO, Language, train


def through_a_file(saved: Any) -> Any:
    """Saved, and loaded by the loader that refuses everything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("base", BASES)
def test_bfloat16_weights(base: str) -> None:
    """Masters and momenta of products are float32, and still are after loading."""
    model = Language().bfloat16()
    optimizer = build(model, base)
    train(model, optimizer, range(2))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = Language(seed=1).bfloat16()
    second = build(twin, base)
    twin.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    for part in second.products.param_groups[0]["params"]:
        state = second.state[part]
        assert {x.dtype for x in state.values()} == {torch.float32}
        assert state.keys() == {"master", "momentum"}
    for step in range(2, 5):
        train(model, optimizer, [step])
        train(twin, second, [step])
        assert same_bits(model.parameters(), twin.parameters())


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["language", "tied", "half frozen", "compiled"])
def test_continuation_is_bit_identical(name: str, base: str) -> None:
    """From a file, into a fresh model and an optimizer built with other learning rates."""
    model, twin = ZOO[name](), ZOO[name]()
    optimizer = build(model, base)
    scheduler = schedule(optimizer)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    saved = through_a_file([x.state_dict() for x in (model, optimizer, scheduler)])
    second = rankfold.build_optimizer(twin, 0.5, base=base)
    later = schedule(second)
    twin.load_state_dict(saved[0])
    later.load_state_dict(saved[2])
    second.load_state_dict(saved[1])
    start = clones(twin)
    for step in range(3, 6):
        for each, its, clock in ((model, optimizer, scheduler), (twin, second, later)):
            train(each, its, [step])
            clock.step()
        assert same_bits(model.parameters(), twin.parameters())
    moved = [not torch.equal(x, y) for x, y in zip(start, twin.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in twin.parameters()]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(optimizer.state.get(p, {}).values(), second.state.get(q, {}).values())


def test_state_dict_is_torchs_form() -> None:
    """Numbered through, groups in order, nothing but tensors and plain values."""
    model = Language()
    optimizer = build(model, "muon")
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    assert numbers == list(range(len(list(model.parameters()))))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        assert saved["state"][number] is optimizer.state[param]
    for group in saved["param_groups"]:
        assert group.get("grids") is None
        assert group.get("grid_names") is None
    kinds = [group["optimizer"] for group in saved["param_groups"]]
    assert kinds == ["RiemannianSGD", "Muon", "AdamW", "AdamW"]
    through_a_file(saved)


def test_state_is_shared_with_the_parts() -> None:
    model = Language()
    optimizer = build(model)
    assert not optimizer.state
    assert model.norm.weight not in optimizer.state
    assert optimizer.state.get(model.norm.weight) is None
    assert not optimizer.state  # asking has left nothing behind
    train(model, optimizer, [0])
    assert len(optimizer.state) == len(list(model.parameters())) == len(list(optimizer.state))
    products, base = optimizer.optimizers
    fused = model.get_parameter("layers.0.self_attn.in_proj_weight")
    assert optimizer.state[fused] is products.state[fused]
    assert optimizer.state[model.norm.weight] is base.state[model.norm.weight]
    for param, state in optimizer.state.items():  # as frameworks move states between devices
        optimizer.state[param] = {key: value.clone() for key, value in state.items()}
    assert optimizer.state[fused] is products.state[fused]
    del optimizer.state[model.norm.weight]
    assert model.norm.weight not in base.state
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.zeros(1))]


def test_loading_keeps_the_parts_and_shares_their_groups() -> None:
    model = Language()
    optimizer = build(model)
    train(model, optimizer, range(2))
    twin = Language()
    second = build(twin)
    parts, products = list(second.optimizers), second.products
    second.load_state_dict(optimizer.state_dict())
    assert second.optimizers == parts
    assert second.products is products
    inner = [group for part in parts for group in part.param_groups]
    assert all(x is y for x, y in zip(second.param_groups, inner, strict=True))
    assert all(group["optimizer"] for group in inner)


def test_loading_goes_over_the_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, once more would be room for one more copy of all of it."""
    model = Language()
    optimizer = build(model)
    train(model, optimizer, [0])
    cast = torch.optim.Optimizer._process_value_according_to_param_policy
    calls: list[object] = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return cast(*given)

    place = "_process_value_according_to_param_policy"
    monkeypatch.setattr(torch.optim.Optimizer, place, staticmethod(counted))
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls) == sum(len(state) for state in optimizer.state.values())


def test_names_stay_those_of_the_model() -> None:
    saved = build(Language()).state_dict()
    for group in saved["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    optimizer = build(Language())
    before = [list(group["param_names"]) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    assert [group["param_names"] for group in optimizer.param_groups] == before


def test_a_dict_that_does_not_fit_changes_nothing() -> None:
    model = Language()
    optimizer = build(model)
    train(model, optimizer, range(2))
    right = optimizer.state_dict()
    first, *others = right["param_groups"]
    swapped = [{**first, "optimizer": "AdamW"}, *others]
    fewer = [{**first, "params": first["params"][1:]}, *others]
    for groups, words in (
        (others, "saved from AdamW and is RiemannianSGD's"),
        (swapped, "parameter group 0 was saved from AdamW"),
        ([first], "different number of parameter groups"),
        (fewer, "doesn't match the size"),
    ):
        with unchanged(model.parameters(), optimizer), pytest.raises(ValueError, match=words):
            optimizer.load_state_dict({**right, "param_groups": groups})
    optimizer.load_state_dict(right)
    train(model, optimizer, [2])
    expected = Language()
    train(expected, build(expected), range(3))
    assert same_bits(model.parameters(), expected.parameters())


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copier", [copy.deepcopy, pickled])
@pytest.mark.parametrize("base", BASES)
def test_copies_train_on_their_own(base: str, copier: Callable[[Any], Any]) -> None:
    model = Language()
    optimizer = build(model, base)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.25})
    optimizer.zero_grad()
    twin, second = copier((model, optimizer))
    with unchanged(model.parameters(), optimizer):
        train(twin, second, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert same_bits(model.parameters(), twin.parameters())
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert [group["lr"] for group in second.param_groups] == lrs
    second.param_groups[0]["lr"] = 0.0
    assert second.products.param_groups[0]["lr"] == 0.0
    assert optimizer.products.param_groups[0]["lr"] == 0.05


def unfreezing(model: Language, base: str) -> CombinedOptimizer:
    """Built for the second layer alone, and then given the first."""
    first = model.layers[0].requires_grad_(False)
    optimizer = build(model, base)
    first.requires_grad_(True)
    grids = rankfold.attention_grids(first)
    covered = {id(p) for grid in grids for p in grid.params()}
    for grid in grids:
        grid.name = f"first.{grid.name}"
    optimizer.add_param_group({"grids": iter(grids), "lr": 0.125})
    rest = [p for p in first.parameters() if id(p) not in covered]
    optimizer.add_param_group({"params": (p for p in rest), "lr": 0.25})
    return optimizer


@pytest.mark.parametrize("base", BASES)
def test_added_groups_come_last_and_are_saved(base: str) -> None:
    model, twin = Language(), Language()
    optimizer, second = unfreezing(model, base), unfreezing(twin, base)
    kinds = [group["optimizer"] for group in optimizer.param_groups]
    assert kinds[-2:] == ["RiemannianSGD", "SGD" if base == "sgd" else "AdamW"]
    assert [group["lr"] for group in optimizer.param_groups[-2:]] == [0.125, 0.25]
    assert len(optimizer.products.param_groups) == 2
    start = clones(model)
    train(model, optimizer, range(3))
    assert not any(torch.equal(x, y) for x, y in zip(start, model.parameters(), strict=True))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    twin.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert [group["lr"] for group in second.param_groups[-2:]] == [0.125, 0.25]
    train(model, optimizer, range(3, 6))
    train(twin, second, range(3, 6))
    assert same_bits(model.parameters(), twin.parameters())
