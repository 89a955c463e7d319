"""Gradients with a NaN or an infinity in them: one member waits, the others never notice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import rankfold
from rankfold import RiemannianSGD, polar
from rankfold.checks import orthonormality_defect

from .heads import Heads, states
from .reference import GEOMETRIES, ISOMETRIES
from .toys import Toy, clones, orthonormal, same_bits, unchanged

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_isometry = pytest.mark.parametrize("geometry", ISOMETRIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_geometry
def test_a_gradient_that_is_not_finite_stops_its_own_member_alone(
    geometry: str, bad: float, side: str, dtype: torch.dtype
) -> None:
    for lefts, normalize in ((1, "metric"), (2, "spectral"), (1, None)):
        clean, spoilt = (Heads(dtype, lefts=lefts) for _ in range(2))
        runs = [
            RiemannianSGD([m.grid()], 0.1, geometry=geometry, momentum=0.9, normalize=normalize)
            for m in (clean, spoilt)
        ]
        for step in range(4):
            for model, optimizer in zip((clean, spoilt), runs, strict=True):
                before = [x.clone() for x in states(optimizer, model)] if step else []
                model.backward()
                if model is spoilt and step == 2:
                    gradient = getattr(spoilt, side).grad
                    gradient[lefts if side == "a" else 1, 2, 1] = bad
                optimizer.step()
                if model is spoilt and step == 2:
                    after = states(optimizer, model)
                    assert len(after) == (4 if dtype == torch.float32 else 6)
                    members = [[x.reshape(4, -1)[1] for x in xs] for xs in (before, after)]
                    assert same_bits(*members)
        others = [0, 2, 3]
        pairs = zip(states(runs[0], clean), states(runs[1], spoilt), strict=True)
        for one, other in pairs:
            assert same_bits([one.reshape(4, -1)[others]], [other.reshape(4, -1)[others]])
            assert not torch.equal(one.reshape(4, -1)[1], other.reshape(4, -1)[1])
        counted = runs[1].counts()
        assert counted["w[1]"]["skipped"] == 1
        assert all("skipped" not in counted.get(f"w[{k}]", {}) for k in others)
        assert all("skipped" not in c for c in runs[0].counts().values())


@every_geometry
def test_nothing_ever_puts_a_nan_in_the_momentum(geometry: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, 1e25, -1e20, 1e-38, 0.0, 1.0])
    for normalize in ("metric", "spectral", None):
        model = Heads()
        optimizer = RiemannianSGD(
            [model.grid()], 0.05, geometry=geometry, momentum=0.9, normalize=normalize
        )
        model.run(optimizer, 1)
        for step in range(40):
            model.backward()
            for p in model.parameters():
                assert p.grad is not None
                where = torch.rand(p.shape, generator=generator) < 0.03
                drawn = torch.randint(len(values), p.shape, generator=generator)
                p.grad = torch.where(where, values[drawn], p.grad)
                if step % 4 == 0:  # finite, but not once it is squared or multiplied
                    p.grad = p.grad.nan_to_num(0, 0, 0).sign() * 3e38
            optimizer.step()
            assert all(x.isfinite().all() for x in states(optimizer, model))
        assert model.survives(geometry)
        assert sum(c["skipped"] for c in optimizer.counts().values()) > 20


@pytest.mark.parametrize("steps", [0, 2])
@every_geometry
def test_raising_names_the_member_and_changes_nothing(geometry: str, steps: int) -> None:
    model, heads = Toy(), Heads(torch.bfloat16)
    groups = [{"grids": model.grids()}, {"grids": [heads.grid()]}]
    optimizer = RiemannianSGD(groups, 0.1, geometry=geometry, momentum=0.9, on_nonfinite="raise")
    params = [*model.parameters(), *heads.parameters()]

    def backward(step: int) -> None:
        optimizer.zero_grad()
        (model.loss(step) + heads.losses().sum()).backward()

    for step in range(steps):
        backward(step)
        optimizer.step()
    backward(steps)
    assert heads.b.grad is not None
    held = heads.b.grad[2, 0, 0].item()
    heads.b.grad[2, 0, 0] = torch.nan
    words = r"gradients of w\[2\] are not finite"
    with unchanged(params, optimizer), pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert optimizer.counts() == {}
    before = clones(model)
    heads.b.grad[2, 0, 0] = held
    optimizer.step()
    assert not same_bits(before, clones(model))


def test_a_step_that_float16_cannot_store_is_skipped() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        nn.Parameter(torch.randn(4, 2, generator=generator).to(torch.float16)) for _ in range(2)
    )
    optimizer = rankfold.RiemannianSGD(rankfold.Grid(a, b), 1e6, geometry="fixed-quotient")
    (a @ b.mT)[0, 0].backward()
    before = [p.detach().clone() for p in (a, b)]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip((a, b), before, strict=True))
    assert optimizer.counts() == {"grid0[0]": {"skipped": 1}}


@pytest.mark.parametrize("normalize", ["metric", "spectral"])
@every_isometry
def test_gradients_that_are_all_but_normal_leave_isometries_isometries(
    geometry: str, normalize: str
) -> None:
    """Weight decay of an isometry has no tangent part: what is normalized is rounding."""
    members = 40
    generator = torch.Generator().manual_seed(0)
    a, b = (
        nn.Parameter(torch.linalg.qr(torch.randn(members, 4, 2, generator=generator)).Q)
        for _ in range(2)
    )
    grid = rankfold.Grid(a, b, groups=members)
    for lr in (0.125, 0.65):
        optimizer = rankfold.RiemannianSGD(grid, lr, geometry=geometry, normalize=normalize)
        for _ in range(4):
            optimizer.zero_grad()
            (1e6 * (a @ b.mT).square().sum()).backward()
            optimizer.step()
            assert max(orthonormality_defect(p).max() for p in (a, b)) < 2e-6


@every_isometry
@pytest.mark.parametrize("lr", [1e2, 1e4, 1e6])
def test_steps_of_absurd_length_are_made_to_rounding_or_skipped(geometry: str, lr: float) -> None:
    """Few come so close to what cannot be made orthonormal that it matters: hence so many."""
    members, generator = 4000, torch.Generator().manual_seed(0)
    a, b = (
        nn.Parameter(torch.linalg.qr(torch.randn(members, 4, 2, generator=generator)).Q)
        for _ in range(2)
    )
    optimizer = rankfold.RiemannianSGD(rankfold.Grid(a, b, groups=members), lr, geometry=geometry)
    for step in range(8):
        optimizer.zero_grad()
        target = step % 2 * torch.randn(members, 4, 4, generator=generator)
        (a @ b.mT - target).square().sum().backward()
        optimizer.step()
        assert max(orthonormality_defect(p).max() for p in (a, b)) < 2e-6


def test_a_polar_factor_out_of_reach_is_not_made_up() -> None:
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    x[1] *= torch.tensor([1.0, 1.0, 1e8])
    rough = x @ polar.polar_scaling(x.mT @ x, None)
    found = polar.polish_scaling(rough.mT @ rough)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def random_products(
    geometry: str, lefts: int, rights: int, m: int, rank: int
) -> tuple[list[nn.Parameter], list[nn.Parameter], torch.Generator]:
    """Factors of a grid of float32, orthonormal for isometries, and what they were drawn with."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> nn.Parameter:
        if geometry in ISOMETRIES:
            return nn.Parameter(orthonormal(rows, rank, generator).float())
        return nn.Parameter(torch.randn(rows, rank, generator=generator))

    left = [draw(m) for _ in range(lefts)]
    return left, [draw(m) for _ in range(rights)], generator


