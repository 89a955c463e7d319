"""Stacks too large for the workspace go in chunks, and one stored as a stack without a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rankfold
from rankfold import Factor, Grid, stacks, workspace
from rankfold.geometries import GEOMETRIES
from rankfold.movers import movers
from rankfold.stacks import Plan, itself

from .moving_cases import LAYERS, LAYOUTS, M, Maker, Problem, R, close, few_steps, results, step
from .watching import Watch

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)


def biased(make: Maker) -> list[Grid]:
    """Ragged heights and biases, which go by bundles everywhere."""
    return [
        Grid([make(M, R), make(M - 2, R)], Factor(make(2 * R, M), axis=0, bias=make(2 * R), rank=R))
        for _ in range(LAYERS + 2)
    ]


@every_geometry
@pytest.mark.parametrize("layout", [*LAYOUTS, "biased"])
def test_chunks_change_nothing(layout: str, geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "biased", biased)
    found = []
    for room in (2**30, 1, 5 * 4 * 5 * M * R):
        monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", room)
        problem = Problem(layout)
        most = max(len(stack.chunks(momentum=True)) for stack in problem.plan.stacks)
        assert most == 1 if room == 2**30 else most >= 3
        if room == 1:
            assert most == max(len(stack.members) for stack in problem.plan.stacks)
        for stack in problem.plan.stacks:
            parts = stack.chunks(momentum=True)
            covered = [k for part in parts for k in range(part.start, part.stop)]
            assert covered == list(range(len(stack.members)))
        optimizer = problem.optimizer(geometry, trust_region=0.5)
        problem.gradients()
        step(optimizer)
        problem.gradients()
        spoiled = problem.params[-1].grad  # of members that are not in the first chunk
        assert spoiled is not None
        spoiled.view(-1)[[0, -1]] = torch.nan
        optimizer.record_diagnostics()
        optimizer.step()
        found.append((results(problem, optimizer), optimizer.counts(), optimizer.diagnostics()))
    (ours, counts, numbers), *others = found
    assert "skipped" in {event for events in counts.values() for event in events}
    for theirs, other_counts, other_numbers in others:
        close(theirs, ours, 2e-5)
        assert other_counts == counts
        assert list(other_numbers) == list(numbers)
        for member, values in numbers.items():
            assert other_numbers[member] == pytest.approx(values, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("room", [2**30, 1])
@every_geometry
def test_a_stack_stored_as_one_is_not_copied(
    geometry: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", room)
    make = Maker(torch.float32)
    a, b = make(5, M, R), make(5, M + 1, R)
    grid = Grid(a, b, groups=5)
    with pytest.warns(UserWarning, match="singular values"):
        rankfold.orthonormalize_(grid)
    plan = Plan([("g", grid)])
    (mover,) = movers(plan, {"weight": itself})
    read = mover.read("weight", plan.stacks[0], slice(0, 5))
    assert [x.data_ptr() for x in read] == [a.data_ptr(), b.data_ptr()]
    pairs = [(nn.Parameter(x.clone()), nn.Parameter(y.clone())) for x, y in zip(a, b, strict=True)]
    optimizer = rankfold.RiemannianSGD([grid], 0.02, geometry=geometry, momentum=0.9)
    other = rankfold.RiemannianSGD(
        [Grid(*pair) for pair in pairs], 0.02, geometry=geometry, momentum=0.9
    )
    for k in range(3):
        a.grad, b.grad = make(5, M, R).detach(), make(5, M + 1, R).detach()
        for pair, *grads in zip(pairs, a.grad, b.grad, strict=True):
            for p, g in zip(pair, grads, strict=True):
                p.grad = g
        before = a.grad.clone(), b.grad.clone()
        if k == 0:
            step(optimizer)
            step(other)
            continue
        with Watch() as watch:
            optimizer.step()
        assert "aten._foreach_copy_.default" not in watch.operations
        assert torch.equal(a.grad, before[0])
        assert torch.equal(b.grad, before[1])
        other.step()
    for whole, parts in zip((a, b), zip(*pairs, strict=True), strict=True):
        close([whole.detach()], [torch.stack(parts).detach()], 1e-5)
        kept = torch.stack([other.state[p]["momentum"] for p in parts])
        close([optimizer.state[whole]["momentum"]], [kept], 1e-5)


def test_a_stack_stored_as_one_is_left_alone_by_errors() -> None:
    make = Maker(torch.float32)
    a, b = make(5, M, R), make(5, M + 1, R)
    before = a.detach().clone(), b.detach().clone()
    optimizer = rankfold.RiemannianSGD(
        [Grid(a, b, groups=5)], 0.02, geometry="fixed-quotient", on_nonfinite="raise"
    )
    a.grad, b.grad = torch.full_like(a, torch.nan), torch.ones_like(b)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("total", [24e9, 140e9])
@pytest.mark.parametrize("members", [1, 3, 100, 512, 10_000])
def test_chunks_of_a_gpu_take_what_it_has_room_for(
    members: int, total: float, momentum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three times the factors or a gigabyte, of no more than a share of the device."""
    monkeypatch.setattr(workspace, "_memory_of", lambda device: total)
    member = 2 * 4096 * 128 * 4
    found = workspace.chunks(members, member, torch.device("cuda"), momentum)
    assert [k for part in found for k in range(members)[part]] == list(range(members))
    held = (8 if momentum else 5) * member * max(part.stop - part.start for part in found)
    assert held <= max(2**30, min(3 * members * member, total / 16))
    if members == 512 and total == 140e9:
        assert len(found) == (3 if momentum else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_that_fit_a_cache_change_nothing(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for room in (2**30, 1):
        monkeypatch.setattr(stacks, "_CACHED_BYTES", room)
        problem = Problem(layout)
        plans = stacks.plans_for([(str(k), grid) for k, grid in enumerate(problem.grids)])
        held = [id(p) for plan in plans for bundle in plan.bundles for p in bundle]
        assert sorted(held) == sorted(id(p) for p in problem.params)  # each in one plan
        shared = sum(len(set(grid.params())) for grid in problem.grids) > len(problem.params)
        assert len(plans) == 1 if room > 1 else len(plans) > 1 or shared
        found.append(few_steps(problem, "fixed-quotient"))
    close(found[0], found[1], 1e-5)
