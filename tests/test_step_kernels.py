"""Kernels of what lies between the products over rows, against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rankfold import kernels, tall, whitening
from rankfold.geometries import Pair, geometry_for
from rankfold.geometries.embedded import EmbeddedGeometry, NewCoefficients, Side, TangentXKY
from rankfold.linalg import skew, sym
from rankfold.tall import Grams
from rankfold.whitening import Manner

from .interpreted import (
    CUDA,
    DEVICE,
    in_kernels,
    on_the_host,
    quiet,
    run_in_interpreter,
)
from .points import options

pytest.importorskip("triton")

EPS = torch.finfo(torch.float32).eps
MEMBERS = 3
pytestmark = [quiet, pytest.mark.usefixtures("kernels_imported")]

ranks = pytest.mark.parametrize("r", [1, 3, 20, *([64] if CUDA else [])])
every_rank = pytest.mark.parametrize("r", [1, 3, 20, *([64, 100, 128] if CUDA else [])])


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


class Draw:
    """Random float32 tensors, a new one at every call."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE)


def close(found: Tensor, expected: Tensor, roundings: float) -> None:
    """Matrices or numbers, to so many roundings of the largest entry."""
    off = (found.double() - expected).abs().max()
    assert off <= roundings * EPS * expected.abs().max(), float(off / expected.abs().max() / EPS)


def lower(draw: Draw, r: int) -> Tensor:
    return draw(MEMBERS, r, r).tril() / r**0.5 + torch.eye(r, device=DEVICE)


@in_kernels
@ranks
def test_turns_of_a_quotient_step(r: int) -> None:
    """Each side's comes of the other one's inverse."""
    draw = Draw(1)
    a, b = lower(draw, r), lower(draw, r)
    left, right = kernels.quotient.turns((a, b), 0.25)
    close(left, b.double().mT @ b.double() / 4, 8)
    close(right, a.double().mT @ a.double() / 4, 8)
    assert left.data_ptr() + left.numel() * left.element_size() == right.data_ptr()


@in_kernels
@ranks
def test_shifts_of_a_quotient_step(r: int) -> None:
    draw = Draw(2)
    a, b, over_a, over_b = lower(draw, r), lower(draw, r), draw(3, r, r), draw(3, r, r)
    left, right = kernels.quotient.shifts((a, b), (over_a, over_b))
    wide = [x.double() for x in (a, b, over_a, over_b)]
    half_a, half_b = wide[0].mT @ wide[0] @ wide[2] / 2, wide[1].mT @ wide[1] @ wide[3] / 2
    close(left, half_a - half_b.mT, 32)
    assert torch.equal(right, -left.mT)


@in_kernels
@ranks
def test_sizes_of_products(r: int) -> None:
    draw = Draw(11)
    a, b = lower(draw, r), lower(draw, r)
    found = kernels.quotient.product_square(a, b)
    close(found, (a.double().mT @ b.double()).square().sum((1, 2)), 8)


@in_kernels
@ranks
@pytest.mark.parametrize("chosen", [None, [True, False, True]])
def test_directions_of_given_squares(r: int, chosen: list[bool] | None) -> None:
    """Of a member with nothing in it, too, and of both sides behind each other."""
    draw, blocks = Draw(12), 2
    made = draw(2 * MEMBERS, blocks, r, r)
    square, now = draw(2 * MEMBERS, blocks).square(), draw(2 * MEMBERS, blocks).square()
    now[2, 1] = square[2, 1] = 0
    members = None if chosen is None else torch.tensor(chosen, device=DEVICE)
    found = kernels.whiten.of_square(made, square, now, members)
    ratio = (square.double() / now.double()).nan_to_num(0)
    if members is not None:
        ratio[~members.repeat(2)] = 1
    close(found, ratio.sqrt()[..., None, None] * made.double(), 4)


@in_kernels
@ranks
def test_what_bounds_a_quotient_step(r: int) -> None:
    """Of members just within the bound, just beyond it, and not finite."""
    draw = Draw(3)
    matrices = [draw(1, r, r).expand(6, r, r).clone() for _ in range(4)]
    scale, square = torch.full((6,), -0.5, device=DEVICE), torch.full((6,), 9.0, device=DEVICE)
    sizes = [x[0].double().norm() for x in matrices]
    bound = float(sizes[0] + sizes[1] + 1.5 * (sizes[2] + sizes[3]))
    matrices[0][2, 0, 0], matrices[3][3, 0, 0], square[4] = torch.nan, torch.inf, torch.nan
    for largest, within in ((bound * (1 + 1e-5), True), (bound * (1 - 1e-5), False)):
        alive = kernels.quotient.bounded(
            (matrices[0], matrices[1]), (matrices[2], matrices[3]), scale, square, largest
        )
        assert alive.tolist() == [within, within, False, False, False, within]


