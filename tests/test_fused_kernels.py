"""The fused kernels against float64, and against the plain forms they stand in for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold import kernels, linalg, rank_core, tall
from rankfold.geometries import GEOMETRIES, Pair, geometry_for, stiefel
from rankfold.geometries.embedded import EmbeddedGeometry

from .interpreted import (
    CUDA,
    DEVICE,
    in_kernels,
    on_the_host,
    quiet,
    run_in_interpreter,
)
from .points import GRIDS, options, product
from .test_linalg import with_singular_values

pytest.importorskip("triton")

EPS = torch.finfo(torch.float32).eps
# (factors a member, rows, rank): padded and unpadded, short and tall.
SHAPES = [(1, 40, 16), (2, 100, 20), (3, 7, 3), (1, 3, 1)]
SHAPES += [(1, 512, 64), (8, 512, 64)] if CUDA else []
LARGE = [(2, 300, 100), (1, 1000, 128)] if CUDA else []
pytestmark = [quiet, pytest.mark.usefixtures("kernels_imported")]


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest distance of any matrix or number of a stack, relative to it."""
    off = (found.double() - expected).flatten(2).norm(dim=-1)
    return float((off / expected.flatten(2).norm(dim=-1)).max())


class Case:
    def __init__(self, shape: tuple[int, int, int]) -> None:
        blocks, m, r = shape
        self.a = randn(3, blocks, m, r, seed=1) / m**0.5
        self.t = randn(3, blocks, m, r, seed=2)
        self.c = randn(3, 1, r, r, seed=3) / r**0.5  # one for all factors of a member
        self.d = randn(3, blocks, r, r, seed=4) / r**0.5
        self.wide = [x.double() for x in (self.a, self.t, self.c, self.d)]


