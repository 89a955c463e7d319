"""What members remember between steps besides momentum: three numbers, and where they are kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Factor, Grid, RiemannianSGD, workspace

from .heads import Heads, states
from .reference import GEOMETRIES
from .test_checkpoints import through_a_file
from .test_momentum_forms import FORMS, every_form
from .toys import Toy, same_bits, train
from .watching import Watch

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
ADAM: dict[str, Any] = {"momentum": 0.5, "second_moment": 0.75, "bias_correction": True}


class Fused(nn.Module):
    """One weight whose halves belong to two grids: its first left parameter is that of both."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.q, self.k, self.v = (nn.Parameter(draw(*s)) for s in ((8, 6), (4, 5), (2, 7)))
        self.targets = draw(2, 2, 6, 5), draw(6, 7)

    def grids(self) -> list[Grid]:
        return [
            Grid(
                Factor(self.q, axis=0, rank=2, blocks=2),
                Factor(self.k, axis=0, blocks=2),
                groups=2,
                name="qk",
            ),
            Grid(Factor(self.q, axis=0, rank=2, start=6), Factor(self.v, axis=0), name="qv"),
        ]

    def loss(self, step: int) -> Tensor:
        q, k = self.q.view(4, 2, 6), self.k.view(2, 2, 5)
        first = (q[:2].mT @ k - (step + 1) * self.targets[0][0]).square().sum()
        return first + (q[3].mT @ self.v - self.targets[1]).square().sum()


def test_grids_that_share_a_parameter_keep_their_own_numbers() -> None:
    model = Fused()
    optimizer = RiemannianSGD(model.grids(), 0.01, geometry="fixed-quotient", **ADAM)
    for step in range(3):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
    state = optimizer.state[model.q]
    assert state.keys() == {"momentum", "running:qk", "running:qv"}
    assert [tuple(state[f"running:{name}"].shape) for name in ("qk", "qv")] == [(2, 3), (1, 3)]
    for name in ("qk", "qv"):
        weight, square, square_weight = state[f"running:{name}"].unbind(1)
        torch.testing.assert_close(weight, torch.full_like(weight, 1 - 0.5**3))
        torch.testing.assert_close(square_weight, torch.full_like(weight, 1 - 0.75**3))
        assert (square > 0).all()
    values = torch.cat([state["running:qk"][:, 1], state["running:qv"][:, 1]])
    assert len(set(values.tolist())) == 3
    assert optimizer.state[model.k].keys() == {"momentum"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_geometry
@pytest.mark.parametrize("form", ["heavy, second", "adam"])
def test_continuation_is_bit_identical(geometry: str, form: str, dtype: torch.dtype) -> None:
    options = {"geometry": geometry, "momentum": 0.5, **FORMS[form]}
    model, fresh = Toy(dtype), Toy(dtype, seed=1)
    optimizer = RiemannianSGD(model.grids(), 0.05, **options)
    train(model, optimizer, range(3))
    second = RiemannianSGD(fresh.grids(), 0.5, geometry=geometry)
    loaded = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    assert second.state[fresh.q]["running:heads"].dtype == torch.float32
    train(model, optimizer, range(3, 6))
    train(fresh, second, range(3, 6))
    assert same_bits(model.parameters(), fresh.parameters())
    twin, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, [6])
    train(twin, copied, [6])
    assert same_bits(model.parameters(), twin.parameters())


@every_geometry
def test_a_member_that_is_skipped_keeps_its_numbers(geometry: str) -> None:
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.05, geometry=geometry, **ADAM)
    model.run(optimizer, 2)
    numbers = optimizer.state[model.a]["running:w"]
    before = numbers.clone()
    model.backward()
    assert model.a.grad is not None
    model.a.grad[1, 0, 0] = torch.nan
    model.a.grad[2] = 1e30  # its square is beyond float32
    optimizer.step()
    assert optimizer.counts() == {"w[1]": {"skipped": 1}, "w[2]": {"skipped": 1}}
    assert torch.equal(numbers[1:3], before[1:3])
    assert (numbers[[0, 3]] != before[[0, 3]]).any(1).all()
    assert numbers.isfinite().all()