@in_kernels
@every_rank
@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
@pytest.mark.parametrize("inner", [0.0, 0.5])
def test_lengths_of_isometries_vectors(r: int, grid: tuple[int, int], inner: float) -> None:
    draw, (i, j) = Draw(4), grid
    sides, expected = [], torch.zeros(MEMBERS, dtype=torch.float64, device=DEVICE)
    for own, partners in ((i, j), (j, i)):
        xi, cross = draw(MEMBERS, own, 40, r), 0.5 * draw(MEMBERS, own, r, r)
        square = xi.mT @ xi
        sides.append(Grams(cross, cross, square))
        traces = square.double().diagonal(dim1=-2, dim2=-1).sum((1, 2))
        expected += partners * (traces - inner * cross.double().square().sum((1, 2, 3)))
    found = kernels.stiefel.length(sides[0], sides[1], inner)
    close(found, expected.clamp_min(0), 16)
    sides[0].square[1, -1, 0, 0] = torch.nan
    assert kernels.stiefel.length(sides[0], sides[1], inner).isnan().tolist() == [
        False,
        True,
        False,
    ]


@in_kernels
@ranks
def test_cores_of_isometries_vectors(r: int) -> None:
    draw = Draw(5)
    left, right, x, y = (draw(MEMBERS, r, r) for _ in range(4))
    y[2] = -5 * torch.eye(r, device=DEVICE)  # so that traces add up to less than nothing
    x[2] = 0
    k, square = kernels.frames.skew_core(left, right, x, y)
    expected = skew(left.double() - right.double()) / 2
    close(k, expected, 2)
    traces = (x + y).double().diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    close(square, expected.square().sum((1, 2)) + traces, 8)