@in_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_sums_over_rows(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    a, t, c, _ = case.wide
    turned = t @ c
    sums = kernels.tall.sums
    found = [*sums(case.a, None, own=True), *sums(case.a, case.t, cross=True)]
    expected = [a.mT @ a, a.mT @ t]
    if shape[-1] <= 64:  # several at once
        found += sums(None, case.a, case.c, square=True)
        found += sums(case.a, case.t, case.c, cross=True, square=True)
        found += sums(case.a, case.t, own=True, cross=True, square=True)
        expected += [(a @ c).mT @ (a @ c), a.mT @ turned, turned.mT @ turned]
        expected += [a.mT @ a, a.mT @ t, t.mT @ t]
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 8 * EPS


@in_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_squares(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    _, t, c, d = case.wide
    for factor, turn in ((t @ c, case.c), (t @ d, case.d), (t, None)):
        expected = factor.square().sum((-2, -1))[..., None]
        assert error(kernels.tall.square(case.t, turn)[..., None], expected) < 8 * EPS


@in_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_combinations(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    a, t, c, d = case.wide
    combine = kernels.moves.combine
    assert error(combine(case.a, case.c, case.t, case.d), a @ c + t @ d) < 4 * EPS
    assert error(combine(case.a, case.c, case.t, 0.25, sign=-1.0), t / 4 - a @ c) < 4 * EPS
    plus = tall.Plus(case.t, 0.5)
    found = combine(case.a, case.c, case.t, case.d, plus=plus)
    assert error(found, a @ c + t @ d + t / 2) < 4 * EPS
    assert error(combine(None, None, case.a, case.d, plus=plus), a @ d + t / 2) < 4 * EPS
    case.t[1, 0, 0] = torch.nan
    alive = torch.tensor([True, False, True], device=DEVICE)
    scale = torch.tensor([0.5, 1.0, -2.0], device=DEVICE)
    stepped = kernels.moves.step(case.a, case.t, scale, alive)
    assert torch.equal(stepped[1], case.a[1])
    wide = a + scale.double()[:, None, None, None] * t
    assert error(stepped[::2], wide[::2]) < 4 * EPS
    assert torch.equal(kernels.moves.step(case.a, case.t, scale)[::2], stepped[::2])
    assert torch.equal(kernels.moves.restore(stepped, case.t, alive)[::2], stepped[::2])
    assert torch.equal(stepped[1].nan_to_num(), case.t[1].nan_to_num())
    moved = combine(case.a, case.c, case.t, case.d, add_a=True, alive=alive)
    assert torch.equal(moved[1], case.a[1])
    expected = a + a @ c + t @ d
    assert error(moved[::2], expected[::2]) < 4 * EPS


@in_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_squares_of_some_members(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    only = torch.tensor([True, False, True], device=DEVICE)
    found = kernels.tall.square(case.t, case.c, only)
    assert torch.equal(found[::2], kernels.tall.square(case.t, case.c)[::2])
    assert not found[1].any()


@in_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_lifts(shape: tuple[int, int, int]) -> None:
    case = Case(shape)
    a, t, c, d = case.wide
    expected = t @ d - a @ c
    rows, inner = kernels.moves.lift(case.t, case.d, case.a, case.c)
    assert error(rows, expected) < 4 * EPS
    sizes = t.flatten(2).norm(dim=-1) * expected.flatten(2).norm(dim=-1)
    off = (inner.double() - (t * expected).sum((-2, -1))).abs()
    assert float((off / sizes).max()) < 4 * EPS
    for plus in (None, tall.Plus(case.a, 0.5)):
        expected = t / 4 - a @ d + (0 if plus is None else a / 2)
        rows, square = kernels.moves.subtract(case.t, 0.25, case.a, case.d, plus)
        assert error(rows, expected) < 4 * EPS
        assert error(square[..., None], expected.square().sum((-2, -1))[..., None]) < 8 * EPS


@in_kernels
@pytest.mark.parametrize("size", [2.0**-4, 2.0**-9, 0.0])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 100), *LARGE])
def test_stepped_factors(shape: tuple[int, int, int], size: float) -> None:
    # A change of any size, below and above where fewer products do.
    case = Case(shape)
    a, t, _, d = case.wide
    alive = torch.tensor([True, False, True], device=DEVICE)
    scale = torch.tensor([0.5, 1.0, -2.0], device=DEVICE)
    moved = a + scale.double()[:, None, None, None] * t
    gram = kernels.tall.stepped_gram(case.a, case.t, scale)
    assert error(gram, moved.mT @ moved) < 8 * EPS
    change = size * case.d / d.flatten(2).norm(dim=-1).float()[..., None, None]
    settled = kernels.moves.settle(case.a, case.t, change, scale, alive)
    assert torch.equal(settled[1], case.a[1])
    expected = moved + moved @ change.double()
    assert error(settled[::2], expected[::2]) < 4 * EPS


@in_kernels
def test_arguments_need_not_be_contiguous() -> None:
    x, c = randn(2, 1, 16, 40, seed=5).mT, randn(2, 1, 16, 16, seed=6).mT
    assert error(kernels.tall.sums(x, None, own=True)[0], x.double().mT @ x.double()) < 8 * EPS
    expected = x.double() @ c.double() + x.double()
    assert error(kernels.moves.combine(x, c, x, 1.0), expected) < 4 * EPS


@in_kernels
@pytest.mark.parametrize("r", [1, 3, 16, 20, *([64] if CUDA else [])])
def test_landing(r: int) -> None:
    u = torch.linalg.qr(randn(3, 2, max(2 * r, 8), r, seed=7)).Q
    x = randn(*u.shape, seed=8)
    x = 0.3 * x / torch.linalg.matrix_norm(x, ord=2)[..., None, None]
    scale = torch.tensor([0.1, 1.0, 0.5], device=DEVICE)
    grams = tall.Grams(u.mT @ u, u.mT @ x, x.mT @ x)
    change, share, norm = kernels.stiefel.landing(*grams, scale)
    assert (norm - r**0.5).abs().max() < 1e-5
    wide, xi = u.double(), x.double()
    new = wide + wide @ change.double() + xi @ share.double()
    tangent = xi - wide @ linalg.sym(wide.mT @ xi)
    left, _, right = torch.linalg.svd(
        wide + scale.double()[:, None, None, None] * tangent, full_matrices=False
    )
    assert (new - left @ right).abs().max() < 16 * EPS


@in_kernels
@pytest.mark.parametrize("r", [1, 3, 16, 20, 70, *([64, 128] if CUDA else [])])
def test_corrections(r: int) -> None:
    left, right = randn(3, 2, r, r, seed=9), randn(3, 1, r, r, seed=10)
    weights = stiefel.Correction(0.3, -0.2, 0.5, 0.7), stiefel.Correction(1.0, 0.4, -0.5, 0.9)
    made = kernels.stiefel.corrections(left, right, *weights)
    plain = stiefel._apply(Pair(left.double(), right.double()), *weights)
    for one, other in zip(made, plain, strict=True):
        assert (one.double() - other).abs().max() < 16 * EPS


@in_kernels
@pytest.mark.parametrize("guess", ["nearer", "near", "identity", "nonsense"])
@pytest.mark.parametrize("r", [1, 3, 16, 20, *([64] if CUDA else [])])
def test_inverses_from_a_guess(r: int, guess: str) -> None:
    values = torch.logspace(0, -1.5, r).double()
    x = torch.stack([with_singular_values(values, r, seed) for seed in range(3)]).to(DEVICE)
    expected = torch.linalg.inv(x)
    start = {
        "nearer": expected + 1e-6 * randn(3, r, r, seed=11).double(),
        "near": expected + 1e-2 * randn(3, r, r, seed=11).double(),
        "identity": torch.eye(r, dtype=torch.float64, device=DEVICE),
        "nonsense": 100 * randn(3, r, r, seed=12).double(),
    }[guess]
    stained = x.float()
    stained[1] = torch.nan
    found = kernels.refine.inverse(stained, start.float())
    rounding = torch.linalg.inv(x.float().double())
    assert error(found[::2, None], rounding[::2, None]) < 100 * EPS * 10**1.5
    assert found[1].isnan().any()


@in_kernels
@pytest.mark.parametrize("size", [0.0, 1e-5, 3e-4, 5.2e-4, 1e-3, 0.5, 30.0, 1e3, 1e6])
def test_roots(size: float) -> None:
    """Near the identity, where a series does, at its end, and far from it."""
    x = randn(3, 20, 16, seed=13).double()
    gram = torch.eye(16, device=DEVICE).double() + size * x.mT @ x / 20
    gram = gram.float().double()
    root, inverse = kernels.refine.root(gram.float())
    values, vectors = torch.linalg.eigh(gram)
    for found, power in ((root, 0.5), (inverse, -0.5)):
        exact = (vectors * values[:, None] ** power) @ vectors.mT
        # As good as rounding that of the matrix makes it, but for a few products.
        assert error(found[:, None], exact[:, None]) < (0.75 if size < 1e-3 else 30) * EPS
    assert error((root.double() @ root.double())[:, None], gram[:, None]) < 30 * EPS
    whole = inverse.double() @ gram @ inverse.double()
    assert (whole - torch.eye(16, device=DEVICE)).abs().max() < 30 * EPS * (1 + size) ** 0.5


@in_kernels
@pytest.mark.parametrize("t", [0.001, 0.01, 0.1, 0.3, 3.0])
def test_rank_approximation(t: float) -> None:
    """As the plain form after three iterations, and agreed on whether these were enough."""
    core = torch.stack(
        [with_singular_values(torch.linspace(1, 3, 5).double(), 5, s) for s in (1, 2)]
    )
    core = core.to(DEVICE)
    k, x, y = (t / 5**0.5 * randn(2, 5, 5, seed=s).double() for s in (14, 15, 16))
    wide = core + k, x.mT @ x, y.mT @ y, torch.linalg.inv(core)
    expected = rank_core.best_rank_core(*(v.float().cpu() for v in wide))  # as many iterations
    core, xx, yy, guess = (v.float() for v in wide)
    share = rank_core.left_to_move(torch.float32)
    found = kernels.refine.best_rank_core(core, xx, yy, guess, 3, share)
    assert found[3].tolist() == expected.unconverged.tolist() == [t > 1] * 2
    for one, other in zip(found[:3], expected[:3], strict=True):
        # An iteration that does not converge passes rounding on.
        assert error(one[:, None].cpu(), other[:, None].double()) < (50 if t < 1 else 1e4) * EPS
    broken = kernels.refine.best_rank_core(core * torch.nan, xx, yy, guess, 3, share)
    assert broken[0].isnan().any((-2, -1)).all()


@in_kernels
@pytest.mark.parametrize("condition", [1.0, 300.0])
def test_frames(condition: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The basis is orthonormal, spans the factor, and a factor of lower rank stays short."""
    values = torch.logspace(0, -math.log10(condition), 5).double()
    x = torch.stack([with_singular_values(values, 30, seed) for seed in range(3)]).to(DEVICE)
    x[1, :, 4] = x[1, :, 3]
    for name in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, name, lambda *x: True)
    frame, _ = linalg.orthonormal_frames(x.float(), x.float())
    assert frame.lifted.tolist() == [False, True, False]
    basis = x.float().double() @ frame.inverse.double()
    gram = basis.mT @ basis
    eye = torch.eye(5, device=DEVICE, dtype=torch.float64)
    assert (gram - eye)[::2].abs().max() < 30 * EPS * condition
    assert torch.equal(frame.gram[0].double(), eye)
    assert (frame.gram[1] - gram[1]).abs().max() < 0.05
    assert torch.linalg.matrix_norm(gram[1], ord=2) < 1.01
    whole = frame.triangle.double() @ frame.inverse.double()
    assert (whole - eye)[::2].abs().max() < 100 * EPS * condition


@in_kernels
@pytest.mark.parametrize("share", [1.0, 1e-3, 0.0])
def test_coordinates_of_gradients_in_dispute(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain form, of A S and −B Sᵀ, whose mean is nothing, and a share of a vector."""
    geometry = geometry_for("fixed-embedded", 1, 1)
    a, b = (torch.linalg.qr(randn(3, 1, 30, 5, seed=s)).Q for s in (41, 42))
    s, left, right = (
        randn(3, 1, 5, 5, seed=43),
        randn(3, 1, 30, 5, seed=44),
        randn(3, 1, 30, 5, seed=45),
    )
    vector = Pair(a @ s + share * left, share * right - b @ s.mT)
    found = []
    for served in (True, False):
        for name_of in ("serve", "serve_small"):
            monkeypatch.setattr(kernels, name_of, lambda *x, on=served: on)
        found.append(geometry.coordinates(geometry.frame(Pair(a, b)), vector))
    one, plain = found
    whole = vector.left.square().sum((1, 2, 3)) + vector.right.square().sum((1, 2, 3))
    for x, y in ((one.xx, plain.xx), (one.yy, plain.yy), (one.k, plain.k)):
        assert ((x - y).abs().amax((1, 2)) < 10 * EPS * whole).all()
    assert ((one.square - plain.square).abs() < 20 * EPS * whole).all()
    # Squares that rounding made negative count as zero, and then this alone is left, but for a bit.
    least = (1 - 8 * EPS) * 2 * 5 * 4 * EPS * whole
    assert (one.square > least if share < 1 else one.square > 0.1 * whole).all()
    for x in (one.xx, one.yy):
        assert (torch.linalg.eigvalsh(x.double()) > 0).all()


@in_kernels
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_coordinates_in_short_bases(damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain form, where a factor, or a damped one, has columns shorter than one."""
    geometry = geometry_for("fixed-embedded", 1, 1)
    point, vector = (
        Pair(*(randn(3, 1, 30, 5, seed=s + k) / 30**0.5 for k in (0, 1))) for s in (51, 53)
    )
    for k, side in enumerate(point, 1):  # with a column that is nearly another
        side[k, ..., 4] = side[k, ..., 3] + 1e-3 * side[k, ..., 4]
    frame = geometry.frame(point, damping)
    lifted = [x.lifted.tolist() for x in (frame.left, frame.right)]
    assert lifted == [[False, damping == 0, False], [False, False, damping == 0]]
    found = []
    for served in (False, True):
        for name_of in ("serve", "serve_small"):
            monkeypatch.setattr(kernels, name_of, lambda *x, on=served: on)
        made = geometry.coordinates(frame, vector)
        square = made.square[:, None, None]
        found.append([made.left.inner, made.right.inner, made.k, made.xx, made.yy, square])
    for plain, one in zip(*found, strict=True):
        # Rounding is larger by as much as the short column was stretched.
        assert error(one[:, None], plain[:, None].double()) < (20 if damping else 2e3) * EPS


@in_kernels
@pytest.mark.parametrize("lr", [1e-3, 0.021, 0.3])
def test_a_step_within_the_column_spaces(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """W + Ξ is of rank r then, and where the step ends; all of Ξ is one singular direction."""
    for name_of in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, name_of, lambda *x: True)
    geometry = geometry_for("fixed-embedded", 1, 1)
    point = Pair(*(torch.linalg.qr(randn(3, 1, 30, 5, seed=s)).Q for s in (61, 62)))
    left, right = (x[..., :1] for x in point)
    frame = geometry.frame(point)
    vector = Pair(left @ (right.mT @ point.right), right @ (left.mT @ point.left))
    coords = geometry.coordinates(frame, vector)
    scale = torch.full((3,), lr, device=DEVICE)
    landing = geometry.retract(frame, coords, scale, options("svd", lr))
    step = lr * left.double() @ right.double().mT
    exact = product(point).double() + step.flatten(0, 1)
    assert (torch.linalg.matrix_norm(product(landing.point).double() - exact) < 8 * EPS).all()


@in_kernels
@pytest.mark.parametrize("lr", [1e-3, 0.02, 0.03, 0.1, 0.45, 20.0])
@pytest.mark.parametrize("name", ["fixed-embedded", "isometry-embedded"])
def test_retractions_in_one_kernel(name: str, lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain form, as many iterations: new points, momentum and convergence."""
    if name.startswith("isometry") and lr > 0.5:
        pytest.skip("one pass of orthonormalization does not serve steps this long")
    geometry = geometry_for(name, 1, 1)
    assert isinstance(geometry, EmbeddedGeometry)
    sides = (torch.linalg.qr(randn(3, 1, 30, 5, seed=s)).Q for s in (31, 32))
    point = Pair(*sides)
    if name == "fixed-embedded":
        point = Pair(
            point.left @ (0.3 * randn(3, 1, 5, 5, seed=33) + torch.eye(5, device=DEVICE)),
            point.right,
        )
    vector = Pair(randn(3, 1, 30, 5, seed=34), randn(3, 1, 30, 5, seed=35))
    opts = options("svd", lr)
    found = []
    for served in (True, False):
        for name_of in ("serve", "serve_small"):
            monkeypatch.setattr(kernels, name_of, lambda *x, on=served: on)
        frame = geometry.frame(point)
        coords = geometry.coordinates(frame, vector)
        scale = -lr / geometry.metric_norm(frame, coords)
        landing = geometry.retract(frame, coords, scale, opts)
        kept = geometry.depart(frame, coords, vector, landing)
        found.append((product(landing.point).double(), kept, landing))
    (new, kept, landing), (expected, wanted, plain) = found
    moved = torch.linalg.matrix_norm(expected - product(point).double())
    # An iteration that does not converge passes rounding on, many times over.
    tolerance = 1e-5 if lr < 1 else 1e-4
    assert (torch.linalg.matrix_norm(new - expected) < tolerance * moved + 20 * EPS).all()
    assert landing.alive.all()
    assert landing.unconverged is not None
    assert plain.unconverged is not None
    assert landing.unconverged.tolist() == plain.unconverged.tolist() == [lr > 1] * 3
    # Momentum is kept in coordinates of the new factors, whose gauge is free: compare M itself.
    matrices = []
    for at, momentum in ((landing, kept), (plain, wanted)):
        wide, m = (Pair(*(x.double() for x in pair)) for pair in (at.point, momentum))
        matrices.append(geometry.matrix(geometry.coordinates(geometry.frame(wide), m)))
    size = torch.linalg.matrix_norm(matrices[1])
    assert (torch.linalg.matrix_norm(matrices[0] - matrices[1]) < tolerance * size).all()


@in_kernels
@pytest.mark.parametrize("lr", [0.02, 2.0])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_steps_above_the_rank_of_fused_kernels(
    name: str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short steps, where products are enough, and long ones, which need eliminations."""
    if name.startswith("isometry") and lr > 1:
        pytest.skip("steps this long land where rounding says")
    geometry = geometry_for(name, 1, 1)
    opts = options(geometry.retractions[0], lr, momentum=0.9)
    point, grad, held = (
        Pair(*(randn(3, 1, rows, 70, seed=seed + k) for k, rows in enumerate((90, 80))))
        for seed in (41, 43, 45)
    )
    point = Pair(*(torch.linalg.qr(x).Q for x in point))
    grad.left[1, 0, 0, 0] = torch.nan
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
    found = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda *x, on=served: on)
        monkeypatch.setattr(kernels, "serve_small", lambda *x: False)
        before = [x.clone() for pair in (point, grad, held) for x in pair]
        outcome = geometry.step(point, grad, held, opts)
        after = [x for pair in (point, grad, held) for x in pair]
        assert all(map(torch.equal, map(torch.nan_to_num, before), map(torch.nan_to_num, after)))
        assert outcome.momentum is not None
        assert outcome.events["skipped"].tolist() == [False, True, False]
        assert torch.equal(outcome.point.left[1], point.left[1])
        assert torch.equal(outcome.momentum.right[1], held.right[1])
        found.append(outcome)
    ours, theirs = found
    for name_of, happened in theirs.events.items():
        assert ours.events[name_of].tolist() == happened.tolist()
    # Against float64, since the plain form in float32 is off by as much.
    at, along, kept = (Pair(*(x.double() for x in pair)) for pair in (point, grad, held))
    exact = product(geometry.step(at, along, kept, opts).point)
    moved = torch.linalg.matrix_norm(exact - product(point).double())
    off = torch.linalg.matrix_norm(product(ours.point).double() - exact)
    assert (off[::2] < 2e-5 * moved[::2] + 20 * EPS).all()


@in_kernels
@pytest.mark.parametrize(
    "told",
    [{}, {"tilt": 0.25, "row_balance": 0.5, "momentum_form": "unit-smoothing"}, {"tilt": 1.0}],
)
@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
@pytest.mark.parametrize("name", ["fixed-embedded", "fixed-quotient"])
def test_whitened_steps(
    name: str, grid: tuple[int, int], told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64."""
    geometry = geometry_for(name, *grid)
    opts = options(geometry.retractions[0], 0.1, normalize="whitened", **told)
    point, grad, held = (
        Pair(randn(2, grid[0], 30, 5, seed=seed), randn(2, grid[1], 24, 5, seed=seed + 1))
        for seed in (71, 73, 75)
    )
    for served in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, served, lambda *x: True)
    found = product(geometry.step(point, grad, held, opts).point).double()
    for served in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, served, lambda *x: False)
    at, along, kept = (Pair(*(x.double() for x in pair)) for pair in (point, grad, held))
    exact = product(geometry.step(at, along, kept, opts).point)
    moved = (exact - product(at)).norm()
    assert (found - exact).norm() < 5e-4 * moved


def large_rank_step(
    geometry: Any, point: Pair, grad: Pair, told: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """The product after a step in the kernels that large ranks take, and in float64 without."""
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
    monkeypatch.setattr(kernels, "serve_small", lambda *x: False)
    monkeypatch.setattr(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
    found = product(geometry.step(point, grad, None, told).point).double()
    at, along = (Pair(*(x.double() for x in pair)) for pair in (point, grad))
    return found, product(geometry.step(at, along, None, told).point)


@in_kernels
@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("retraction", ["polar", "qr"])
@pytest.mark.parametrize("name", ["isometry-quotient", "isometry-canonical"])
def test_long_steps_of_large_ranks(
    name: str, retraction: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose columns are orthonormal again, and right, however long they have been."""
    geometry = geometry_for(name, 1, 1)
    point = Pair(*(torch.linalg.qr(randn(2, 1, 40, 20, seed=s)).Q for s in (81, 82)))
    z = size * randn(2, 40, 40, seed=83)
    grad = Pair((z @ point.right[:, 0])[:, None], (z.mT @ point.left[:, 0])[:, None])
    told = options(retraction, 1.0, momentum=0.0, normalize=None)
    found, exact = large_rank_step(geometry, point, grad, told, monkeypatch)
    assert (found - exact).norm() < 1e-4 * exact.norm()


@in_kernels
def test_norms_where_nearly_all_is_in_dispute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told from rows, as a difference would leave a tenth of them to rounding."""
    geometry = geometry_for("fixed-quotient", 1, 1)
    a, b = randn(2, 40, 20, seed=84), randn(2, 36, 20, seed=85)
    turn, z = randn(2, 20, 20, seed=86), 1e-3 * randn(2, 40, 36, seed=87)
    vertical = a @ (turn @ (b.mT @ b)), -b @ (turn.mT @ (a.mT @ a))
    grad = Pair((vertical[0] + z @ b)[:, None], (vertical[1] + z.mT @ a)[:, None])
    told = options("additive", 0.1, momentum=0.0)
    point = Pair(a[:, None], b[:, None])
    found, exact = large_rank_step(geometry, point, grad, told, monkeypatch)
    moved = torch.linalg.matrix_norm(exact - product(point).double())
    assert (torch.linalg.matrix_norm(found - exact) < 1e-2 * moved).all()


@in_kernels
@pytest.mark.parametrize("target", [0.0, 0.5])
@pytest.mark.parametrize("rates", [0.02, [0.02, 0.01]])
@pytest.mark.parametrize("name", ["fixed-embedded", "fixed-quotient"])
def test_decayed_steps(
    name: str, rates: float | list[float], target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = geometry_for(name, 1, 1)
    opts = options(geometry.retractions[0], weight_decay=5.0, decay_to=target)
    if isinstance(rates, list):  # one a member
        opts = replace(opts, lr=torch.tensor(rates, device=DEVICE), longest=max(rates))
    else:
        opts = replace(opts, lr=rates)
    point, grad, held = (
        Pair(*(randn(2, 1, rows, 5, seed=seed + k) for k, rows in enumerate((9, 7))))
        for seed in (61, 63, 65)
    )
    stretch = torch.linspace(0.5, 2, 5, device=DEVICE)
    point = Pair(*(torch.linalg.qr(x).Q * stretch for x in point))
    ends = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda *x, on=served: on)
        monkeypatch.setattr(kernels, "serve_small", lambda *x, on=served: on)
        first = geometry.step(point, grad, held, opts)
        assert first.momentum is not None
        second = geometry.step(first.point, grad, first.momentum, opts)
        assert not second.events["skipped"].any()
        ends.append(product(second.point).double())
    assert (ends[0] - ends[1]).abs().max() < 50 * EPS * ends[1].abs().max()


@pytest.mark.skipif(not CUDA, reason="the whole step takes its kernels on a GPU alone")
@pytest.mark.parametrize("rank", [24, 80])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_step_with_kernels_is_the_step_without(
    name: str, grid: tuple[int, int], momentum: float, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = geometry_for(name, *grid)
    opts: Any = options(geometry.retractions[0], 0.05, momentum=momentum)
    found = []
    # The plain form runs in float64: in float32 it is off by as much as the kernels are.
    for enabled, dtype in ((True, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(kernels, "enabled", enabled)
        sides = (randn(4, n, m, rank, seed=s) for n, m, s in ((grid[0], 96, 1), (grid[1], 80, 2)))
        point = Pair(*(torch.linalg.qr(x).Q.to(dtype) for x in sides))
        held = Pair(*map(torch.zeros_like, point)) if momentum else None
        start = product(point)
        for k in range(5):
            z = randn(4, grid[0] * 96, grid[1] * 80, seed=20 + k).to(dtype)
            left = (z @ point.right.flatten(1, 2)).view_as(point.left)
            right = (z.mT @ point.left.flatten(1, 2)).view_as(point.right)
            outcome = geometry.step(point, Pair(left, right), held, opts)
            point, held = outcome.point, outcome.momentum
            assert not outcome.events["skipped"].any()
        found.append(product(point).double())
    travelled = torch.linalg.matrix_norm(found[1] - start.double())
    assert (torch.linalg.matrix_norm(found[0] - found[1]) < 1e-4 * travelled).all()
