"""orthonormalize_: the nearest orthonormal factors, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import Factor, Grid, orthonormalize_

from .reference import ISOMETRIES
from .toys import Toy, clones, same_bits, saying, train, unchanged

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
Blocks = list[Tensor]


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def expected_polar(block: Tensor) -> Tensor:
    """X (XᵀX)^(-1/2), by an eigendecomposition."""
    wide = block.detach().double()
    values, vectors = torch.linalg.eigh(wide.mT @ wide)
    return wide @ (vectors * values.rsqrt()) @ vectors.mT


# Grids, and a function that cuts their factors out of the parameters by hand.
Problem = tuple[list[Grid], list[nn.Parameter], Callable[[], Blocks]]


def pair(dtype: torch.dtype) -> Problem:
    a, b = weight(7, 3, dtype=dtype), weight(3, 5, dtype=dtype)
    return [Grid(a, Factor(b, axis=0))], [a, b], lambda: [a, b.mT]


def ragged(dtype: torch.dtype) -> Problem:
    """Heights 7 and 4 with 5 and 9, in one grid."""
    params = [weight(n, 3, dtype=dtype) for n in (7, 4, 5, 9)]
    return [Grid(params[:2], params[2:])], params, lambda: list(params)


def fused(dtype: torch.dtype) -> Problem:
    """Queries, keys and values in one weight, whose biases are a row of each factor."""
    w, bias, out = weight(12, 6, dtype=dtype), weight(12, dtype=dtype), weight(6, 4, dtype=dtype)

    def part(start: int, bias: nn.Parameter | None) -> Factor:
        return Factor(w, axis=0, rank=2, blocks=2, start=start, bias=bias)

    grids = [
        Grid(part(0, bias), part(4, bias), groups=2, name="qk"),
        Grid(Factor(out, blocks=2), part(8, None), groups=2, name="vo"),
    ]

    def factors() -> Blocks:
        rows = [torch.cat([w[i : i + 2].mT, bias[None, i : i + 2]]) for i in (0, 2, 4, 6)]
        return [*rows, w[8:10].mT, w[10:12].mT, out[:, :2], out[:, 2:]]

    return grids, [w, bias, out], factors


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("problem", [pair, ragged, fused])
def test_every_factor_becomes_the_nearest_orthonormal_one(
    problem: Callable[[torch.dtype], Problem], dtype: torch.dtype
) -> None:
    grids, params, factors = problem(dtype)
    nearest = [expected_polar(block) for block in factors()]
    storage = [p.data_ptr() for p in params]
    untouched = params[1][8:].detach().clone() if problem is fused else None
    with pytest.warns(UserWarning, match="changes the function"):
        orthonormalize_(iter(grids))
    assert [p.data_ptr() for p in params] == storage
    assert all(p.requires_grad and p.is_leaf and p.dtype == dtype for p in params)
    for block, target in zip(factors(), nearest, strict=True):
        found = block.detach().double()
        defect = torch.linalg.matrix_norm(found.mT @ found - torch.eye(found.shape[1]), ord=2)
        assert defect < TOLERANCE[dtype]
        assert torch.linalg.matrix_norm(found - target, ord=2) < TOLERANCE[dtype]
    if untouched is not None:  # the biases of the values, which no grid covers
        assert same_bits([params[1][8:]], [untouched])
    for geometry in ISOMETRIES:
        rankfold.RiemannianSGD(grids, 0.1, geometry=geometry)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.bfloat16, torch.float16])
def test_it_warns_only_of_what_changes_the_function(dtype: torch.dtype) -> None:
    """The second call finds nothing to do but rounding, and so does one after training."""
    model = Toy(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    with pytest.warns(UserWarning, match="changes the function") as caught:
        orthonormalize_(model.grids())
    assert [w.filename for w in caught] == [__file__]
    optimizer = rankfold.RiemannianSGD(model.grids(), 0.1, geometry="isometry-quotient")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = clones(model)
        orthonormalize_(model.grids())
        for x, y in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(x, y, atol=4 * torch.finfo(dtype).eps, rtol=0)
        train(model, optimizer, range(3))
        orthonormalize_(model.heads())  # a single grid will do
    assert any(not torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rank_deficient_factors_are_refused(dtype: torch.dtype) -> None:
    """Before any of the others is touched."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (7, 5, 6, 4)]
        drawn[2][:, seed % 3] = 0 if seed == 0 else drawn[2][:, seed % 3 - 1]
        a, b, c, d = (nn.Parameter(x.to(dtype)) for x in drawn)
        grids = [Grid(a, b, name="good"), Grid(c, d, name="bad")]
        words = saying("'bad[0]'", "left factor 0", "full column rank 3")
        with unchanged([a, b, c, d]), pytest.raises(ValueError, match=words):
            orthonormalize_(grids)


def test_it_leaves_gradients_alone() -> None:
    model = Toy()
    model.loss(0).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    values = [g.clone() for g in grads]
    orthonormalize_(model.grids())
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert [id(g) for g in after] == [id(g) for g in grads]
    assert same_bits(after, values)


def test_no_grids() -> None:
    with pytest.raises(ValueError, match="no grids"):
        orthonormalize_([])
    model: Any = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(TypeError, match=saying("got TransformerEncoderLayer", "attention_grids")):
        orthonormalize_(model)
