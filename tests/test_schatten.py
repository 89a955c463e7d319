"""Directions of steepest descent under Schatten norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import schatten
from rankfold.whitening import Manner, whiten

from .schatten_cases import Pairs, dual, raised

EXPONENTS = (1.0, 1.5, 2.0, 4.0, math.inf)
# What is added to eigenvalues of a Gram matrix of trace 1.
RIDGE = 2.0**-16


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
    return max(float((1 - raised(share).sqrt()).max()) for share in shares)


@pytest.mark.parametrize("p", EXPONENTS)
def test_directions_are_of_norm_one_and_reach_the_dual_norm(p: float) -> None:
    """By Hölder's inequality nothing of norm 1 lies further along X than its dual norm."""
    xs = blocks()
    if p == math.inf:
        cs = [whiten(x[:, None], None, 1, Manner(2.0**-23)).turn[:, 0] for x in xs]
    else:
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
        scale = x.square().sum((-2, -1))
        gram = x.mT @ x
        values, vectors = torch.linalg.eigh(gram / scale[:, None, None])
        lifted = scale[:, None] * (values.clamp_min(0) + RIDGE) / (1 + RIDGE)
        exact = (vectors / lifted.sqrt()[:, None]) @ vectors.mT
        found = schatten.inverse_root(gram.to(dtype), scale.to(dtype)).double()
        # The Gram matrix itself is rounded, and beside the ridge that is this much.
        bound = torch.finfo(dtype).eps / RIDGE
        error = (found - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
        assert error.max() < bound
        sign = x @ found
        assert torch.linalg.matrix_norm(sign, 2).max() < 1 + bound


@pytest.mark.parametrize("p", [1.0001, 1.001, 1.01])
def test_near_one_the_largest_singular_vectors_are_left(p: float) -> None:
    """In float32, where powers of any other singular value underflow."""
    xs = [x.float() for x in blocks()]
    found = schatten.directions([x.mT @ x for x in xs], p, 2.0**-23)
    made = [x @ c for x, c in zip(xs, found, strict=True)]
    torch.testing.assert_close(schatten_norm(made, p), torch.ones(len(xs[0])), atol=1e-3, rtol=0)
    largest = torch.stack([torch.linalg.matrix_norm(x, 2) for x in xs]).amax(0)
    assert (inner(xs, made) > (1 - 1e-3) * largest).all()


def test_zero_stays_zero() -> None:
    zero = torch.zeros(2, 4, 4)
    for p in (1.001, *EXPONENTS):
        if p < math.inf:
            for c in schatten.directions([zero, zero], p, 2.0**-23):
                assert c.isfinite().all()
    found = whiten(zero[:, None], None, 1, Manner(2.0**-23))
    assert found.turn.isfinite().all()
    assert not found.squares.any()


@pytest.mark.parametrize("p", [p for p in EXPONENTS if p < math.inf])
def test_directions_below_the_floor_are_shorter_by_as_much(p: float) -> None:
    xs = blocks()
    size = torch.stack([x.square().sum((-2, -1)) for x in xs]).sum(0).sqrt()
    far = [x / size[:, None, None] for x in xs]  # of norm 1
    whole = schatten.directions([x.mT @ x for x in far], p, 2.0**-23)
    for short in (0.5, 1e-6):
        found = schatten.directions([short**2 * x.mT @ x for x in far], p, 1.0)
        for c, one in zip(found, whole, strict=True):
            torch.testing.assert_close(c, one, atol=1e-6, rtol=1e-6)


def test_a_part_far_below_its_side_is_shorter_by_as_much() -> None:
    x = blocks()[0][None, :3]
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt()
    x[:, 1] *= 2.0**-15
    x[:, 2] *= 2.0**-18
    found = whiten(x, None, 1, Manner(2.0**-40))
    sizes = torch.linalg.matrix_norm(x @ found.turn, 2)
    lengths = torch.tensor([[1.0, 1.0, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(sizes, lengths, atol=0, rtol=5e-3)


@pytest.mark.parametrize("floor", [2.0**-23, 2.0**10])
def test_whitening_in_float32_raises_what_its_gram_matrix_has_lost(floor: float) -> None:
    """Singular values down to 2⁻¹¹ of the norm, whose squares are a few units of rounding."""
    generator = torch.Generator().manual_seed(3)
    u, v = (
        torch.linalg.qr(torch.randn(2, 3, m, 8, generator=generator, dtype=torch.float64)).Q
        for m in (300, 8)
    )
    values = 2.0 ** -torch.linspace(0, 11, 8, dtype=torch.float64)
    x = ((u * values) @ v.mT).float()
    found = whiten(x, None, 4, Manner(floor))
    made = torch.linalg.svdvals(x.double() @ found.turn.double())
    squares = raised(values.square() / values.square().sum())
    length = min(1.0, float(values.norm()) / (2 * floor))
    exact = 2 * length * squares.sort(descending=True).values.sqrt()
    torch.testing.assert_close(made, exact.expand_as(made), atol=0, rtol=5e-3)
    assert made.min() > 2 * length * 0.85
    torch.testing.assert_close(found.squares.double(), made.square().sum(-1), atol=0, rtol=1e-4)


# Steps -------------------------------------------------------------------------------------------


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
