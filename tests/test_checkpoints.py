"""Checkpoints and copies: plain values only, and continuations that are bit-identical."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as distributed

from rankfold import Factor, Grid, RiemannianSGD

from .reference import GEOMETRIES
from .toys import Toy, clones, same_bits, saying, train, unchanged

LOW = (torch.bfloat16, torch.float16)
GRID_KEYS = {"grids", "grid_names"}


def build(model: Toy, lr: float | Tensor = 0.125, **options: Any) -> RiemannianSGD:
    return RiemannianSGD(model.grids(), lr, **{"geometry": "fixed-embedded", **options})


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Saved, and loaded by the loader that refuses everything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("momentum", [0.0, 0.875])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_continuation_is_bit_identical(geometry: str, momentum: float, dtype: torch.dtype) -> None:
    """Into a fresh model and an optimizer built with other options, from a file."""
    model = Toy(dtype)
    optimizer = build(model, geometry=geometry, momentum=momentum, maximize=True)
    train(model, optimizer, range(3))
    loaded = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    fresh = Toy(dtype, seed=1)
    second = build(fresh, 0.5, geometry=geometry, momentum=0.5)
    fresh.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    start = clones(fresh)
    for step in range(3, 7):
        train(model, optimizer, [step])
        train(fresh, second, [step])
        assert same_bits(model.parameters(), fresh.parameters())
    for before, param in zip(start, fresh.parameters(), strict=True):
        assert not torch.equal(before, param)
    for mine, theirs in zip(optimizer.state.values(), second.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert same_bits(mine.values(), theirs.values())


def test_loading_halfway_through_a_run() -> None:
    """Into an optimizer that has taken steps of its own: they leave no trace."""
    model = Toy()
    optimizer = build(model, momentum=0.875)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    end = clones(model)
    train(model, optimizer, range(7, 9))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(2, 4))
    assert same_bits(end, model.parameters())


def test_loading_replaces_no_grid() -> None:
    model = Toy()
    optimizer = build(model, momentum=0.5)
    train(model, optimizer, range(2))
    (group,) = optimizer.param_groups
    grids, names = list(group["grids"]), list(group["grid_names"])
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    (group,) = optimizer.param_groups
    assert [id(grid) for grid in group["grids"]] == [id(grid) for grid in grids]
    assert group["grid_names"] == names == ["pair", "heads"]
    used = [p for grid in group["grids"] for p in grid.params()]
    assert [id(p) for p in used] == [id(p) for p in model.parameters()]
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_a_grid_in_the_loaded_dict_is_not_taken() -> None:
    model, other = Toy(), Toy(seed=1)
    optimizer = build(model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["grids"] = other.grids()
    mine = optimizer.param_groups[0]["grids"]
    optimizer.load_state_dict(saved)
    assert [id(g) for g in optimizer.param_groups[0]["grids"]] == [id(g) for g in mine]


def test_options_are_loaded() -> None:
    chosen: dict[str, Any] = {
        "geometry": "isometry-canonical",
        "momentum": 0.25,
        "normalize": "spectral",
        "norm_floor": 0.5,
        "retraction": "qr",
        "maximize": True,
    }
    first, second = build(Toy(), 0.75, **chosen), build(Toy())
    second.load_state_dict(first.state_dict())
    (group,) = second.param_groups
    assert {key: group[key] for key in chosen} == chosen
    assert group["lr"] == 0.75


def test_options_that_were_not_saved_stay() -> None:
    model = Toy()
    optimizer = build(model, weight_decay=0.25)
    saved = build(Toy(), momentum=0.5).state_dict()
    del saved["param_groups"][0]["weight_decay"]
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["momentum"]) == (0.25, 0.5)
    train(model, optimizer, [0])


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_loading_casts_no_master_or_momentum(dtype: torch.dtype) -> None:
    model = Toy(dtype)
    optimizer = build(model, 0.01, momentum=0.875)
    train(model, optimizer, range(3))
    fresh = Toy(dtype)
    second = build(fresh)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        mine, theirs = optimizer.state[p], second.state[q]
        assert theirs.keys() == {"master", "momentum"}
        for key in ("master", "momentum"):
            assert theirs[key].dtype == torch.float32
            assert same_bits([mine[key]], [theirs[key]])
            assert not torch.equal(theirs[key], theirs[key].to(dtype).float())  # more than 16 bits


def test_loaded_state_is_a_copy() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Toy(dtype)
        optimizer = build(model, momentum=0.5)
        train(model, optimizer, range(2))
        fresh = Toy(dtype)
        second = build(fresh)
        second.load_state_dict(optimizer.state_dict())
        model.zero_grad()
        with unchanged(model.parameters(), optimizer):
            train(fresh, second, range(2))


def test_state_goes_to_the_device_of_its_parameter() -> None:
    """The meta device stands in for a second one: it can be moved to, though not computed on."""
    model = Toy(torch.bfloat16)
    optimizer = build(model, momentum=0.5)
    train(model, optimizer, range(2))
    elsewhere = Toy(torch.bfloat16).to("meta")
    second = build(elsewhere, geometry="isometry-quotient")
    second.load_state_dict(optimizer.state_dict())
    assert len(second.state) == 4
    for param, state in second.state.items():
        assert param.device.type == "meta"
        assert state.keys() == {"master", "momentum"}
        for value in state.values():
            assert value.device == param.device
            assert value.dtype == torch.float32
            assert value.shape == param.shape
    for state in optimizer.state.values():  # the saved one stayed where it was
        assert {value.device.type for value in state.values()} == {"cpu"}


def test_state_dict_holds_tensors_and_plain_values_only() -> None:
    model = Toy(torch.bfloat16)
    groups: list[dict[str, Any]] = [
        {"grids": [model.pair()]},
        {"grids": [model.heads()], "lr": torch.tensor(0.5)},
    ]
    optimizer = RiemannianSGD(groups, 0.1, geometry="fixed-quotient", momentum=0.5)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    found = {type(leaf) for leaf in leaves(saved)}
    assert found <= {Tensor, str, int, float, bool, type(None)}
    assert Tensor in found
    assert all(group[key] is None for group in saved["param_groups"] for key in GRID_KEYS)
    assert all(group[key] for group in optimizer.param_groups for key in GRID_KEYS)
    assert all(set(s) == {"master", "momentum"} for s in saved["state"].values())
    back = through_a_file(saved)
    assert back["param_groups"] == saved["param_groups"]
    for key, state in saved["state"].items():
        assert same_bits(back["state"][key].values(), state.values())


def test_flattened_checkpoints_come_back() -> None:
    """As torch.distributed makes them on request: a key for every option of every parameter."""
    flat = distributed.StateDictOptions(flatten_optimizer_state_dict=True)
    models = Toy(), Toy()
    optimizers = [build(model, momentum=0.5) for model in models]
    train(models[0], optimizers[0], range(2))
    models[1].load_state_dict(models[0].state_dict())
    saved = distributed.get_optimizer_state_dict(models[0], optimizers[0], options=flat)
    saved = through_a_file(saved)
    distributed.set_optimizer_state_dict(models[1], optimizers[1], saved, options=flat)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2, 4))
    assert same_bits(models[0].parameters(), models[1].parameters())


def test_state_has_the_shape_of_its_parameter() -> None:
    for dtype, wide in ((torch.float64, torch.float64), *((d, torch.float32) for d in LOW)):
        for geometry in GEOMETRIES:
            model = Toy(dtype)
            optimizer = build(model, geometry=geometry, momentum=0.5)
            train(model, optimizer, [0])
            for param in model.parameters():
                assert param.dtype == dtype
                state = optimizer.state[param]
                assert state.keys() == ({"momentum", "master"} if dtype in LOW else {"momentum"})
                for value in state.values():
                    assert value.shape == param.shape
                    assert value.dtype == wide
                    assert not value.requires_grad


def test_float32_without_momentum_keeps_no_state() -> None:
    for geometry in GEOMETRIES:
        model = Toy()
        optimizer = build(model, geometry=geometry)
        train(model, optimizer, range(2))
        assert not optimizer.state
        assert optimizer.state_dict()["state"] == {}


def test_hooks_see_a_dict_without_grids() -> None:
    model = Toy(torch.bfloat16)
    optimizer = build(model, momentum=0.5)
    train(model, optimizer, range(2))
    calls: list[str] = []

    def saving(_: Any) -> None:
        calls.append("saving")

    def saved(_: Any, state: dict[str, Any]) -> None:
        calls.append("saved")
        assert all(group[key] is None for group in state["param_groups"] for key in GRID_KEYS)
        state["note"] = "mine"

    def loading(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        assert all(group[key] is None for group in state["param_groups"] for key in GRID_KEYS)
        assert state.pop("note") == "mine"
        groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def loaded(loader: Any) -> None:
        calls.append("loaded")
        assert [g.name for g in loader.param_groups[0]["grids"]] == ["pair", "heads"]
        assert {v.dtype for s in loader.state.values() for v in s.values()} == {torch.float32}

    optimizer.register_state_dict_pre_hook(saving)
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(loaded)
    first = optimizer.state_dict()
    assert first["note"] == "mine"
    optimizer.load_state_dict(first)
    assert calls == ["saving", "saved", "loading", "loaded"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert first["param_groups"][0]["lr"] == 0.125
    optimizer.load_state_dict(optimizer.state_dict())  # and no hook was lost or left behind
    assert calls == ["saving", "saved", "loading", "loaded"] * 2


def test_a_dict_that_does_not_fit_is_torchs_error_and_changes_nothing() -> None:
    model = Toy()
    optimizer = build(model, momentum=0.5)
    train(model, optimizer, range(2))
    right = optimizer.state_dict()
    (group,) = right["param_groups"]
    fewer = {**right, "param_groups": []}
    more = {**right, "param_groups": [group, {**group, "params": [4, 5]}]}
    narrow = {**right, "param_groups": [{**group, "params": [0, 1, 2], "lr": 9.0}]}
    other = Toy(seed=1)
    fused = Grid(Factor(other.q, axis=0, rank=2), Factor(other.k, axis=0, rank=2))
    stranger = RiemannianSGD([fused], 9.0, geometry="isometry-quotient").state_dict()
    for wrong, words in (
        (fewer, "different number of parameter groups"),
        (more, "different number of parameter groups"),
        (narrow, "doesn't match the size of optimizer's group"),
        (stranger, "doesn't match the size of optimizer's group"),
    ):
        with unchanged(model.parameters(), optimizer), pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(wrong)
    optimizer.load_state_dict(right)
    train(model, optimizer, [2])
    expected = Toy()
    train(expected, build(expected, momentum=0.5), range(3))
    assert same_bits(model.parameters(), expected.parameters())


# Copies ------------------------------------------------------------------------------------------


def pickled(pair: tuple[Toy, RiemannianSGD]) -> tuple[Toy, RiemannianSGD]:
    copied: tuple[Toy, RiemannianSGD] = pickle.loads(pickle.dumps(pair))
    return copied


@pytest.mark.parametrize("copier", [copy.deepcopy, pickled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_copy_of_model_and_optimizer(
    geometry: str,
    dtype: torch.dtype,
    copier: Callable[[tuple[Toy, RiemannianSGD]], tuple[Toy, RiemannianSGD]],
) -> None:
    model = Toy(dtype)
    optimizer = build(model, geometry=geometry, momentum=0.875)
    train(model, optimizer, range(2))
    model.zero_grad()
    twin, twin_optimizer = copier((model, optimizer))
    with unchanged(model.parameters(), optimizer):  # the copy trains on its own ...
        train(twin, twin_optimizer, range(2, 5))
    train(model, optimizer, range(2, 5))  # ... and the original where the copy did
    assert same_bits(model.parameters(), twin.parameters())
    alone = Toy(dtype)
    train(alone, build(alone, geometry=geometry, momentum=0.875), range(5))
    assert same_bits(model.parameters(), alone.parameters())


def test_copy_of_the_optimizer_alone() -> None:
    """It has parameters of its own, those its grids read."""
    model = Toy()
    optimizer = build(model, momentum=0.875)
    train(model, optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    params = twin.param_groups[0]["params"]
    assert [p for grid in twin.param_groups[0]["grids"] for p in grid.params()] == params
    assert same_bits(params, model.parameters())
    shell = Toy()
    shell.a, shell.b, shell.q, shell.k = params
    with unchanged(model.parameters(), optimizer):
        train(shell, twin, range(2, 5))
    train(model, optimizer, range(2, 5))
    assert same_bits(model.parameters(), shell.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_another_model_is_refused_and_changes_nothing(dtype: torch.dtype) -> None:
    """It would go in, and break the next step."""
    model, other = Toy(dtype), Toy(dtype)
    other.q, other.k = (nn.Parameter(torch.cat([p, p], 1)) for p in (other.q, other.k))
    optimizers = [
        RiemannianSGD(each.grids(), 0.1, geometry="fixed-quotient", momentum=0.5)
        for each in (model, other)
    ]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    words = saying("saved for a parameter of shape (8, 6)", "of shape (8, 12)", "another model")
    with unchanged(model.parameters(), optimizers[0]), pytest.raises(ValueError, match=words):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
