"""RiemannianSGD as a torch.optim.Optimizer: what schedulers, scalers and hooks rely on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

from rankfold import RiemannianSGD

from .reference import GEOMETRIES
from .toys import Toy, clones, same_bits, train, unchanged


def build(model: Toy, lr: float | Tensor = 0.125, **options: Any) -> RiemannianSGD:
    return RiemannianSGD(model.grids(), lr, **{"geometry": "fixed-embedded", **options})


def trained(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> Toy:
    """The model after this many uneventful steps."""
    model = Toy(dtype)
    train(model, build(model, **options), range(steps))
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert same_bits(one.parameters(), other.parameters())


def assert_different(one: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    for x, y in zip(one, other, strict=True):
        assert not torch.equal(x, y)


# Groups, schedules, hooks -----------------------------------------------------------------------


def test_groups_have_options_of_their_own() -> None:
    options: list[dict[str, Any]] = [
        {"lr": 0.1, "geometry": "fixed-embedded", "retraction": "orthographic", "maximize": True},
        {
            "lr": 0.05,
            "geometry": "isometry-canonical",
            "retraction": "qr",
            "momentum": 0.9,
            "normalize": "spectral",
            "norm_floor": 0.01,
        },
    ]
    together = Toy()
    groups = [
        {"grids": [grid], **chosen} for grid, chosen in zip(together.grids(), options, strict=True)
    ]
    train(together, RiemannianSGD(groups, 1.0, geometry="fixed-quotient"), range(4))
    apart = Toy()
    optimizers = [
        RiemannianSGD([grid], **chosen) for grid, chosen in zip(apart.grids(), options, strict=True)
    ]
    for step in range(4):
        apart.zero_grad()
        apart.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(together, apart)


def test_every_option_makes_a_difference() -> None:
    base: dict[str, Any] = {"geometry": "isometry-quotient", "momentum": 0.5}
    ends = [
        clones(trained(3, **base, **change))
        for change in (
            {},
            {"lr": 0.25},
            {"normalize": None},
            {"normalize": "spectral"},
            {"norm_floor": 2.0},
            {"retraction": "qr"},
            {"maximize": True},
        )
    ]
    ends += [clones(trained(3, **{**base, "momentum": nu})) for nu in (0.0, 0.25)]
    ends += [clones(trained(3, **{**base, "geometry": g})) for g in GEOMETRIES if "quot" not in g]
    for one, other in itertools.combinations(ends, 2):
        assert_different(one, other)


def test_a_group_takes_the_defaults_it_leaves_out() -> None:
    model = Toy()
    groups: list[dict[str, Any]] = [
        {"grids": model.pair()},
        {"grids": [model.heads()], "lr": 0.5},
    ]
    optimizer = RiemannianSGD(groups, 0.25, geometry="fixed-quotient", momentum=0.75)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5]
    assert [g["momentum"] for g in optimizer.param_groups] == [0.75, 0.75]
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "warmup from zero": lambda o: lr_scheduler.LambdaLR(o, lambda s: s / 4),
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
}


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduler(name: str, as_tensor: bool) -> None:
    """A scheduled run is the run with the same numbers set by hand, read off a torch SGD."""

    def advance(scheduler: Any) -> None:
        scheduler.step(*([1.0] if name == "plateau" else []))

    clock = SGD([nn.Parameter(torch.zeros(1))], 0.125, momentum=0.875)
    ticking = SCHEDULES[name](clock)
    scheduled, manual = Toy(), Toy()
    lr = torch.tensor(0.125, dtype=torch.float64) if as_tensor else 0.125
    ours = build(scheduled, lr, momentum=0.875)
    theirs = build(manual, momentum=0.875)
    scheduler = SCHEDULES[name](ours)
    seen = []
    for step in range(6):
        (group,) = theirs.param_groups
        group["lr"], group["momentum"] = (clock.param_groups[0][k] for k in ("lr", "momentum"))
        seen.append((group["lr"], group["momentum"]))
        train(scheduled, ours, [step])
        train(manual, theirs, [step])
        clock.step()
        advance(ticking)
        advance(scheduler)
    assert_same(scheduled, manual)
    assert len(set(seen)) > 1
    assert len({momentum for _, momentum in seen}) > 1 or name not in ("cyclic", "one cycle")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_tensor_lr_takes_the_same_path(geometry: str, dtype: torch.dtype) -> None:
    start = clones(Toy(dtype))
    options: dict[str, Any] = {"geometry": geometry, "momentum": 0.875}
    floating = trained(6, dtype, lr=0.125, **options)
    for lr in (
        torch.tensor(0.125, dtype=torch.float32),
        torch.tensor(0.125, dtype=torch.float64),
        torch.tensor([0.125], dtype=torch.float64),  # torch lets one element be a vector
    ):
        tensor = trained(6, dtype, lr=lr, **options)
        for x, y, begin in zip(floating.parameters(), tensor.parameters(), start, strict=True):
            assert torch.dist(x, y) <= 16 * torch.finfo(dtype).eps * torch.dist(x, begin)
        assert lr == 0.125


def test_lr_zero_stays_put() -> None:
    for geometry in GEOMETRIES:
        model = trained(2, torch.float64, lr=0.0, geometry=geometry, momentum=0.5)
        for x, y in zip(model.parameters(), Toy(torch.float64).parameters(), strict=True):
            torch.testing.assert_close(x, y, atol=1e-14, rtol=0)


def test_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    model = Toy()
    optimizer = build(model, momentum=0.5)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(model.loss(len(losses)))
        losses[-1].backward()
        return losses[-1]

    for step in range(3):
        assert optimizer.step(closure) is losses[step]
    assert len(losses) == 3
    assert_same(model, trained(3, momentum=0.5))
    model.loss(3).backward()
    assert optimizer.step() is None


def test_failing_closure_changes_nothing() -> None:
    model = Toy()
    optimizer = build(model, momentum=0.5)
    train(model, optimizer, range(2))

    def closure() -> Tensor:
        raise KeyError("no data")

    with unchanged(model.parameters(), optimizer), pytest.raises(KeyError, match="no data"):
        optimizer.step(closure)


def test_added_group_trains_as_if_it_had_been_there() -> None:
    whole = Toy()
    groups: list[dict[str, Any]] = [
        {"grids": [whole.pair()]},
        {"grids": [whole.heads()], "lr": 0.05},
    ]
    options: dict[str, Any] = {"geometry": "isometry-quotient", "momentum": 0.5}
    reference = RiemannianSGD(groups, 0.1, **options)
    grown = Toy()
    optimizer = RiemannianSGD([grown.pair()], 0.1, **options)
    given = {"grids": [grown.heads()], "lr": 0.05}
    optimizer.add_param_group(given)
    assert given.keys() == {"grids", "lr"}  # the caller's dict is the caller's
    train(whole, reference, range(3))
    train(grown, optimizer, range(3))
    assert_same(whole, grown)
    assert_different(clones(Toy()), grown.parameters())


def test_step_hooks_see_the_weights_before_and_after() -> None:
    model = Toy()
    optimizer = build(model)
    calls: list[tuple[str, list[Tensor]]] = []

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda *_: calls.append((name, clones(model)))

    optimizer.register_step_pre_hook(hook("before"))
    handle = optimizer.register_step_post_hook(hook("after"))
    start = clones(model)
    train(model, optimizer, [0])
    assert [name for name, _ in calls] == ["before", "after"]
    assert same_bits(calls[0][1], start)
    assert same_bits(calls[1][1], model.parameters())
    handle.remove()
    train(model, optimizer, [1])
    assert [name for name, _ in calls] == ["before", "after", "before"]


# Gradients the user works on --------------------------------------------------------------------


def test_accumulated_gradients() -> None:
    summed, accumulated = Toy(torch.float64), Toy(torch.float64)
    for model in (summed, accumulated):
        optimizer = build(model, normalize=None, momentum=0.5)
        for step in range(3):
            optimizer.zero_grad()
            if model is summed:
                (model.loss(step) + model.loss(step + 9)).backward()
            else:
                model.loss(step).backward()
                model.loss(step + 9).backward()
            optimizer.step()
    for x, y in zip(summed.parameters(), accumulated.parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)


def test_clipped_gradients() -> None:
    """Of an unnormalized step; a normalized one would not notice."""
    clipped, scaled, plain = Toy(), Toy(), Toy()
    for model in (clipped, scaled, plain):
        model.loss(0).backward()
    norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.25)
    for p, q in zip(scaled.parameters(), clipped.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        p.grad *= 0.25 / norm
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0)
        p.grad = q.grad.clone()
    for model in (clipped, scaled, plain):
        build(model, normalize=None).step()
    assert_same(clipped, scaled)
    assert_different(clipped.parameters(), plain.parameters())


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_are_left_as_they_are(geometry: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Toy(dtype)
        optimizer = build(model, geometry=geometry, momentum=0.5, maximize=True)
        for step in range(2):
            model.loss(step).backward()
            held = [p.grad for p in model.parameters()]
            values = [g.clone() for g in held if g is not None]
            before = clones(model)
            optimizer.step()
            assert_different(before, model.parameters())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert [id(g) for g in grads] == [id(g) for g in held]
            assert same_bits(grads, values)


def half_precision_loss(model: Toy, step: int) -> Tensor:
    """Matrix products in float16 under autocast, of float32 parameters."""
    generator = torch.Generator().manual_seed(step)
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = torch.randn(16, 5, generator=generator) @ model.b
        assert hidden.dtype == torch.float16
        return (hidden @ model.a.mT - torch.randn(16, 7, generator=generator)).square().mean()


def test_grad_scaler() -> None:
    scaled, plain = Toy(), Toy()
    optimizer, reference = (
        RiemannianSGD([m.pair()], 0.125, geometry="fixed-quotient", momentum=0.5)
        for m in (scaled, plain)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        for model, chosen in ((scaled, optimizer), (plain, reference)):
            chosen.zero_grad()
            loss = half_precision_loss(model, step)
            if model is scaled:
                scaler.scale(loss).backward()
                scaler.step(chosen)
                scaler.update()
            else:
                loss.backward()
                chosen.step()
    assert scaler.get_scale() == 2.0**10
    # A power of two is lost in no product; float16 underflow alone tells the two runs apart.
    for x, y, start in zip(scaled.parameters(), plain.parameters(), clones(Toy()), strict=True):
        torch.testing.assert_close(x, y, atol=1e-3, rtol=0)
        assert torch.equal(x, start) == (x is scaled.q or x is scaled.k)

    # An overflow: the step is skipped, the scale backs off, and the next step is taken.
    optimizer.zero_grad()
    scaler.scale(half_precision_loss(scaled, 4)).backward()
    assert scaled.b.grad is not None
    scaled.b.grad[1, 1] = torch.inf
    before, momentum = clones(scaled), optimizer.state[scaled.a]["momentum"].clone()
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(before, scaled.parameters())
    assert same_bits([momentum], [optimizer.state[scaled.a]["momentum"]])
    assert scaler.get_scale() == 2.0**9
    optimizer.zero_grad()
    scaler.scale(half_precision_loss(scaled, 5)).backward()
    scaler.step(optimizer)
    assert_different(before[:2], [scaled.a, scaled.b])


def test_a_grid_without_gradients_is_left_alone() -> None:
    for idle in (0, 1):
        model = Toy()
        optimizer = build(model, momentum=0.5)
        train(model, optimizer, range(2))
        parts = ([model.a, model.b], [model.q, model.k])
        resting, moving = parts[idle], parts[1 - idle]
        before = [p.detach().clone() for p in moving]
        for _ in range(2):
            optimizer.zero_grad()
            model.losses(5)[1 - idle].backward()
            momenta = [optimizer.state[p]["momentum"].clone() for p in resting]
            with unchanged(resting):
                optimizer.step()
            assert same_bits(momenta, [optimizer.state[p]["momentum"] for p in resting])
        assert_different(before, moving)
        train(model, optimizer, [6])  # and it moves again
        optimizer.zero_grad()
        with unchanged(model.parameters(), optimizer):  # no gradients at all
            optimizer.step()


def test_maximize_is_descent_on_the_negated_loss() -> None:
    for geometry in GEOMETRIES:
        climbing, descending = Toy(), Toy()
        up = build(climbing, geometry=geometry, momentum=0.5, maximize=True)
        down = build(descending, geometry=geometry, momentum=0.5)
        for step in range(3):
            up.zero_grad()
            climbing.loss(step).backward()
            up.step()
            down.zero_grad()
            (-descending.loss(step)).backward()
            down.step()
        assert_same(climbing, descending)
        assert climbing.loss(0) > trained(3, geometry=geometry, momentum=0.5).loss(0)
