"""Every kernel compiles for a GPU where there is none: launches are caught, and compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold import Factor, Grid, RiemannianSGD, direct, kernels, rank_core, recommended, tall
from rankfold.geometries import GEOMETRIES, Pair, geometry_for
from rankfold.lab.optimizers import WideAdamW
from rankfold.whitening import TILTS, Manner, _numbers

from .interpreted import INTERPRETED
from .points import options
from .watching import Holding, Launches

triton: Any = pytest.importorskip("triton")
compiler: Any = pytest.importorskip("triton.compiler")
backends: Any = pytest.importorskip("triton.backends.compiler")
runtime: Any = pytest.importorskip("triton.runtime.jit")

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

HOPPER = ("cuda", 90, 32)
ARITHMETIC = "add|sub|mul|fma|mad|div|sqrt|rcp|min|max|neg|abs|setp|selp"
SHARED_MEMORY = 227 * 1024
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.bool: "*u1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiled:
    """What was launched: names of kernels, each compiled once for the types it was given.

    Python's floats are float32 in a launch, and float64 in one that torch's compiler makes.
    """

    def __init__(self) -> None:
        self.kernels: dict[Any, Any] = {}
        self.floats = "fp32"

    @property
    def names(self) -> set[str]:
        return {key[0] for key in self.kernels}

    def take(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: named.pop(name) for name in kernel.arg_names if name in named}
        constant = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        types, attributes = {}, {}
        for k, name in enumerate(kernel.arg_names):
            value = given[name]
            if name in constant:
                types[name] = "constexpr"
            elif isinstance(value, Tensor):
                types[name] = TYPES[value.dtype]
            else:
                types[name] = self.floats if isinstance(value, float) else "i32"
            if isinstance(value, Tensor) or (types[name] == "i32" and value % 16 == 0):
                attributes[(k,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, str(types), str(constant), str(attributes), str(named))
        if key not in self.kernels:
            source = compiler.ASTSource(kernel, types, constant, attributes)
            target = backends.GPUTarget(*HOPPER)
            self.kernels[key] = triton.compile(source, target=target, options=named)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    found = Compiled()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.take(self, args, named)

    monkeypatch.setattr(runtime.JITFunction, "run", run)
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
    assert kernels._importable()
    yield found
    for kernel in found.kernels.values():
        assert kernel.metadata.shared <= SHARED_MEMORY
        assert kernel.asm["cubin"]


def steps(rank: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """A step of every geometry, through the kernels that a GPU would take."""
    monkeypatch.setattr(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
    monkeypatch.setattr(kernels, "serve_small", lambda *x: kernels.serve(*x) and rank <= 64)
    for name in GEOMETRIES:
        geometry = geometry_for(name, 1, 1)
        point, grad, held = (
            Pair(*(torch.randn(3, 1, 2 * rank, rank) for _ in range(2))) for _ in range(3)
        )
        opts = options(geometry.retractions[0], 0.05, **{"momentum": 0.9, **changes})
        geometry.step(point, grad, held, opts)


def test_small_ranks(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(64, monkeypatch)
    wanted = {"_sums_kernel", "_combine_kernel", "_square_kernel"}
    wanted |= {"_fixed_core_kernel", "_isometry_moves_kernel", "_landing_kernel"}
    assert wanted <= compiled.names


def test_whitened_steps(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(64, monkeypatch, normalize="whitened", nesterov=True)
    assert {"_inverse_root_kernel", "_even_kernel"} <= compiled.names


@pytest.mark.parametrize("tilt", TILTS)
def test_even_parts(tilt: float, compiled: Compiled) -> None:
    x, member = torch.randn(3, 1, 64, 64), torch.ones(3)
    manner = Manner(2.0**-23, tilt, 0.5, member > 0)
    kernels.whiten.even(x, x, member[:, None], member, manner.members, _numbers(1, manner))
    assert compiled.names == {"_even_kernel"}


def test_large_ranks(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(128, monkeypatch)
    wanted = {"_sums_kernel", "_combine_kernel", "_square_kernel", "_settle_kernel"}
    assert wanted <= compiled.names


TALL = {"_sums_kernel", "_combine_kernel", "_square_kernel", "_step_kernel", "_restore_kernel"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_both_sides_go_in_one_launch(
    name: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every product over rows in a step, where sides were gathered behind each other."""
    launched: list[tuple[str, tuple[int, ...]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launched.append((self.__name__, grid))

    monkeypatch.setattr(runtime.JITFunction, "run", run)
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
    monkeypatch.setattr(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
    monkeypatch.setattr(kernels, "serve_small", lambda *x: kernels.serve(*x))
    assert kernels._importable()
    geometry = geometry_for(name, 1, 1)
    point, grad, held = (Pair(*torch.randn(2, 5, 1, 48, 16)) for _ in range(3))
    told = options(geometry.retractions[0], 0.05, momentum=momentum)
    geometry.step(point, grad, held if momentum else None, told)
    over_rows = [grid for kernel, grid in launched if kernel in TALL]
    assert len(over_rows) >= 4
    assert all(10 in grid for grid in over_rows), over_rows


# Copies of its factors that a step holds at most: point, gradient or the new point, and the vector
# between them; the old momentum besides, and of embedded geometries the new one.
COPIES = {(name, 0.0): 3 for name in GEOMETRIES}
COPIES |= {(name, 0.9): 5 if name.endswith("-embedded") else 4 for name in GEOMETRIES}
COPIES["isometry-embedded", 0.9] = 6  # whose vector without its part in the span is another


class Imagined:
    """Two weights of four heads, and a GPU for them on which nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = [torch.nn.Parameter(torch.empty(64, 4096)) for _ in range(2)]
        with torch.no_grad():
            for each in self.weights:
                each.copy_(torch.linalg.qr(torch.randn(4096, 64)).Q.T)
                each.grad = each.detach().clone()  # on which both factors agree
        q, k = (Factor(each, axis=0, blocks=4) for each in self.weights)
        self.grid = Grid(q, k, groups=4, name="layer0.vo")
        self._monkeypatch = monkeypatch

    @property
    def factors(self) -> int:
        """Their size in bytes."""
        return sum(each.numel() * each.element_size() for each in self.weights)

    def watched_step(self, optimizer: RiemannianSGD, watcher: Any, launched: Any = None) -> None:
        """After others: one with plain operations, and a look at values of its own."""

        def run(*args: Any, **named: Any) -> None:
            if launched is not None:
                launched()

        replace = self._monkeypatch.setattr
        replace(runtime.JITFunction, "run", run)
        replace(tall, "can_ask", lambda x: False)
        replace(direct, "_DEVICE_TYPES", ("cpu",))
        optimizer.step()
        assert kernels._importable()
        replace(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
        replace(kernels, "serve_small", lambda *x: kernels.serve(*x))
        replace(kernels, "available", lambda device: True)
        replace(tall, "by_columns", lambda x: False)  # which is for a CPU alone
        optimizer.step()  # makes the tables of addresses
        with watcher:
            optimizer.step()


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> Imagined:
    return Imagined(monkeypatch)


@pytest.mark.parametrize(("name", "momentum"), COPIES)
def test_memory_of_a_step(name: str, momentum: float, imagined: Imagined) -> None:
    """As on a GPU, where parameters are gathered; launches allocate nothing, and are left out."""
    optimizer = RiemannianSGD(
        [imagined.grid], torch.tensor(0.05), geometry=name, momentum=momentum, capturable=True
    )
    held = Holding()
    imagined.watched_step(optimizer, held)
    # And r×r matrices, less than half a copy of factors this tall.
    copies = COPIES[name, momentum]
    assert copies <= held.most / imagined.factors < copies + 0.5


# Kernels and small operations of a step, without and with momentum. In a graph each takes a
# microsecond or two, however small it is.
LAUNCHES = {
    ("fixed-embedded", 0.0): 21,
    ("fixed-embedded", 0.9): 27,
    ("fixed-quotient", 0.0): 19,
    ("fixed-quotient", 0.9): 22,
    ("isometry-embedded", 0.0): 17,
    ("isometry-embedded", 0.9): 23,
    ("isometry-quotient", 0.0): 17,
    ("isometry-quotient", 0.9): 21,
    ("isometry-canonical", 0.0): 17,
    ("isometry-canonical", 0.9): 24,
    ("recommended", 0.8): 51,
}


@pytest.mark.parametrize(("name", "momentum"), LAUNCHES)
def test_launches_of_a_step(name: str, momentum: float, imagined: Imagined) -> None:
    lr = torch.tensor(0.05)
    optimizer = (
        recommended([imagined.grid], lr, capturable=True)
        if name == "recommended"
        else RiemannianSGD([imagined.grid], lr, geometry=name, momentum=momentum, capturable=True)
    )
    launches = Launches()
    imagined.watched_step(optimizer, launches, launches.add)
    assert launches.count <= LAUNCHES[name, momentum]


def moves(dtype: torch.dtype) -> None:
    """Launches of one side and of both, with a step on the way and without."""
    for blocks in (1, 4):
        entries = torch.zeros(blocks, 3, dtype=torch.int64)
        table = kernels.moving.Table(entries, dtype, 128, 64, True)
        masters = None if dtype == torch.float32 else table._replace(dtype=torch.float32)
        left, right = (
            kernels.moving.Move(table, room, masters, room)
            for room in kernels.moving.room_for(table, table)
        )
        step = kernels.moving.Step(torch.ones(1), torch.ones(1) > 0)
        for moves in ((left,), (left, right)):
            kernels.moving.gather(*moves)
            kernels.moving.scatter(*moves)
            kernels.moving.scatter(*moves, step=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving(dtype: torch.dtype, compiled: Compiled) -> None:
    moves(dtype)
    assert compiled.names == {"_gather_kernel", "_scatter_kernel"}


@pytest.mark.parametrize("size", [50257 * 16, 1000 * 7 + 1])
def test_adamw_in_one_pass(size: int, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda device: True)
    weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    for capturable in (False, True):
        WideAdamW([weight], 1e-3, 0.01, masters=True, capturable=capturable).step()
    (kernel,) = compiled.kernels.values()
    assert compiled.names == {"_adamw_kernel"}
    assert kernel.metadata.shared == 0  # numbers stay in the threads that loaded them


def of_special_steps() -> None:
    """Launches with masks of each kind and none, and of what is tilted, balanced or looks ahead."""
    x, rows, number = torch.randn(4, 1, 64, 64), torch.randn(4, 1, 200, 64), torch.randn(4)
    mask = number > 0
    for chosen in (None, mask):
        kernels.whiten.balanced(rows, 0.5, 2.0**-8, chosen)
        kernels.whiten.of_square(x, x[..., 0, 0], x[..., 1, 1], chosen)
        kernels.moves.step(rows, rows, number, chosen)
    kernels.moves.steps(rows, rows, number, 0.9)
    kernels.scalars.grown(number[:1].expand(4), number, 0.5, 0.5)
    kernels.scalars.total(x[:, 0, 0], x[:, 0, 1])
    kernels.quotient.product_square(x[:, 0], x[:, 0])
    counts = torch.zeros(4, 4, dtype=torch.long)
    for marks in ((None, None, None), (mask, torch.cat((mask, mask)), mask[:1].expand(4))):
        kernels.scalars.count(counts, mask, marks)


def of_small_matrices() -> None:
    """Launches of what steps take inside of larger kernels, or where guesses fail."""
    x = torch.randn(3, 64, 64)
    kernels.refine.inverse(x, x)
    kernels.refine.root(x)
    kernels.refine.best_rank_core(
        x, x, x, x, rank_core.rank_iterations(x.dtype), rank_core.left_to_move(x.dtype)
    )
    kernels.elimination.cholesky_inverse(x)


def written() -> set[str]:
    """The names of all kernels of the package."""
    modules = (x for x in vars(kernels).values() if isinstance(x, ModuleType))
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, runtime.JITFunction)
        and name.endswith("_kernel")
        and value.fn.__module__ == module.__name__
    }


def test_special_steps(compiled: Compiled) -> None:
    of_special_steps()
    assert {"_balanced_kernel", "_of_square_kernel", "_grown_kernel"} <= compiled.names


def test_every_kernel(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none goes on in float64, whatever the floats it is given."""
    compiled.floats = "fp64"
    of_special_steps()
    of_small_matrices()
    moves(torch.bfloat16)
    for told in ({}, {"normalize": "whitened", "nesterov": True}):
        steps(64, monkeypatch, **told)
    steps(128, monkeypatch)
    assert compiled.names >= written()
    for (name, *_), kernel in compiled.kernels.items():
        wide = re.findall(rf"\b(?:{ARITHMETIC})\S*\.f64\b", kernel.asm["ptx"])
        assert not wide, f"{name} computes in float64: {set(wide)}"


def test_small_matrices(compiled: Compiled) -> None:
    of_small_matrices()
    assert {"_inverse_kernel", "_root_kernel", "_best_rank_kernel"} <= compiled.names
