"""The direct path, which moves blocks by their addresses, against the path by bundles."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold import Factor, Grid, RiemannianSGD, direct, kernels, stacks, workspace
from rankfold.geometries import GEOMETRIES, Pair
from rankfold.stacks import Plan, grad_of, itself
from rankfold.together import as_one

from .interpreted import rounded
from .moving_cases import (
    CUDA,
    DEVICE,
    INTERPRETED,
    LAYERS,
    LAYOUTS,
    M,
    Maker,
    Problem,
    R,
    close,
    every_layout,
    few_steps,
    results,
    step,
)

TRITON = find_spec("triton") is not None

in_kernels = pytest.mark.skipif(not (INTERPRETED or CUDA), reason="run by test_in_interpreter")
on_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
plain = pytest.mark.skipif(INTERPRETED, reason="has no kernels to interpret")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@pytest.mark.skipif(INTERPRETED or CUDA or not TRITON, reason="the tests below run themselves")
def test_in_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, addresses on the CPU are as good as any."""
    if INTERPRETED or CUDA:
        monkeypatch.setattr(direct, "_DEVICE_TYPES", (DEVICE,))
        monkeypatch.setattr(kernels, "enabled", True)
        if not CUDA:
            # What a GPU has to have, Triton's interpreter does without.
            monkeypatch.setattr(kernels, "available", lambda device: kernels.enabled)
        assert kernels._importable()  # imports them


def everything(stack: stacks.Stack) -> slice:
    return slice(0, len(stack.members))