def test_a_grid_without_gradients_keeps_its_numbers() -> None:
    model = Toy()
    optimizer = RiemannianSGD(model.grids(), 0.05, geometry="isometry-quotient", **ADAM)
    train(model, optimizer, range(2))
    before = optimizer.state[model.q]["running:heads"].clone()
    optimizer.zero_grad()
    model.losses(2)[0].backward()
    optimizer.step()
    assert torch.equal(optimizer.state[model.q]["running:heads"], before)
    torch.testing.assert_close(optimizer.state[model.a]["running:pair"][0, 0].item(), 1 - 0.5**3)


def test_numbers_are_updated_where_they_lie() -> None:
    """A recorded graph reads and writes the same memory at every replay."""
    model = Toy()
    lr = torch.tensor(0.05)
    optimizer = RiemannianSGD(
        model.grids(), lr, geometry="isometry-quotient", capturable=True, **ADAM
    )
    train(model, optimizer, [0])
    places = {p: {k: v.data_ptr() for k, v in s.items()} for p, s in optimizer.state.items()}
    train(model, optimizer, range(1, 4))
    now = {p: {k: v.data_ptr() for k, v in s.items()} for p, s in optimizer.state.items()}
    assert now == places


@every_geometry
@every_form
def test_capturable_steps_are_the_steps(geometry: str, form: str) -> None:
    models = Heads(), Heads()
    rates: tuple[float | Tensor, ...] = (0.05, torch.tensor(0.05))
    for model, lr in zip(models, rates, strict=True):
        optimizer = RiemannianSGD(
            [model.grid()],
            lr,
            geometry=geometry,
            capturable=isinstance(lr, Tensor),
            **{"momentum": 0.5, **FORMS[form]},
        )
        model.run(optimizer, 5)
        assert optimizer.counts() == {}
        assert model.survives(geometry)
    assert (models[0].a - models[1].a).abs().max() < 1e-6


def test_switched_on_and_off() -> None:
    """A momentum that is there already needs no correction; numbers nobody asks for are let go."""
    model = Toy()
    optimizer = RiemannianSGD(
        model.grids(), 0.05, geometry="fixed-embedded", momentum=0.5, normalize=None
    )
    train(model, optimizer, range(2))
    (group,) = optimizer.param_groups
    group["bias_correction"] = True
    train(model, optimizer, [2])
    assert optimizer.state[model.a]["running:pair"][0, 0] == 1
    optimizer.reset_momentum()
    assert not any(optimizer.state.values())
    train(model, optimizer, [3])
    assert optimizer.state[model.a]["running:pair"][0, 0] == 0.5
    group.update(bias_correction=False, momentum=0.0, normalize="metric", second_moment=0.5)
    train(model, optimizer, [4])
    assert optimizer.state[model.a].keys() == {"running:pair"}
    group.update(bias_correction=True, momentum=0.75)
    train(model, optimizer, [5])
    weight, _, square_weight = optimizer.state[model.a]["running:pair"][0].tolist()
    assert (weight, square_weight) == (0.25, 0.75)
    group.update(bias_correction=False, second_moment=0.0)
    train(model, optimizer, [6])
    assert optimizer.state[model.a].keys() == {"momentum"}


@every_geometry
def test_chunks_change_nothing(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for room in (2**30, 1):
        monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", room)
        models = Heads(torch.float64), Heads(torch.float64, seed=1)
        grids = [Grid(m.a, m.b, groups=4, name=name) for m, name in zip(models, "ab", strict=True)]
        optimizer = RiemannianSGD(grids, 0.05, geometry=geometry, **ADAM)
        for _ in range(3):
            for model in models:
                model.backward()
            optimizer.step()
        found.append([x for model in models for x in states(optimizer, model)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_as_many_operations_for_many_grids_as_for_few(momentum: float) -> None:
    counted = []
    for grids in (2, 9):
        models = [Heads(members=2, seed=k) for k in range(grids)]
        optimizer = RiemannianSGD(
            [Grid(m.a, m.b, groups=2) for m in models],
            0.05,
            geometry="fixed-quotient",
            momentum=momentum,
            second_moment=0.5,
        )
        for _ in range(2):
            for model in models:
                model.backward()
            with Watch() as watch:
                optimizer.step()
        counted.append(watch.operations)
    assert counted[0] == counted[1]
