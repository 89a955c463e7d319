"""Steepest directions within the tangent spaces of all geometries, against convex solvers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rankfold import steepest
from rankfold.geometries import Pair

from .points import GRIDS, Case
from .schatten_cases import (
    EXPONENTS,
    Projection,
    best_value,
    norm_error,
    norm_of,
    orthonormal,
    share,
    step_direction,
)

# Cores -------------------------------------------------------------------------------------------


def corner_of(r: int, symmetric: bool) -> Projection:
    """Normal is the last block and, for isometries, the symmetric part of the first."""

    def normal(core: Tensor) -> Tensor:
        kept = torch.zeros_like(core)
        kept[..., r:, r:] = core[..., r:, r:]
        first = core[..., :r, :r]
        kept[..., :r, :r] = symmetric * (first + first.mT) / 2
        return kept

    return normal


def grid_of(i: int, j: int, r: int) -> Projection:
    """Normal is what no Ω_i − Ψ_j in all blocks, X below and Y beside them is."""
    basis = []
    for part in range(i + j + 2):
        for entry in range(r * r):
            x = torch.zeros(i + 1, j + 1, r, r, dtype=torch.float64)
            unit = torch.zeros(r * r, dtype=torch.float64)
            unit[entry] = 1.0
            one = unit.view(r, r)
            if part < i:
                x[part, :j] = one - one.mT
            elif part < i + j:
                x[:i, part - i] = one - one.mT
            elif part == i + j:
                x[i, :j] = one
            else:
                x[:i, j] = one
            basis.append(x.transpose(1, 2).reshape((i + 1) * r, (j + 1) * r))
    q = orthonormal(torch.stack(basis).flatten(1).mT)

    def normal(core: Tensor) -> Tensor:
        flat = core.flatten(-2) if core.shape[-2:] == basis[0].shape else core.mT.flatten(-2)
        return core - (flat @ q.to(core) @ q.mT.to(core)).view(core.shape)

    return normal


def cores() -> list[tuple[str, Tensor, Projection]]:
    generator = torch.Generator().manual_seed(5)
    r = 5

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    fall = 10 ** torch.linspace(0, -2, r, dtype=torch.float64)
    found: list[tuple[str, Tensor, Projection]] = []
    for inner, decay in ((1.0, 0.0), (5.0, 0.0), (0.1, 0.0), (1.0, 1.0)):
        k, x, y = inner * draw(r, r), draw(r, r) * fall**decay, draw(r, r)
        blocks = torch.cat([torch.cat([k, y], 1), torch.cat([x, x], 1)])
        wide = torch.cat([torch.cat([blocks, blocks], 1), draw(r, 4 * r) * inner])[:, : 4 * r]
        for name, core, normal in (
            ("fixed", blocks, corner_of(r, False)),
            ("isometry", blocks, corner_of(r, True)),
            ("factor", blocks[:, :r], corner_of(r, True)),
            ("grid", wide, grid_of(2, 3, r)),
        ):
            found.append((name, core - normal(core), normal))
    return found


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("which", range(16))
def test_tangent_directions_against_a_convex_solver(which: int, p: float) -> None:
    _, core, normal = cores()[which]
    best = best_value(core, normal, p)
    for dtype in (torch.float32, torch.float64):
        rounding = 100 * torch.finfo(dtype).eps
        found, value = steepest.steepest_tangent(core.to(dtype)[None], normal, p, 2.0**-23)
        direction = found[0].double()
        assert normal(direction).abs().max() < rounding
        assert norm_of(direction, p) < 1 + norm_error(p, dtype)
        reached = float((core * direction).sum())
        assert float(value[0]) == pytest.approx(reached, rel=rounding)
        assert share(p) * best < reached < best * (1.01 if p == 1 else 1 + 1e-5)


@pytest.mark.parametrize("p", EXPONENTS)
def test_cores_near_rank_one_in_float32(p: float) -> None:
    """What is rounding beside the largest singular value changes nothing that can be seen."""
    for name, core, normal in cores()[:4]:
        u, s, vh = torch.linalg.svd(core)
        for decay in (1e-3, 1e-6, 0.0):
            values = s[0] * decay ** torch.arange(len(s), dtype=torch.float64).clamp_max(1)
            low = (u[:, : len(s)] * values) @ vh[: len(s)]
            low = low - normal(low)
            found, _ = steepest.steepest_tangent(low.float()[None], normal, p, 2.0**-23)
            best = best_value(low, normal, p)
            assert float((low * found[0]).sum()) > 0.95 * best, (name, decay)
            assert norm_of(found[0].double(), p) < 1.02


# Steps -------------------------------------------------------------------------------------------


def tangent_basis(case: Case, point: Pair, k: int) -> Tensor:
    """An orthonormal basis of the tangent space of the stacked products of member ``k``."""
    columns = []
    for side in (0, 1):
        for b, block in enumerate(point[side][k]):
            rows, r = block.shape
            if case.geometry.isometry:
                full = torch.linalg.qr(block, mode="complete").Q
                full[:, :r] = block
                skews = [(a, c) for a in range(r) for c in range(a)]
                moves = []
                for a, c in skews:
                    omega = torch.zeros(r, r, dtype=torch.float64)
                    omega[a, c], omega[c, a] = 1.0, -1.0
                    moves.append(block @ omega)
                outer = torch.eye(rows - r, dtype=torch.float64)
                moves += [
                    full[:, r:] @ torch.outer(e, f)
                    for e in outer
                    for f in torch.eye(r, dtype=torch.float64)
                ]
            else:
                moves = list(torch.eye(rows * r, dtype=torch.float64).view(-1, rows, r))
            for move in moves:
                change = [torch.zeros_like(x[k]) for x in point]
                change[side][b] = move
                left, right = (x[k].flatten(0, 1) for x in point)
                d_left, d_right = (x.flatten(0, 1) for x in change)
                columns.append((d_left @ right.mT + left @ d_right.mT).flatten())
    return orthonormal(torch.stack(columns, 1))


@pytest.mark.parametrize("p", [1.0, 1.5, 4.0, math.inf])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", [(6, 5), (3, 5), (3, 3)])
@pytest.mark.parametrize("name", ["fixed-embedded", "isometry-embedded"])
def test_directions_downstairs(
    name: str, shape: tuple[int, int], grid: tuple[int, int], p: float
) -> None:
    """Against the dense problem in the tangent space of the stacked products."""
    case = Case(name, *grid, *shape, 3, 1)
    point = case.point()
    z, grad = case.ambient(point, 10)
    _, moved = step_direction(case, point, grad, f"schatten-{p:g}")
    for k in range(2):
        basis = tangent_basis(case, point, k)

        def normal(x: Tensor, basis: Tensor = basis) -> Tensor:
            return x - (basis @ (basis.mT @ x.flatten())).view_as(x)

        assert normal(moved[k]).abs().max() < 1e-9
        assert norm_of(moved[k], p) < 1.01
        best = best_value(z[k] - normal(z[k]), normal, p)
        assert share(p) * best < float((z[k] * moved[k]).sum()) < 1.01 * best


@pytest.mark.parametrize("p", [1.0, 1.5, 4.0, math.inf])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("name", "weight"), [("isometry-quotient", 1.0), ("isometry-canonical", 0.5)]
)
def test_directions_upstairs(name: str, weight: float, grid: tuple[int, int], p: float) -> None:
    """Against the dense problem in the block-diagonal matrix whose singular values count."""
    case = Case(name, *grid, 6, 5, 3, 2)
    point = case.point()
    _, grad = case.ambient(point, 10)
    moved, _ = step_direction(case, point, grad, f"schatten-{p:g}")
    counts, root = (case.rights, case.lefts), math.sqrt(weight)
    for k in range(2):
        duals, found = [], []
        for count, u, g, d in zip(counts, point, grad, moved, strict=True):
            for b in range(u.shape[1]):
                off = torch.linalg.qr(u[k, b], mode="complete").Q[:, case.r :]
                inner = u[k, b].mT @ d[k, b]
                assert (inner + inner.mT).abs().max() < 1e-9
                times = math.sqrt(count)
                found.append(times * torch.cat([root * inner, off.mT @ d[k, b]]))
                overlap = u[k, b].mT @ g[k, b]
                # In the coordinates of the metric a differential ⟨G, ·⟩ is this core.
                part = torch.cat([(overlap - overlap.mT) / 2 / root, off.mT @ g[k, b]])
                duals.append(part / times)
        heights = [x.shape[0] for x in duals]

        def normal(x: Tensor, heights: list[int] = heights) -> Tensor:
            kept, row, r = x.clone(), 0, case.r
            for b, height in enumerate(heights):
                columns = slice(b * r, (b + 1) * r)
                first = x[row : row + r, columns]
                kept[row : row + height, columns] = 0
                kept[row : row + r, columns] = (first + first.mT) / 2
                row += height
            return kept

        core, direction = torch.block_diag(*duals), torch.block_diag(*found)
        assert norm_of(direction, p) < 1.01
        best = best_value(core, normal, p)
        assert share(p) * best < float((core * direction).sum()) < 1.01 * best
