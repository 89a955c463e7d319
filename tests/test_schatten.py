"""Directions of steepest descent under Schatten norms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import schatten
from rankfold.geometries import GEOMETRIES

EXPONENTS = (1.0, 1.5, 2.0, 4.0, math.inf)
# What is added to eigenvalues of a Gram matrix of trace 1.
RIDGE = 2.0**-16


def dual(p: float) -> float:
    return {1.0: math.inf, math.inf: 1.0}.get(p) or p / (p - 1)


def schatten_norm(blocks: list[Tensor], p: float) -> Tensor:
    """Of the block-diagonal matrix, (batch,)."""
    values = torch.cat([torch.linalg.svdvals(x) for x in blocks], -1)
    return torch.linalg.vector_norm(values, p, dim=-1)


def inner(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum((-2, -1)) for x, y in zip(xs, ys, strict=True)]).sum(0)


def blocks(dtype: torch.dtype = torch.float64, decay: float = 0.0) -> list[Tensor]:
    """Two blocks of 5 members; singular values fall by ``decay`` decades over their columns."""
    generator = torch.Generator().manual_seed(0)
    fall = 10 ** torch.linspace(0, -decay, 6, dtype=torch.float64)
    turns = torch.linalg.qr(torch.randn(2, 5, 6, 6, generator=generator, dtype=torch.float64)).Q
    return [
        (torch.randn(5, m, 6, generator=generator, dtype=torch.float64) * fall @ turn).to(dtype)
        for m, turn in zip((20, 9), turns, strict=True)
    ]


def let_down(xs: list[Tensor]) -> float:
    """By how much the smallest singular values fall short of 1, which only p = ∞ notices."""
    shares = [torch.linalg.svdvals(x).square() / x.square().sum((-2, -1))[:, None] for x in xs]
    return max(float((RIDGE / (2 * share)).max()) for share in shares)


@pytest.mark.parametrize("p", EXPONENTS)
def test_directions_are_of_norm_one_and_reach_the_dual_norm(p: float) -> None:
    """By Hölder's inequality nothing of norm 1 lies further along X than its dual norm."""
    xs = blocks()
    cs = schatten.directions([x.mT @ x for x in xs], p, 2.0**-23)
    found = [x @ c for x, c in zip(xs, cs, strict=True)]
    slack = let_down(xs) if p == math.inf else 1e-9
    torch.testing.assert_close(schatten_norm(found, p), torch.ones(5).double(), atol=slack, rtol=0)
    torch.testing.assert_close(inner(xs, found), schatten_norm(xs, dual(p)), atol=0, rtol=slack)


def test_several_largest_values_share_the_weight() -> None:
    x = torch.diag(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64))[None]
    (c,) = schatten.directions([x.mT @ x], 1.0, 2.0**-23)
    expected = torch.diag(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))[None]
    torch.testing.assert_close(x @ c, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 1.0, 3.0, 12.0])
