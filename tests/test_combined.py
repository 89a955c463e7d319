"""CombinedOptimizer: the same steps as its parts apart, and a normal optimizer in all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import rankfold
from rankfold import CombinedOptimizer, RiemannianSGD

from .toys import clones, same_bits, unchanged
from .whole_models import Language, loss_of, train

BASES = ["adamw", "sgd", "muon"]
OPTIONS: dict[str, Any] = {"base_lr": 0.01, "base_options": {"weight_decay": 0.1}}


def build(model: nn.Module, base: str = "adamw", lr: float = 0.05) -> CombinedOptimizer:
    return rankfold.build_optimizer(model, lr, base=base, **OPTIONS)


def apart(model: Language, base: str) -> list[Optimizer]:
    """What `build` should amount to, written out."""
    grids = rankfold.attention_grids(model)
    covered = {id(p) for grid in grids for p in grid.params()}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in covered]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in rest if p.dim() == 2]},
        {"params": [p for _, p in rest if p.dim() != 2], "weight_decay": 0.0},
    ]
    for grid in grids:
        if str(grid.name).endswith(".vo"):
            grid.rate, grid.sides = 4.0, (2.0, 1.0)
        else:
            grid.tilted = False
    products = RiemannianSGD(
        grids,
        0.05,
        geometry="fixed-quotient",
        normalize="whitened",
        momentum=0.8,
        nesterov=True,
        momentum_form="unit-smoothing",
        growth=0.5,
        tilt=0.25,
        row_balance=0.5,
    )
    if base == "adamw":
        return [products, torch.optim.AdamW(groups, 0.01, weight_decay=0.1)]
    if base == "sgd":
        return [products, torch.optim.SGD(groups, 0.01, weight_decay=0.1)]
    hidden = [p for n, p in rest if "linear" in n and p.dim() == 2]
    groups[0]["params"] = [p for n, p in rest if n in ("tokens.weight", "lm_head.weight")]
    muon = torch.optim.Muon(hidden, 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [products, muon, torch.optim.AdamW(groups, 0.01, weight_decay=0.1)]


def schedule(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@pytest.mark.parametrize("base", BASES)
def test_steps_are_those_of_the_optimizers_apart(base: str) -> None:
    """Bit for bit, with gradients clipped and learning rates scheduled."""
    one, other = Language(), Language()
    together, separate = build(one, base), apart(other, base)
    schedulers = [schedule(optimizer) for optimizer in (together, *separate)]
    start = clones(one)
    for step in range(6):
        for model in (one, other):
            model.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (together, *separate):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert same_bits(one.parameters(), other.parameters())
    assert not any(torch.equal(x, y) for x, y in zip(start, one.parameters(), strict=True))


# Schedulers, closures, hooks --------------------------------------------------------------------


def test_a_scheduler_scales_every_group() -> None:
    optimizer = build(Language(), "muon")
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = [group["lr"] for group in optimizer.param_groups]
    assert before == [0.05, 0.01, 0.01, 0.01]
    assert [group["initial_lr"] for group in optimizer.param_groups] == before
    optimizer.step()
    scheduler.step()
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        assert type(group["lr"]) is float
        assert group["lr"] == lr / 2
    inner = [group["lr"] for part in optimizer.optimizers for group in part.param_groups]
    assert inner == [lr / 2 for lr in before]
    assert scheduler.get_last_lr() == inner


def test_schedulers_of_momentum() -> None:
    """They can set what all groups have; where these differ, torch says so."""
    cycle: dict[str, Any] = {"max_lr": 0.1, "total_steps": 4}
    by_momentum = build(Language(), "sgd")
    lr_scheduler.OneCycleLR(by_momentum, **cycle)
    assert {group["momentum"] for group in by_momentum.param_groups} == {0.95}
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        lr_scheduler.OneCycleLR(build(Language()), **cycle)
    lr_scheduler.OneCycleLR(build(Language()), cycle_momentum=False, **cycle)
    # As the docs say, so that every group reaches the rate it was given, and no other's.
    apart = build(Language())
    rates = [group["lr"] for group in apart.param_groups]
    assert len({*rates}) > 1
    scheduler = lr_scheduler.OneCycleLR(apart, rates, 4, pct_start=0.5, cycle_momentum=False)
    apart.step()
    scheduler.step()
    assert [group["lr"] for group in apart.param_groups] == pytest.approx(rates)


def test_closure_runs_once_with_gradients() -> None:
    model, other = Language(), Language()
    optimizer = build(model)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(loss_of(model, len(losses)))
        losses[-1].backward()
        return losses[-1]

    for step in range(3):
        assert optimizer.step(closure) is losses[step]
    assert len(losses) == 3
    train(other, build(other), range(3))
    assert same_bits(model.parameters(), other.parameters())


def test_an_error_in_the_products_changes_nothing() -> None:
    model = Language()
    optimizer = build(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    model.get_parameter("layers.0.self_attn.out_proj.weight").grad = None
    with (
        unchanged(model.parameters(), optimizer),
        pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.vo.*some of its gradients"),
    ):
        optimizer.step()


def test_nothing_to_combine() -> None:
    with pytest.raises(ValueError, match="no optimizers to combine"):
        CombinedOptimizer([])


def test_zero_grad() -> None:
    model = Language()
    optimizer = build(model)
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_hooks_are_called_once() -> None:
    model = Language()
    optimizer = build(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": len(calls)})

    def loading(_: Optimizer, saved: dict[str, Any]) -> None:
        calls.append("loading")
        assert saved.pop("note") == 3
        saved["param_groups"] = [{**group, "lr": 0.125} for group in saved["param_groups"]]

    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(
        lambda o: calls.append(str([group["lr"] for group in o.param_groups]))
    )
    train(model, optimizer, [0])
    for _ in range(2):
        calls[:] = calls[:2]
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saving", "loading", "[0.125, 0.125, 0.125]"]
    assert [g["lr"] for part in optimizer.optimizers for g in part.param_groups] == [0.125] * 3


def test_profiles_name_every_step() -> None:
    model = Language()
    optimizer = build(model)
    loss_of(model, 0).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    seen = {event.key for event in profile.key_averages()}
    for name in ("CombinedOptimizer", "RiemannianSGD", "AdamW"):
        assert f"Optimizer.step#{name}.step" in seen
    assert "Optimizer.zero_grad#CombinedOptimizer.zero_grad" in seen


# Mixed precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_grad_scaler(options: dict[str, Any]) -> None:
    """Overflows leave all parameters alone; otherwise steps are those of unscaled gradients."""
    model = Language()
    optimizer = rankfold.build_optimizer(model, base_lr=0.01, base_options=options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()

    backward(0)
    twin = Language()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad / 2**10
    scaler.step(optimizer)
    scaler.update()
    rankfold.build_optimizer(twin, base_lr=0.01, base_options=options).step()
    assert same_bits(model.parameters(), twin.parameters())

    backward(1)
    assert model.norm.weight.grad is not None
    model.norm.weight.grad[0] = torch.inf
    before = clones(model)
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(before, model.parameters())
    assert scaler.get_scale() == 2.0**9
    backward(2)
    scaler.step(optimizer)
    assert not any(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


# Groups added later -----------------------------------------------------------------------------


def test_where_added_groups_go() -> None:
    optimizer = build(Language(), "muon")
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    given = {"params": matrix, "optimizer": "Muon"}
    optimizer.add_param_group(given)
    assert given == {"params": matrix, "optimizer": "Muon"}  # the caller's dict is the caller's
    optimizer.add_param_group({"params": [("a.name", vector)]})
    assert optimizer.optimizers[1].param_groups[-1]["params"] == [matrix]
    assert optimizer.param_groups[-1]["param_names"] == ["a.name"]
    assert optimizer.param_groups[-1]["optimizer"] == "AdamW"
    for wrong, words in (
        ({"params": [vector]}, "more than one parameter group"),
        ({"params": [matrix]}, "more than one parameter group"),  # Muon's, given to AdamW
        ({"params": [vector], "optimizer": "SGD"}, "no optimizer 'SGD' here; there are Rie"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group(wrong)
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})
    assert len(optimizer.param_groups) == 6


def test_a_parameter_twice_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="more than one parameter group"):
        CombinedOptimizer([torch.optim.SGD(params), torch.optim.AdamW(params)])
    alone = CombinedOptimizer([torch.optim.SGD(params)])
    with pytest.raises(AttributeError, match="RiemannianSGD"):
        _ = alone.products


def test_the_products_keep_their_diagnostics() -> None:
    model = Language()
    optimizer = build(model)
    optimizer.products.record_diagnostics()
    train(model, optimizer, [0])
    assert len(optimizer.products.diagnostics()) == 12
    assert optimizer.products.counts() == {}


def test_a_distributed_model(tmp_path: Path) -> None:
    """Built before or after it is wrapped, its parameters and their names are the same."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        ends = []
        for early in (True, False):
            model = Language()
            optimizer = build(model) if early else None
            wrapped = nn.parallel.DistributedDataParallel(model)
            optimizer = optimizer or build(wrapped)
            train(wrapped, optimizer, range(3))
            ends.append(clones(model))
            assert optimizer.param_groups[1]["param_names"][0] == "tokens.weight"
    finally:
        torch.distributed.destroy_process_group()
    plain = Language()
    train(plain, build(plain), range(3))
    for end in ends:
        assert same_bits(end, plain.parameters())