@in_kernels
@ranks
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("deskew", [True, False])
def test_carrying(r: int, framed: bool, deskew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything it takes arbitrary, but for what makes sums cancel."""
    draw = Draw(6)
    k, xx, yy, *rest = (draw(MEMBERS, r, r) / math.sqrt(r) for _ in range(13))
    new, inner, to = NewCoefficients(*rest[:4]), (rest[4], rest[5]), rest[6:]
    grams = sym(xx), sym(yy)
    tall_ones = [draw(MEMBERS, 30, r) for _ in range(4)]

    def coordinates(dtype: torch.dtype) -> TangentXKY:
        def side(own: int) -> Side:
            a, t = (x.to(dtype) for x in tall_ones[2 * own : 2 * own + 2])
            to_u, to_x = (x.to(dtype) if framed else None for x in to[2 * own : 2 * own + 2])
            return Side(a, t, to_u, to_x, inner[own].to(dtype), xx.to(dtype))

        numbers = (x.to(dtype) for x in (k, *grams, xx[:, 0, 0]))
        return TangentXKY(side(0), side(1), *numbers)

    geometry = geometry_for("fixed-embedded", 1, 1)
    assert isinstance(geometry, EmbeddedGeometry)
    for served in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, served, lambda *x: x[0].dtype == torch.float32)
    found = geometry.carry(coordinates(torch.float32), new, deskew)
    wide = NewCoefficients(*(x.double() for x in new))
    expected = geometry.carry(coordinates(torch.float64), wide, deskew)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, 64)


@in_kernels
@every_rank
@pytest.mark.parametrize("chosen", [None, [True, False, True]])
@pytest.mark.parametrize(("blocks", "m"), [(1, 7), (2, 600)])
def test_balanced_rows(r: int, chosen: list[bool] | None, blocks: int, m: int) -> None:
    x = Draw(7)(MEMBERS, blocks, m, r)
    x *= torch.logspace(-5, 0, m, device=DEVICE)[:, None]
    x[:, :, 0] = 0
    members = None if chosen is None else torch.tensor(chosen, device=DEVICE)
    manner = Manner(0.0, balance=0.5, members=members)
    rows, weights = kernels.whiten.balanced(x, 0.5, 2.0**-8, members)
    wide, expected = whitening._balanced(x.double(), manner)
    torch.testing.assert_close(weights.double(), expected, rtol=8 * EPS, atol=0)
    torch.testing.assert_close(rows.double(), wide, rtol=8 * EPS, atol=0)
    nothing, ones = kernels.whiten.balanced(torch.zeros_like(x), 0.5, 2.0**-8, None)
    assert not nothing.any()
    assert ones.isfinite().all()
    x[0, 0, 3, 0] = torch.nan
    assert kernels.whiten.balanced(x, 0.5, 2.0**-8, None)[0][0, 0, 3].isnan().all()


@in_kernels
@pytest.mark.parametrize("shape", [(1, 7, 3), (2, 300, 20)])
def test_a_step_and_one_ahead(shape: tuple[int, int, int]) -> None:
    draw = Draw(8)
    a, t = draw(MEMBERS, *shape), draw(MEMBERS, *shape)
    scale = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)
    once, twice = kernels.moves.steps(a, t, scale, 0.75)
    assert torch.equal(once, kernels.moves.step(a, t, scale, weight=0.75))
    expected = kernels.moves.step(once, t, scale, weight=0.75)
    torch.testing.assert_close(twice, expected, rtol=2 * EPS, atol=2 * EPS)


@in_kernels
def test_numbers_that_both_sides_share() -> None:
    """Are those of either, where sides go as one."""
    draw, (m, r) = Draw(9), (40, 5)
    a, t, old = (draw(2 * MEMBERS, 2, m, r) for _ in range(3))
    c, d = draw(2 * MEMBERS, 2, r, r), draw(2 * MEMBERS, 2, r, r)
    scale, alive = draw(MEMBERS), torch.tensor([True, False, True], device=DEVICE)
    scales, alives = scale.repeat(2), alive.repeat(2)
    moves, sums = kernels.moves, kernels.tall
    pairs = [
        (moves.step(a, t, scale, alive), moves.step(a, t, scales, alives)),
        (moves.settle(a, t, c, scale, alive), moves.settle(a, t, c, scales, alives)),
        (
            moves.combine(a, c, t, d, add_a=True, alive=alive),
            moves.combine(a, c, t, d, add_a=True, alive=alives),
        ),
        (moves.restore(t.clone(), old, alive), moves.restore(t.clone(), old, alives)),
        (sums.stepped_gram(a, t, scale), sums.stepped_gram(a, t, scales)),
        (tall.per_member(scale, a) * a, tall.per_member(scales, a) * a),
    ]
    grams = tall.Grams(c @ c.mT, d / 9, d @ d.mT)
    landed = (kernels.stiefel.landing(*grams, x) for x in (scale / 9, scales / 9))
    pairs += zip(*landed, strict=True)
    for shared, repeated in pairs:
        assert torch.equal(shared, repeated)


@in_kernels
@pytest.mark.parametrize("blocks", [1, 2])
def test_turns_that_lie_transposed(blocks: int) -> None:
    draw, r = Draw(10), 20
    a, t, turn = draw(MEMBERS, blocks, 50, r), draw(MEMBERS, blocks, 50, r), draw(MEMBERS, 1, r, r)
    found = kernels.tall.sums(a, t, turn.mT, cross=True, square=True)
    straight = kernels.tall.sums(a, t, turn.mT.contiguous(), cross=True, square=True)
    assert all(map(torch.equal, found, straight))
    turned = t.double() @ turn.double().mT
    close(found[0], a.double().mT @ turned, 8)


@in_kernels
@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("name", ["isometry-embedded", "isometry-quotient", "isometry-canonical"])
def test_a_block_that_overflows_stops_its_member(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the span of its columns, where no other block's overlaps see it."""
    for served in ("serve", "serve_small"):
        monkeypatch.setattr(kernels, served, lambda *x: x[0].dtype == torch.float32)
    draw, r = Draw(13), 4
    point = Pair(*(torch.linalg.qr(draw(MEMBERS, i, 12, r)).Q for i in (2, 3)))
    grad = Pair(*(0.1 * draw(*x.shape) for x in point))
    away = torch.eye(12, device=DEVICE)[0]
    u = point.left[1, block]
    away = away - u @ (u.mT @ away)
    grad.left[1, block] = 0
    grad.left[1, block, :, 0] = 1e25 * away
    told = options("polar", 0.05, normalize="whitened")
    outcome = geometry_for(name, 2, 3).step(point, grad, None, told)
    assert outcome.alive.tolist() == [True, False, True]
    assert torch.equal(outcome.point.left[1], point.left[1])
    assert outcome.point.left.isfinite().all()