def test_inverse_root(dtype: torch.dtype, decay: float) -> None:
    """At every condition, in float32 too: what is too small to be known is let down smoothly."""
    for x in blocks(decay=decay):
        gram = x.mT @ x / x.square().sum((-2, -1), keepdim=True)
        values, vectors = torch.linalg.eigh(gram)
        lifted = (values.clamp_min(0) + RIDGE) / (1 + RIDGE)
        exact = (vectors / lifted.sqrt()[:, None]) @ vectors.mT
        found = schatten.inverse_root(gram.to(dtype)).double()
        # The Gram matrix itself is rounded, and beside the ridge that is this much.
        bound = torch.finfo(dtype).eps / RIDGE
        error = (found - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
        assert error.max() < bound
        sign = x @ found / x.norm(dim=(-2, -1), keepdim=True)
        assert torch.linalg.matrix_norm(sign, 2).max() < 1 + bound


def test_zero_stays_zero() -> None:
    zero = torch.zeros(2, 4, 4)
    for p in EXPONENTS:
        for c in schatten.directions([zero, zero], p, 2.0**-23):
            assert c.isfinite().all()


# Steps -------------------------------------------------------------------------------------------


class Pairs:
    """Products A Bᵀ with a quadratic loss, in any gauge."""

    def __init__(
        self,
        gauge: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        orthonormal: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        left, right = draw(2, 12, 4), draw(2, 9, 4)
        if orthonormal:
            left, right = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
        turn = torch.eye(4).double() if gauge is None else gauge
        self.left = nn.Parameter((left @ turn).to(dtype))
        self.right = nn.Parameter((right @ torch.linalg.inv(turn).mT).to(dtype))
        self.target, self.weight = draw(2, 12, 9).to(dtype), draw(2, 12, 9).abs().to(dtype)
        self.grid = rankfold.Grid(rankfold.Factor(self.left), rankfold.Factor(self.right), groups=2)

    def product(self) -> Tensor:
        return self.left @ self.right.mT

    def loss(self) -> Tensor:
        return (self.weight * (self.product() - self.target).square()).sum() / 2

    def run(
        self,
        steps: int,
        normalize: str,
        lr: float = 0.05,
        momentum: float = 0.0,
        nesterov: bool = False,
        geometry: str = "fixed-quotient",
    ) -> Tensor:
        optimizer = rankfold.RiemannianSGD(
            self.grid,
            lr,
            geometry=geometry,
            normalize=normalize,
            momentum=momentum,
            nesterov=nesterov,
        )
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()
        return self.product().detach()


def half_power(gram: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values[..., None, :] ** power) @ vectors.mT


def steepest(gradient: Tensor, partner: Tensor, other: Tensor, own: Tensor, p: float) -> Tensor:
    """A factor's direction by symmetric roots and an SVD, jointly normalized with its partner's."""
    q = dual(p)
    root = half_power(partner.mT @ partner, -0.5)
    u, s, vh = torch.linalg.svd(gradient @ root, full_matrices=False)
    theirs = torch.linalg.svdvals(other @ half_power(own.mT @ own, -0.5))
    both = torch.cat([s, theirs], -1)
    if p == 1:
        largest = both.amax(-1, keepdim=True)
        values = (s == largest).double()
    else:
        norm = torch.linalg.vector_norm(both, q, dim=-1, keepdim=True)
        values = (s / norm) ** (q - 1)
    return (u * values[..., None, :]) @ vh @ root


@pytest.mark.parametrize("p", EXPONENTS)
def test_a_step_is_the_one_from_the_definition(p: float) -> None:
    problem = Pairs()
    a, b = problem.left.detach().clone(), problem.right.detach().clone()
    problem.loss().backward()
    g_a, g_b = problem.left.grad, problem.right.grad
    assert g_a is not None
    assert g_b is not None
    expected = (
        a - 0.05 * steepest(g_a, b, g_b, a, p),
        b - 0.05 * steepest(g_b, a, g_a, b, p),
    )
    problem.run(1, normalize=f"schatten-{p:g}")
    whitened = [g @ half_power(x.mT @ x, -0.5) for g, x in zip((g_a, g_b), (b, a), strict=True)]
    slack = 3 * let_down(whitened) if p == math.inf else 1e-9
    for found, wanted in zip((problem.left, problem.right), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, atol=0.05 * slack, rtol=0)


def test_the_norm_is_the_least_over_all_lifts() -> None:
    """Of the same vector downstairs, as seen from any other lift (Ξ_A + A Λ, Ξ_B − B Λᵀ)."""
    problem = Pairs()
    a, b = problem.left.detach(), problem.right.detach()
    start = a.clone(), b.clone()
    problem.run(1, lr=1.0, normalize="schatten-inf")
    xi_a, xi_b = start[0] - problem.left.detach(), start[1] - problem.right.detach()
    roots = half_power(start[1].mT @ start[1], 0.5), half_power(start[0].mT @ start[0], 0.5)
    generator = torch.Generator().manual_seed(2)
    for size in (0.0, 1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            turn = size * torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
            lift = (xi_a + start[0] @ turn) @ roots[0], (xi_b - start[1] @ turn.mT) @ roots[1]
            assert (schatten_norm(list(lift), math.inf) > 1 - 1e-3).all()


def test_p_2_is_the_metric_step() -> None:
    one, other = (Pairs().run(5, momentum=0.5, normalize=n) for n in ("metric", "schatten-2"))
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("p", EXPONENTS)
def test_steps_do_not_depend_on_the_gauge(p: float) -> None:
    turn = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    one, other = (Pairs(gauge).run(5, f"schatten-{p:g}", momentum=0.5) for gauge in (None, turn))
    torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("p", EXPONENTS)
def test_losses_fall(p: float) -> None:
    problem = Pairs(dtype=torch.float32)
    before = problem.loss().item()
    lr = 0.03 if p > 2 else 0.2  # of few singular values, or of all
    problem.run(100, lr=lr, momentum=0.8, normalize=f"schatten-{p:g}")
    assert problem.loss().item() < 0.7 * before


def test_a_gradient_of_low_rank_in_float32() -> None:
    """Its vanishing singular values are rounding, and must not become steps of their own."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(40, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    g = torch.outer(*torch.randn(2, 40, generator=generator, dtype=torch.float64).unbind())
    moved = []
    for dtype in (torch.float32, torch.float64):
        left, right = (nn.Parameter(x.to(dtype, copy=True)) for x in (a, b))
        grid = rankfold.Grid(rankfold.Factor(left), rankfold.Factor(right))
        optimizer = rankfold.RiemannianSGD(
            grid, 0.1, geometry="fixed-quotient", normalize="schatten-inf"
        )
        left.grad, right.grad = g.to(dtype) @ right.detach(), g.to(dtype).mT @ left.detach()
        optimizer.step()
        moved.append((left @ right.mT).detach().double() - a @ b.mT)
    assert torch.linalg.matrix_norm(moved[0] - moved[1], 2) < 2e-3 * 0.1
    assert torch.linalg.matrix_norm(moved[0], 2) < 2 * 0.1 * (1 + 0.1)


def test_what_cannot_be() -> None:
    for geometry in set(GEOMETRIES) - {"fixed-quotient"}:
        with pytest.raises(ValueError, match="for pairs; it is there for fixed-quotient"):
            rankfold.RiemannianSGD(Pairs().grid, 0.1, geometry=geometry, normalize="schatten-4")
    problem = Pairs(orthonormal=True)
    grid = rankfold.Grid(rankfold.Factor(problem.left), rankfold.Factor(problem.right))
    with pytest.raises(ValueError, match="isometry-embedded has no schatten-inf for larger grids"):
        rankfold.RiemannianSGD(grid, 0.1, geometry="isometry-embedded", normalize="schatten-inf")
    for name in ("schatten-0.5", "schatten-", "schatten-nan"):
        with pytest.raises(ValueError, match="a number from 1 to inf"):
            Pairs().run(1, normalize=name)
    with pytest.raises(ValueError, match="p is 1, 2 or inf"):
        rankfold.RiemannianSGD(
            Pairs().grid,
            torch.tensor(0.1),
            geometry="fixed-quotient",
            normalize="schatten-3",
            capturable=True,
        )


# Directions within a tangent space ---------------------------------------------------------------


Projection = Callable[[Tensor], Tensor]


def best_by_splitting(core: Tensor, normal: Projection) -> float:
    """The largest ⟨core, D⟩ over tangent D with ‖D‖₂ ≤ 1: a convex problem, solved to 1e-5.

    Alternating directions on its dual, the least nuclear norm of ``core`` + N. What is returned is
    bounded from both sides: a direction attains it, and no direction can exceed the dual value.
    """
    whole, shadow = core.clone(), torch.zeros_like(core)
    threshold = torch.linalg.svdvals(core).mean()
    lower, upper = 0.0, math.inf
    for _ in range(2000):
        u, s, vh = torch.linalg.svd(whole - shadow, full_matrices=False)
        shrunk = (u * (s - threshold).clamp_min(0)) @ vh
        direction = (whole - shadow - shrunk) / threshold
        direction = direction - normal(direction)
        size = max(1.0, float(torch.linalg.matrix_norm(direction, 2)))
        lower = max(lower, float((core * direction).sum()) / size)
        moved = core + normal(shrunk + shadow)
        shadow, whole = shadow + shrunk - moved, moved
        upper = min(upper, float(torch.linalg.svdvals(whole).sum()))
        if upper - lower < 1e-5 * upper:
            break
    assert upper - lower < 1e-3 * upper
    return upper


def corner_of(r: int) -> Projection:
    def normal(core: Tensor) -> Tensor:
        kept = torch.zeros_like(core)
        kept[..., r:, r:] = core[..., r:, r:]
        return kept

    return normal


def symmetric_top(core: Tensor) -> Tensor:
    r = core.shape[-1]
    top = core[..., :r, :]
    return torch.cat([(top + top.mT) / 2, torch.zeros_like(core[..., r:, :])], -2)


def cores() -> list[tuple[Tensor, Projection]]:
    generator = torch.Generator().manual_seed(5)
    r = 6

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    fall = 10 ** torch.linspace(0, -2, r, dtype=torch.float64)
    found: list[tuple[Tensor, Projection]] = []
    for inner, outer, shape in ((1.0, 1.0, 0.0), (5.0, 1.0, 0.0), (0.1, 1.0, 0.0), (1.0, 1.0, 1.0)):
        k, x, y = inner * draw(r, r), outer * draw(r, r) * fall**shape, outer * draw(r, r)
        block = torch.cat([torch.cat([k, y], 1), torch.cat([x, torch.zeros_like(k)], 1)])
        found.append((block, corner_of(r)))
        found.append((torch.cat([(k - k.mT) / 2, x]), symmetric_top))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", range(8))
def test_tangent_directions_against_a_convex_solver(which: int, dtype: torch.dtype) -> None:
    core, normal = cores()[which]
    found = schatten.steepest_tangent(core.to(dtype)[None], normal, 2.0**-23)[0].double()
    assert normal(found).abs().max() < 10 * torch.finfo(dtype).eps
    assert torch.linalg.matrix_norm(found, 2) <= 1 + 10 * torch.finfo(dtype).eps
    best = best_by_splitting(core, normal)
    reached = float((core * found).sum())
    assert 0.95 * best < reached <= best * (1 + 1e-5)


def direction_of(problem: Pairs, geometry: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The factors at the start and the rates at which a short step moves them."""
    lr = 1e-5
    start = problem.left.detach().clone(), problem.right.detach().clone()
    problem.run(1, "schatten-inf", lr=lr, geometry=geometry)
    moved = (problem.left.detach() - start[0]) / -lr, (problem.right.detach() - start[1]) / -lr
    return *start, *moved


@pytest.mark.parametrize("geometry", ["fixed-embedded", "isometry-embedded"])
def test_a_step_downstairs(geometry: str) -> None:
    """Against the dense problem in the tangent space of the products."""
    isometry = geometry.startswith("isometry")
    problem = Pairs(orthonormal=isometry)
    gradient = problem.weight * (problem.product().detach() - problem.target)
    a, b, d_a, d_b = direction_of(problem, geometry)
    moved = d_a @ b.mT + a @ d_b.mT
    for k in range(2):
        u, v = torch.linalg.qr(a[k]).Q, torch.linalg.qr(b[k]).Q
        off_u, off_v = torch.eye(12).double() - u @ u.mT, torch.eye(9).double() - v @ v.mT

        off = off_u, off_v

        def normal(
            x: Tensor, u: Tensor = a[k], v: Tensor = b[k], off: tuple[Tensor, Tensor] = off
        ) -> Tensor:
            inner = u.mT @ x @ v
            return off[0] @ x @ off[1] + isometry * (u @ ((inner + inner.mT) / 2) @ v.mT)

        assert torch.linalg.matrix_norm(moved[k], 2) < 1 + 1e-3
        best = best_by_splitting(gradient[k] - normal(gradient[k]), normal)
        assert 0.95 * best < float((gradient[k] * moved[k]).sum()) < best * (1 + 1e-3)


@pytest.mark.parametrize(
    ("geometry", "weight"), [("isometry-quotient", 1), ("isometry-canonical", 0.5)]
)
def test_a_step_of_isometries(geometry: str, weight: float) -> None:
    """Against the dense problem in the tangent space of each factor, in its own metric."""
    problem = Pairs(orthonormal=True)
    problem.loss().backward()
    grads = problem.left.grad, problem.right.grad
    a, b, d_a, d_b = direction_of(problem, geometry)
    for u, d, grad in ((a, d_a, grads[0]), (b, d_b, grads[1])):
        assert grad is not None
        for k in range(2):
            inner, root = u[k].mT @ d[k], math.sqrt(weight)
            assert (inner + inner.mT).abs().max() < 1e-3  # tangent, but for the step's curvature
            outer = d[k] - u[k] @ inner
            core = torch.cat([root * inner, outer])
            assert torch.linalg.matrix_norm(core, 2) < 1 + 1e-3
            overlap = u[k].mT @ grad[k]
            # In the coordinates of the metric a differential ⟨G, ·⟩ is this core.
            dual = torch.cat([(overlap - overlap.mT) / 2 / root, grad[k] - u[k] @ overlap])
            best = best_by_splitting(dual, symmetric_top)
            reached = float((grad[k] * d[k]).sum())
            assert 0.95 * best < reached < best * (1 + 1e-3)


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g != "fixed-quotient"])
def test_tangent_steps_do_not_depend_on_the_gauge(geometry: str) -> None:
    turn = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    isometry = geometry.startswith("isometry")
    if isometry:
        turn = torch.linalg.qr(turn).Q
    one, other = (
        Pairs(gauge, orthonormal=isometry).run(
            5, "schatten-inf", momentum=0.5, nesterov=True, geometry=geometry
        )
        for gauge in (None, turn)
    )
    torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_losses_fall_in_float32(geometry: str) -> None:
    problem = Pairs(dtype=torch.float32, orthonormal=geometry.startswith("isometry"))
    before = problem.loss().item()
    problem.run(100, "schatten-inf", lr=0.03, momentum=0.8, geometry=geometry)
    assert problem.loss().item() < 0.9 * before


STEPS = [(g, math.inf) for g in GEOMETRIES] + [("fixed-quotient", p) for p in EXPONENTS[:-1]]


@pytest.mark.parametrize(("geometry", "p"), STEPS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_member_whose_gradient_is_not_finite_stays(geometry: str, p: float, value: float) -> None:
    problem = Pairs(orthonormal=geometry.startswith("isometry"))
    optimizer = rankfold.RiemannianSGD(
        problem.grid, 0.1, geometry=geometry, normalize=f"schatten-{p:g}", momentum=0.5
    )
    problem.loss().backward()
    assert problem.left.grad is not None
    problem.left.grad[1, 0, 0] = value
    before = problem.product().detach().clone()
    optimizer.step()
    after = problem.product().detach()
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])
    assert [events["skipped"] for events in optimizer.counts().values()] == [1]