def random_like(pair: Pair, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return Pair(*(torch.randn(x.shape, generator=generator).to(DEVICE) for x in pair))


# The direct path ---------------------------------------------------------------------------------


@in_kernels
@every_layout
@dtypes
def test_reads_what_bundles_hold(layout: str, dtype: torch.dtype) -> None:
    problem = Problem(layout, dtype)
    problem.gradients(turned=True)
    assert all(direct.eligible(stack) for stack in problem.plan.stacks)
    mover = direct.Direct(problem.plan.stacks, {"weight": itself, "grad": grad_of})
    for kind, of in (("weight", itself), ("grad", grad_of)):
        buffers = problem.plan.gather(of)
        for stack in problem.plan.stacks:
            read = mover.read(kind, stack, everything(stack))
            for ours, theirs in zip(read, stack.read(buffers), strict=True):
                assert ours.is_contiguous()
                assert torch.equal(ours, theirs)


@in_kernels
def test_both_sides_are_gathered_behind_each_other() -> None:
    """So that a step can take them for one stack."""
    sides = [[torch.nn.Parameter(torch.randn(M, R, device=DEVICE)) for _ in range(3)] for _ in "ab"]
    plan = Plan([(str(k), Grid(a, b)) for k, (a, b) in enumerate(zip(*sides, strict=True))])
    (stack,) = plan.stacks
    pair = direct.Direct([stack], {"weight": itself}).read("weight", stack, everything(stack))
    one = as_one(*pair)
    assert one.data_ptr() == pair.left.data_ptr()
    assert torch.equal(one.flatten(0, 1), torch.stack([*sides[0], *sides[1]]))


@in_kernels
def test_stacked_parameters_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in chunks, and the step is the one of parameters that are gathered."""

    def steps(split: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        a, b = (torch.randn(6, M, R, generator=generator).to(DEVICE) for _ in range(2))
        z = torch.randn(6, M, M, generator=generator).to(DEVICE)
        stacked, grads = (a, b), (z @ b, z.mT @ a)
        if split:
            left, right = ([torch.nn.Parameter(x) for x in side] for side in stacked)
            grids = [Grid(a, b) for a, b in zip(left, right, strict=True)]
        else:
            left, right = ([torch.nn.Parameter(x)] for x in stacked)
            grids = [Grid(left[0], right[0], groups=6)]
        for side, g in zip((left, right), grads, strict=True):
            for p, each in zip(side, g if split else [g], strict=True):
                p.grad = each.clone()
        optimizer = RiemannianSGD(grids, 0.1, geometry="fixed-quotient", momentum=0.9)
        for _ in range(3):
            optimizer.step()
        return [torch.stack([p.detach() for p in side]).view(6, M, R) for side in (left, right)]

    for most in (workspace._WORKSPACE_BYTES, 4 * 8 * 2 * M * R * 2):
        monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", most)
        monkeypatch.setattr(workspace, "_OF_FACTORS", 0)
        expected = steps(split=True)
        with monkeypatch.context() as patch:
            patch.setattr(kernels.moving, "gather", None)
            found = steps(split=False)
        assert all(map(torch.equal, found, expected))


@in_kernels
@every_layout
@dtypes
@torch.no_grad()
def test_writes_its_own_blocks_alone(layout: str, dtype: torch.dtype) -> None:
    ours, theirs = Problem(layout, dtype), Problem(layout, dtype)
    buffers = theirs.plan.gather(itself)
    mover = direct.Direct(ours.plan.stacks, {"weight": itself})
    versions = [p._version for p in ours.params]
    for k, (stack, other) in enumerate(zip(ours.plan.stacks, theirs.plan.stacks, strict=True)):
        before = mover.read("weight", stack, everything(stack))
        new = random_like(before, seed=k)
        mover.write(stack, everything(stack), new, None)
        other.write(buffers, Pair(*(rounded(x, dtype).float() for x in new)))
    theirs.plan.scatter(buffers, itself)
    for x, y in zip(ours.make.memory, theirs.make.memory, strict=True):
        assert torch.equal(x, y)
    assert all(p._version > old for p, old in zip(ours.params, versions, strict=True))


@in_kernels
@every_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_where_they_still_hold(layout: str, dtype: torch.dtype) -> None:
    """A master counts where it rounds to the weight, and is written along with it."""
    problem = Problem(layout, dtype)
    masters = {}
    for k, p in enumerate(problem.params):
        generator = torch.Generator().manual_seed(k)
        masters[id(p)] = torch.randn(p.shape, generator=generator).to(DEVICE)
        with torch.no_grad():
            p.copy_(rounded(masters[id(p)], dtype))
            p[..., ::3, 1::2] += 1
            p[..., 0, 0] = torch.nan

    def master_of(p: Tensor) -> Tensor:
        return masters[id(p)]

    def merged(p: Tensor) -> Tensor:
        kept = masters[id(p)]
        return torch.where(rounded(kept, dtype) == p, kept, p.float())

    mover = direct.Direct(problem.plan.stacks, {"weight": itself, "master": master_of})
    buffers = {
        k: torch.stack([merged(p) for p in bundle]) for k, bundle in enumerate(problem.plan.bundles)
    }
    written = [random_like(stack.read(buffers), seed=2) for stack in problem.plan.stacks]
    assert any(buffer.isnan().any() for buffer in buffers.values())
    for stack, new in zip(problem.plan.stacks, written, strict=True):
        read = mover.read("weight", stack, everything(stack))
        for ours, theirs in zip(read, stack.read(buffers), strict=True):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
        mover.write(stack, everything(stack), new, None)
    weights = problem.plan.gather(itself)
    kept = problem.plan.gather(master_of)
    for stack, new in zip(problem.plan.stacks, written, strict=True):
        for low, full, x in zip(stack.read(weights), stack.read(kept), new, strict=True):
            assert torch.equal(full, x)
            assert torch.equal(low, rounded(x, dtype).float())


@in_kernels
@dtypes
@pytest.mark.parametrize("r", [1, 20, 64, *([100, 128] if CUDA else [])])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sides", [[3], [1, 2], [2, 1]])
def test_tall_blocks_take_several_programs(
    dtype: torch.dtype, r: int, aligned: bool, sides: list[int]
) -> None:
    """In each orientation and in none; vectors of 16 bytes are allowed where they fit."""
    m = 4 * 73 if aligned else 291
    width = 4 * r + (0 if aligned else 1)
    width += -width % 8 if aligned else 0
    generator = torch.Generator().manual_seed(0)
    upright = torch.randn(m, width, generator=generator).to(DEVICE, dtype)
    lying = torch.randn(r, m + (-m % 8 if aligned else 0), generator=generator).to(DEVICE, dtype)
    apart = torch.randn(2 * m, 16 * r, generator=generator).to(DEVICE, dtype)
    blocks = [upright[:, :r], lying[:, :m].T, apart[::2, ::16]]
    entries = torch.tensor([[x.data_ptr(), *x.stride()] for x in blocks], device=DEVICE)
    tables = [
        kernels.moving.Table(part, dtype, m, r, aligned and r > 1) for part in entries.split(sides)
    ]
    room = kernels.moving.room_for(*tables)
    kernels.moving.gather(*map(kernels.moving.Move, tables, room))
    assert torch.equal(torch.cat(room), torch.stack(blocks).float())
    whole = [x.clone() for x in (upright, lying, apart)]
    values = torch.randn(3, m, r, generator=generator).to(DEVICE)
    parts = [part.clone() for part in values.split(sides)]  # which lie apart
    kernels.moving.scatter(*map(kernels.moving.Move, tables, parts))
    expected = [whole[0][:, :r], whole[1][:, :m].T, whole[2][::2, ::16]]
    for x, new in zip(expected, rounded(values, dtype), strict=True):
        x.copy_(new)
    for x, y in zip((upright, lying, apart), whole, strict=True):
        assert torch.equal(x, y)


@in_kernels
@dtypes
@pytest.mark.parametrize("mastered", [False, True])
@pytest.mark.parametrize("r", [20, 100])
def test_a_step_on_the_way(dtype: torch.dtype, mastered: bool, r: int) -> None:
    """In each orientation and in none, as if it had been made before, and masters unrounded."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def blocks(dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        wholes = [x.to(dtype) for x in (randn(70, 2 * r), randn(r, 77), randn(140, 3 * r))]
        parts = [wholes[0][:, :r], wholes[1][:, :70].T, wholes[2][::2, ::3]]
        entries = torch.tensor([[x.data_ptr(), *x.stride()] for x in parts], device=DEVICE)
        return kernels.moving.Table(entries, dtype, 70, r, False), parts

    point, along, scale = randn(3, 70, r), randn(3, 70, r), randn(3)
    alive = torch.tensor([True, False, True], device=DEVICE)
    (table, found), (masters, full) = blocks(dtype), blocks(torch.float32)
    move = kernels.moving.Move(table, point, masters if mastered else None, along)
    kernels.moving.scatter(move, step=kernels.moving.Step(scale, alive))
    for k, new in enumerate(kernels.moves.step(point, along, scale, alive)):
        assert torch.equal(found[k], rounded(new, dtype))
        assert not mastered or torch.equal(full[k], new)


@in_kernels
@pytest.mark.parametrize("blocks", [(3, 1), (2, 4)])
@pytest.mark.parametrize("m", [33, 1200])
def test_a_step_of_both_sides(blocks: tuple[int, int], m: int) -> None:
    """Of members with a number of blocks of their own on either side; one tile, and several."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.5, 2.0, -1.0]).to(DEVICE)
    alive = torch.tensor([True, False, True]).to(DEVICE)
    moves, expected, found = [], [], []
    for count in blocks:
        point, along = torch.randn(2, 3, count, m, 5, generator=generator).to(DEVICE)
        written = torch.zeros(3 * count, m, 5, device=DEVICE)
        entries = torch.tensor([[x.data_ptr(), *x.stride()] for x in written], device=DEVICE)
        table = kernels.moving.Table(entries, torch.float32, m, 5, False)
        moves.append(kernels.moving.Move(table, point.flatten(0, 1), None, along.flatten(0, 1)))
        expected.append(kernels.moves.step(point, along, scale, alive).flatten(0, 1))
        found.append(written)
    kernels.moving.scatter(*moves, step=kernels.moving.Step(scale, alive))
    assert all(map(torch.equal, found, expected))


@in_kernels
def test_a_table_is_made_anew_only_when_a_tensor_moves() -> None:
    problem = Problem("neox")
    problem.gradients()
    side = problem.plan.stacks[0].sides.left

    def table() -> Any:
        return side.table("grad", side.tensors(grad_of))

    first = table()
    assert table() is first
    for p in problem.params:
        assert p.grad is not None
        p.grad.mul_(2)
    assert table() is first
    kept = [p.grad for p in problem.params]
    problem.gradients()
    assert kept
    second = table()
    assert second is not first
    for p in problem.params:
        assert p.grad is not None
        p.grad = p.grad.mT.contiguous().mT
    assert table() is not second


@in_kernels
def test_gradients_of_another_dtype() -> None:
    """torch allows them where asked; they last until they are read."""
    problem = Problem("neox", torch.float16)
    wide = {id(p): torch.randn(p.shape, dtype=torch.float64, device=DEVICE) for p in problem.params}
    mixed = dict(wide)
    first = id(problem.plan.stacks[0].sides.left.params[0])
    mixed[first] = wide[first].float()
    for grads in (wide, mixed):
        mover = direct.Direct(problem.plan.stacks, {"grad": lambda p, g=grads: g[id(p)]})  # type: ignore[misc]
        junk = [torch.full(p.shape, 7.0, device=DEVICE) for p in problem.params]
        assert junk
        buffers = problem.plan.gather(lambda p, g=grads: g[id(p)])  # type: ignore[misc]
        for stack in problem.plan.stacks:
            read = mover.read("grad", stack, everything(stack))
            assert all(map(torch.equal, read, stack.read(buffers)))


@in_kernels
def test_state_of_another_shape_is_refused() -> None:
    problem = Problem("linears")
    optimizer = problem.optimizer("fixed-quotient")
    problem.gradients()
    step(optimizer)
    last = problem.params[-1]
    optimizer.state[last]["momentum"] = optimizer.state[last]["momentum"][:-1]
    before = [p.detach().clone() for p in problem.params]
    with pytest.raises(RuntimeError, match="of shape"):
        optimizer.step()
    assert all(map(torch.equal, problem.params, before))


class Subclass(Tensor):
    pass


@in_kernels
def test_who_is_eligible(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(torch.float32)

    def eligible(*factors: Any) -> bool:
        (stack,) = Plan([("g", Grid(*factors))]).stacks
        return direct.eligible(stack)

    def other(dtype: torch.dtype) -> Tensor:
        return make(M, R).detach().to(dtype)

    assert eligible(make(M, R), make(M, R))
    assert eligible(make(M, R), other(torch.bfloat16))
    assert not eligible(Factor(make(M, R), bias=make(R)), make(M, R))
    assert not eligible([make(M, R), make(M + 1, R)], make(M, R))
    assert not eligible([make(M, R), other(torch.bfloat16)], make(M, R))
    assert not eligible(make(M, R), other(torch.float64))
    assert eligible(make(128, 128), make(130, 128))
    assert not eligible(make(129, 129), make(129, 129))
    assert not eligible(make(M, R).detach().as_subclass(Subclass), make(M, R))
    assert not eligible(make(M, R).to("meta"), make(M, R).to("meta"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not eligible(make(M, R), make(M, R))
    monkeypatch.setattr(kernels, "enabled", False)
    assert not eligible(make(M, R), make(M, R))


@plain
def test_bundles_move_what_is_on_the_cpu() -> None:
    (stack,) = Plan([("g", Grid(torch.randn(M, R), torch.randn(M, R)))]).stacks
    assert not direct.eligible(stack)


# Whole steps -------------------------------------------------------------------------------------


@in_kernels
@every_layout
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
)
@pytest.mark.parametrize("geometry", GEOMETRIES if CUDA else ["fixed-quotient"])
@pytest.mark.parametrize("without", ["moving", *(["kernels"] if CUDA else [])])
@pytest.mark.parametrize("room", [*([None] if CUDA else []), 3000])
def test_a_step_is_the_same_by_either_path(
    layout: str,
    dtype: torch.dtype,
    geometry: str,
    without: str,
    room: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the direct path alone, or on a GPU without any kernel at all."""
    if room is not None:
        monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", room)
    problem = Problem(layout, dtype)
    assert all(direct.eligible(stack) for stack in problem.plan.stacks)
    ours = few_steps(problem, geometry)
    if without == "moving":
        monkeypatch.setattr("rankfold.movers.eligible", lambda stack: False)
    else:
        monkeypatch.setattr(kernels, "enabled", False)
    theirs = few_steps(Problem(layout, dtype), geometry)
    # A weight next to the middle between two it can be rounded to may go either way.
    close(ours, theirs, 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps)


@in_kernels
@pytest.mark.parametrize("layout", LAYOUTS if CUDA else ["linears"])
@pytest.mark.parametrize(
    ("geometry", "momentum"),
    [("fixed-quotient", 0.0), ("isometry-quotient", 0.9), ("isometry-canonical", 0.0)],
)
def test_steps_of_large_ranks(
    layout: str, geometry: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kernels that these take; one of them ends in parameters, with no copy in between."""
    theirs = few_steps(Problem(layout), geometry, momentum=momentum)
    stepped, scatter = [], kernels.moving.scatter

    def watched(*moves: Any, step: Any) -> None:
        stepped.append(step is not None)
        scatter(*moves, step=step)

    monkeypatch.setattr(kernels.moving, "scatter", watched)
    monkeypatch.setattr(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
    monkeypatch.setattr(kernels, "serve_small", lambda *x: False)
    ours = few_steps(Problem(layout), geometry, momentum=momentum)
    close(ours, theirs, 1e-4)
    assert any(stepped) == (geometry == "fixed-quotient")


@in_kernels
def test_both_paths_share_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stack by bundles, which write back whole weights, and one directly."""
    direct_too = few_steps(Problem("fused-parts"), "fixed-quotient")

    def of_one_shape(stack: stacks.Stack) -> bool:
        return len(stack.members) == LAYERS

    monkeypatch.setattr("rankfold.movers.eligible", of_one_shape)
    problem = Problem("fused-parts")
    assert sorted(map(of_one_shape, problem.plan.stacks)) == [False, True]
    mixed = few_steps(problem, "fixed-quotient")
    monkeypatch.setattr("rankfold.movers.eligible", lambda stack: False)
    close(mixed, few_steps(Problem("fused-parts"), "fixed-quotient"), 1e-5)
    close(mixed, direct_too, 1e-5)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_keeps_its_addresses(dtype: torch.dtype) -> None:
    """Gradients allocated by the graph, and eager steps between its recording and its replay."""

    def run(recorded: bool) -> list[Tensor]:
        problem = Problem("neox", dtype)
        lr = torch.tensor(0.02, device=DEVICE)
        optimizer = problem.optimizer("fixed-quotient", lr=lr, capturable=True)
        problem.gradients()
        sources = {id(p): grad_of(p).clone() for p in problem.params}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(optimizer)
            problem.gradients()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)

        def again() -> None:
            optimizer.zero_grad()
            for p in problem.params:
                p.grad = sources[id(p)] * 2
            optimizer.step()

        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        if recorded:
            with torch.cuda.graph(graph):
                again()
        # Recording has run nothing: eager steps cannot use what the graph is to fill.
        for p in problem.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        optimizer.step()
        problem.gradients()
        junk = []
        for _ in range(3):
            optimizer.step()
            junk.append([p.grad for p in problem.params])
            problem.gradients()
        junk.append([torch.full((100,), 2**60, device=DEVICE) for _ in range(50)])
        for _ in range(2):
            graph.replay() if recorded else again()
        return results(problem, optimizer)

    close(run(True), run(False), 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)