def give_gradients(
    left: list[nn.Parameter], right: list[nn.Parameter], size: float, generator: torch.Generator
) -> None:
    """Those of a loss of the products, whose slopes are random and of this size."""
    slopes = [
        [size * torch.randn(len(a), len(b), generator=generator) for b in right] for a in left
    ]
    with torch.no_grad():
        for a, row in zip(left, slopes, strict=True):
            a.grad = torch.stack([g @ b for g, b in zip(row, right, strict=True)]).sum(0)
        for b, column in zip(right, zip(*slopes, strict=True), strict=True):
            b.grad = torch.stack([g.mT @ a for g, a in zip(column, left, strict=True)]).sum(0)


DIRECTIONS = ("metric", "spectral", "whitened", "schatten-inf", "schatten-1", "schatten-1.5")


@pytest.mark.parametrize("normalize", [*DIRECTIONS, "schatten-3"])
@every_geometry
def test_overflowing_gradients_stop_a_member_and_do_not_still_it(
    geometry: str, normalize: str
) -> None:
    """Whatever the size: a step is as long as ever, or it is skipped, and momentum with it."""
    for form, (lefts, rights, m, rank) in itertools.product(
        ("smoothing", "heavy-ball"), ((1, 1, 4, 4), (2, 1, 9, 3), (2, 1, 5, 1))
    ):
        for power in range(17, 38):
            left, right, generator = random_products(geometry, lefts, rights, m, rank)
            optimizer = RiemannianSGD(
                rankfold.Grid(left, right), 0.01, geometry=geometry, normalize=normalize,
                momentum=0.9, momentum_form=form,
            )  # fmt: skip
            params = [*left, *right]
            for size in (1.0, 10.0**power):
                before = [p.detach().clone() for p in params]
                give_gradients(left, right, size, generator)
                optimizer.step()
            moved = torch.stack([(p - x).norm() for p, x in zip(params, before, strict=True)]).max()
            if "skipped" in optimizer.counts().get("grid0[0]", {}):
                assert moved == 0
            else:
                assert moved > 1e-3
            if form == "heavy-ball":  # of steps, none of which is long
                assert all(optimizer.state[p]["momentum"].abs().max() < 1 for p in params)