@pytest.mark.parametrize(("geometry", "p"), STEPS)
def test_a_gradient_of_zero_is_no_step(geometry: str, p: float) -> None:
    problem = Pairs(orthonormal=geometry.startswith("isometry"), dtype=torch.float32)
    optimizer = rankfold.RiemannianSGD(
        problem.grid, 0.1, geometry=geometry, normalize=f"schatten-{p:g}"
    )
    problem.left.grad, problem.right.grad = map(torch.zeros_like, (problem.left, problem.right))
    before = problem.product().detach().clone()
    optimizer.step()
    torch.testing.assert_close(problem.product().detach(), before, atol=1e-6, rtol=1e-6)
    assert not optimizer.counts()


@pytest.mark.parametrize(("geometry", "p"), STEPS)
def test_diagnostics_are_of_the_step_that_was_made(geometry: str, p: float) -> None:
    """The spectral norm of a small step along D, measured on the products themselves."""
    problem, lr = Pairs(orthonormal=geometry.startswith("isometry")), 1e-6
    optimizer = rankfold.RiemannianSGD(
        problem.grid,
        lr,
        geometry=geometry,
        normalize=f"schatten-{p:g}",
        momentum=0.5,
        nesterov=True,
    )
    optimizer.record_diagnostics()
    for _ in range(2):
        optimizer.zero_grad()
        problem.loss().backward()
        before = problem.product().detach().clone()
        optimizer.step()
    moved = torch.linalg.matrix_norm(problem.product().detach() - before, 2)
    said = [numbers["step_spectral_norm"] for numbers in optimizer.diagnostics().values()]
    torch.testing.assert_close(torch.tensor(said).double(), moved, atol=0, rtol=1e-4)


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g.startswith("isometry")])
def test_nothing_is_skipped_at_an_optimum(geometry: str) -> None:
    """Where steps too long go back and forth, and what is left of a gradient may be rounding."""
    generator = torch.Generator().manual_seed(6)
    left, right, target = (torch.randn(m, 8, generator=generator) for m in (20, 16, 20))
    params = [nn.Parameter(torch.linalg.qr(x).Q) for x in (left, right)]
    optimizer = rankfold.RiemannianSGD(
        rankfold.Grid(*params),
        0.2,
        geometry=geometry,
        normalize="schatten-inf",
        momentum=0.9,
        nesterov=True,
    )
    for _ in range(80):
        optimizer.zero_grad()
        (params[0] @ params[1].mT * (target @ right.mT)).sum().backward()
        optimizer.step()
    assert not optimizer.counts()
    for x in params:
        assert (x.mT @ x - torch.eye(8)).abs().max() < 1e-6
