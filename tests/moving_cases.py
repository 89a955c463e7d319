"""Parameters in many layouts with random gradients, for tests of how they are moved."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import Factor, Grid
from rankfold.stacks import Plan

# As for the r×r kernels: without a GPU, Triton's interpreter in a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"

M, R, HEADS, GROUPS, LAYERS = 10, 3, 4, 2, 3
MARGIN = 8  # elements of memory around each parameter, which nothing may touch


class Maker:
    """Parameters with random values, and memory of their own around them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.memory: list[Tensor] = []

    def __call__(self, *shape: int, turned: bool = False) -> nn.Parameter:
        size = math.prod(shape)
        memory = torch.randn(size + 2 * MARGIN, generator=self.generator).to(DEVICE, self.dtype)
        self.memory.append(memory)
        inner = memory[MARGIN:-MARGIN]
        if turned:
            return nn.Parameter(inner.view(*shape[:-2], shape[-1], shape[-2]).mT)
        return nn.Parameter(inner.view(shape))


def linears(make: Maker) -> list[Grid]:
    """Grouped attention on linears: two sources, both orientations."""
    grids = []
    for _ in range(LAYERS):
        q, o = make(HEADS * R, M), make(M, HEADS * R)
        k, v = make(GROUPS * R, M), make(GROUPS * R, M)
        left, right = Factor(q, axis=0, blocks=HEADS), Factor(k, axis=0, blocks=GROUPS)
        grids.append(Grid(left, right, groups=GROUPS))
        left, right = Factor(o, axis=1, blocks=HEADS), Factor(v, axis=0, blocks=GROUPS)
        grids.append(Grid(left, right, groups=GROUPS))
    return grids


def neox(make: Maker) -> list[Grid]:
    """q, k and v of each head side by side in one weight, and a remainder that no grid covers."""
    grids = []
    for _ in range(LAYERS):
        fused, o = make(3 * HEADS * R + 2, M), make(M, HEADS * R)
        q, k, v = (
            Factor(fused, axis=0, rank=R, blocks=HEADS, start=p * R, stride=3 * R) for p in range(3)
        )
        grids.append(Grid(q, k, groups=HEADS))
        grids.append(Grid(Factor(o, axis=1, blocks=HEADS), v, groups=HEADS))
    return grids


def fused_parts(make: Maker) -> list[Grid]:
    """Two stacks of different shapes read different parts of one weight."""
    grids = []
    for _ in range(LAYERS):
        fused, k, o = make(M, 5 * R), make(M, R), make(M + 2, 4 * R)
        grids.append(Grid(Factor(fused, rank=R), k))
        grids.append(Grid(Factor(fused, rank=R, blocks=4, start=R), Factor(o, blocks=4), groups=4))
    return grids


def experts(make: Maker) -> list[Grid]:
    """Leading dimensions, blocks inside them, and stacks stored as stacks."""
    up, down = make(2, 3, M, 2 * R), make(2, 3, R, M - 2)
    return [
        Grid(Factor(up, blocks=2), Factor(down, axis=2), groups=6),
        Grid(make(5, M, R), make(5, M + 1, R), groups=5),
    ]


def lists(make: Maker) -> list[Grid]:
    """Several factors a side, one of them not contiguous, in members that cut across them."""
    return [
        Grid(
            [make(M, R), Factor(make(2 * R + 1, M), axis=0, blocks=2, start=1), make(3, M, R)],
            [make(M, R, turned=True), Factor(make(R, M, turned=True), axis=0)],
            groups=2,
        )
        for _ in range(LAYERS)
    ]


LAYOUTS: dict[str, Callable[[Maker], list[Grid]]] = {
    "linears": linears,
    "neox": neox,
    "fused-parts": fused_parts,
    "experts": experts,
    "lists": lists,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Problem:
    """Grids of one layout, and gradients for them that do not depend on what they are."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32) -> None:
        self.make = Maker(dtype)
        self.grids = LAYOUTS[layout](self.make)
        self.params = list({id(p): p for grid in self.grids for p in grid.params()}.values())
        self.plan = Plan([(f"g{k}", grid) for k, grid in enumerate(self.grids)])
        self.generator = torch.Generator().manual_seed(1)

    def gradients(self, turned: bool = False) -> None:
        """New ones in new memory, optionally with other strides than the parameters have."""
        for p in self.params:
            grad = torch.randn(p.shape, generator=self.generator).to(p.device, p.dtype)
            p.grad = grad.mT.contiguous().mT if turned else grad

    def optimizer(self, geometry: str, **options: Any) -> rankfold.RiemannianSGD:
        if geometry.startswith("isometry"):
            with pytest.warns(UserWarning, match="singular values"):
                rankfold.orthonormalize_(self.grids)
        values = {"lr": 0.02, "momentum": 0.9, **options}
        return rankfold.RiemannianSGD(self.grids, geometry=geometry, **values)


def step(optimizer: rankfold.RiemannianSGD) -> None:
    """Gradients here are random, and the first look says so."""
    with pytest.warns(UserWarning, match="inconsistent"):
        optimizer.step()


def results(problem: Problem, optimizer: rankfold.RiemannianSGD) -> list[Tensor]:
    state = [x for p in problem.params for x in optimizer.state[p].values()]
    return [x.detach().double().cpu() for x in (*problem.params, *state)]


def few_steps(problem: Problem, geometry: str, **options: Any) -> list[Tensor]:
    """Steps whose gradients come to lie in other memory, and with other strides."""
    optimizer = problem.optimizer(geometry, **options)
    kept = []
    for turned in (False, True, False):
        optimizer.zero_grad()
        problem.gradients(turned)
        kept.append([p.grad for p in problem.params])
        if len(kept) > 1:
            optimizer.step()
        else:
            step(optimizer)
    return results(problem, optimizer)


def close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() <= tolerance * y.norm()