@pytest.mark.parametrize("options", [{}, {"normalize": "spectral"}, {"scale_lr": 0.05}])
@every_geometry
def test_no_norm_is_too_small_for_its_floor(geometry: str, options: dict[str, Any]) -> None:
    """Squares of such gradients have vanished, and leave no norm to divide by."""
    if geometry not in ISOMETRIES and "scale_lr" in options:
        pytest.skip("a scale of isometries")
    for size in (1e-20, 1e-22, 1e-24, 1e-30):
        left, right, generator = random_products(geometry, 2, 1, 9, 3)
        optimizer = RiemannianSGD(
            rankfold.Grid(left, right), 0.01, geometry=geometry, norm_floor=1e-38, **options
        )
        before = [p.detach().clone() for p in (*left, *right)]
        give_gradients(left, right, size, generator)
        optimizer.step()
        for p, old in zip((*left, *right), before, strict=True):
            assert (p - old).norm() < 0.2 * old.norm()


def test_a_trust_region_makes_no_step_of_an_infinite_one() -> None:
    """The size of a product, whose root the growth multiplies a rate with, overflows."""
    for trust in (None, 0.5):
        left, right, generator = random_products("fixed-quotient", 1, 1, 9, 3)
        for p in (*left, *right):
            p.data.mul_(2e9)
        before = [p.detach().clone() for p in (*left, *right)]
        optimizer = RiemannianSGD(
            rankfold.Grid(left, right), 0.01, geometry="fixed-quotient", growth=0.5,
            trust_region=trust,
        )  # fmt: skip
        give_gradients(left, right, 1.0, generator)
        optimizer.step()
        assert optimizer.counts() == {"grid0[0]": {"skipped": 1}}
        assert all(torch.equal(p, x) for p, x in zip((*left, *right), before, strict=True))


@every_geometry
def test_a_gradient_too_large_for_its_norm_is_counted(geometry: str) -> None:
    """Finite, yet its square overflows: without a count, a step of length zero."""
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.1, geometry=geometry)
    model.backward()
    assert model.a.grad is not None
    model.a.grad[1] = 1e25
    before = clones(model)
    optimizer.step()
    assert optimizer.counts()["w[1]"]["skipped"] == 1
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])
