"""What a step does on a CPU alone: fewer products where values show it, factors as they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import Factor, Grid, linalg, polar, rank_core, stacks, tall
from rankfold.geometries import GEOMETRIES, fixed_embedded

from .watching import Watch

EPS = torch.finfo(torch.float32).eps


def symmetric(norms: list[float], r: int = 6) -> Tensor:
    """Random symmetric float64 matrices of these Frobenius norms."""
    x = linalg.sym(torch.randn(len(norms), r, r, dtype=torch.float64))
    return x * (torch.tensor(norms, dtype=torch.float64) / linalg.frobenius(x))[:, None, None]


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).abs().max())


@pytest.mark.parametrize("shape", [(5, 128, 64), (5, 7, 3), (3, 2, 40, 48), (2, 17, 100)])
def test_inner_products_of_any_shape(shape: tuple[int, ...]) -> None:
    """By parts that divide a row or a column, or in one piece."""
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    expected = (x * y).sum((-2, -1))
    torch.testing.assert_close(tall.inner(x, y), expected)
    columns = [each.mT.contiguous().mT for each in (x, y)]
    torch.testing.assert_close(tall.inner(columns[0], columns[1]), expected)


@pytest.mark.parametrize("size", [0.0, 1e-5, 3e-4, 4e-3, 0.02, 0.05, 0.3])
def test_inverse_roots_of_every_size_of_error(size: float) -> None:
    gram = (torch.eye(6, dtype=torch.float64) + symmetric([size] * 5)).float()
    values, vectors = torch.linalg.eigh(gram.double())
    exact = (vectors * values[:, None] ** -0.5) @ vectors.mT
    steps = polar.newton_schulz_steps(max(size, 0.1), torch.float32)
    assert apart(polar.inverse_sqrt(gram, steps), exact) < 4 * EPS
    root, inverse_root = linalg.root_near_identity(gram)
    assert apart(root.double() @ root.double().mT, gram) < 8 * EPS
    assert apart(inverse_root.double() @ root.double(), torch.eye(6)) < 8 * EPS


def test_a_member_has_the_same_root_whoever_is_beside_it() -> None:
    sizes = [1e-5, 1e-3, 0.02, 0.3]
    gram = (torch.eye(6, dtype=torch.float64) + symmetric(sizes)).float()
    together = polar.inverse_sqrt(gram, 5), *linalg.root_near_identity(gram)
    for k in range(len(sizes)):
        alone = polar.inverse_sqrt(gram[k : k + 1], 5), *linalg.root_near_identity(gram[k : k + 1])
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[k], other[0])


@pytest.mark.parametrize("size", [0.0, 1e-5, 3e-4, 4e-3, 0.3])
def test_inverses_from_guesses_of_every_quality(size: float) -> None:
    x = torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(5, 6, 6, dtype=torch.float64)
    guess = torch.linalg.inv(x) @ (torch.eye(6, dtype=torch.float64) + symmetric([size] * 5))
    found = linalg.inverse(x.float(), guess.float())
    assert apart(found, torch.linalg.inv(x.float().double())) < 16 * EPS


def core_problem(step: list[float], r: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S + K, XᵀX, YᵀY and S⁻¹ for steps of these lengths from a core with values in [1, 2]."""
    g = torch.tensor(step)[:, None, None]
    u, v = (torch.linalg.qr(torch.randn(len(step), r, r)).Q for _ in range(2))
    values = torch.linspace(1, 2, r)
    core, back = (u * values) @ v.mT, (v / values) @ u.mT
    k, x, y = (g * torch.randn(len(step), r, r) / r for _ in range(3))
    return core + k, x.mT @ x, y.mT @ y, back


@pytest.mark.parametrize("length", [1e-3, 0.03, 0.1, 0.3])
def test_a_core_that_ends_early_is_the_one_of_all_iterations(
    length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = core_problem([length] * 4)
    early = rank_core.best_rank_core(*problem)
    monkeypatch.setattr(
        rank_core, "_is_settled", lambda x, *_: torch.zeros(len(x), dtype=torch.bool)
    )
    full = rank_core.best_rank_core(*problem)
    for one, other in zip(early[:3], full[:3], strict=True):
        assert apart(one, other) < 8 * EPS * float(other.abs().max())
    assert torch.equal(early.unconverged, full.unconverged)


def test_a_member_has_the_same_core_whoever_is_beside_it() -> None:
    lengths = [1e-3, 0.05, 0.3, 5.0]
    problem = core_problem(lengths)
    watch = Watch()
    with watch:
        rank_core.best_rank_core(*(x[:1] for x in problem))
    short = watch.operations["aten.bmm.default"]
    watch = Watch()
    with watch:
        together = rank_core.best_rank_core(*problem)
    assert short < watch.operations["aten.bmm.default"]
    for k in range(len(lengths)):
        alone = rank_core.best_rank_core(*(x[k : k + 1] for x in problem))
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[k], other[0])


SHARED = [0.0, 1e-5, 1e-3, 0.02, 0.03, 0.2, 0.49, 3.0]


def test_shares_of_changes_of_every_size() -> None:
    """Both factors' shares make up the whole change, and nobody's depend on who is beside them."""
    delta = torch.randn(len(SHARED), 6, 6, dtype=torch.float64)
    delta *= (torch.tensor(SHARED) / linalg.frobenius(delta))[:, None, None]
    share, guess, _ = linalg.half_share(delta.float())
    rest = fixed_embedded._rest(delta.float(), share, guess)
    h, eye = share.double(), torch.eye(6, dtype=torch.float64)
    exact = (delta.float().double() - h) @ torch.linalg.inv(eye + h)
    wrong = linalg.frobenius(rest.double() - exact)
    assert (wrong <= 4 * EPS * linalg.frobenius(exact)).all()
    for k in range(len(SHARED)):
        one = slice(k, k + 1)
        alone = fixed_embedded._rest(delta[one].float(), share[one], guess[one])
        assert torch.equal(alone[0], rest[k])


@pytest.mark.parametrize("columns", [False, True])
def test_a_sum_that_is_given_away_is_written_into(columns: bool) -> None:
    base, x = (torch.randn(3, 1, 4, 7).mT if columns else torch.randn(3, 1, 7, 4) for _ in "ab")
    c = torch.randn(3, 1, 4, 4)
    before, kept = base.clone(), tall.add_product(base, x, c, alpha=-1.0)
    assert torch.equal(base, before)
    made = tall.add_product(base, x, c, alpha=-1.0, given=True)
    assert torch.equal(made, kept)
    assert made.data_ptr() == base.data_ptr()


@pytest.mark.parametrize("blocks", [1, 2])
def test_products_stay_by_columns(blocks: int) -> None:
    rows, columns = (torch.randn(3, blocks, 7, 4), torch.randn(3, blocks, 4, 7).mT)
    coefficient, alive = torch.randn(3, 1, 4, 4), torch.ones(3, dtype=torch.bool)
    scale = torch.randn(3)

    def made(x: Tensor) -> list[Tensor]:
        c = coefficient.to(x.dtype)
        return [
            tall.turn(x, c),
            tall.turn(x, c, tall.Plus(x, 0.5)),
            tall.subtract(x, x, c, 0.5, tall.Plus(x, 0.3)),
            tall.combine(x, c, x, c),
            tall.move(x, c, x, c, alive),
            tall.step(x, x, scale.to(x.dtype), alive),
        ]

    for x, by_columns in ((rows, False), (columns, True)):
        for y, exact in zip(made(x), made(x.contiguous().double()), strict=True):
            assert tall.by_columns(y) == by_columns
            torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tall.square(x), tall.square(x.contiguous()))
    # A kernel reads rows, and would turn it every time.
    assert not tall.by_columns(columns.to("meta"))


def attention(width: int = 8, rank: int = 2, layers: int = 3) -> list[Grid]:
    """Query·key and output·value of some layers, of which the outputs alone lie by rows."""
    found = []
    for _ in range(layers):
        q, k, v, o = (nn.Parameter(torch.randn(width, width) / 2) for _ in range(4))
        heads = width // rank
        for left, axis, right in ((q, 0, k), (o, 1, v)):
            factors = Factor(left, axis=axis, blocks=heads), Factor(right, axis=0, blocks=heads)
            found.append(Grid(*factors, groups=heads))
    return found


def test_plans_hold_factors_that_lie_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = [(str(k), grid) for k, grid in enumerate(attention())]
    assert len(stacks.plans_for(grids)) == 1  # there is room for all: one stack, whatever it takes
    monkeypatch.setattr(stacks, "_CACHED_BYTES", 4 * 8 * 8 * 4)
    plans = stacks.plans_for(grids)
    lying = []
    for plan in plans:
        (stack,) = plan.stacks
        point = stack.read(plan.gather(stacks.itself))
        lying.append((len(stack.members), *(tall.by_columns(x) for x in point)))
    assert lying == [(8, True, True), (4, True, True), (8, False, True), (4, False, True)]


def test_plans_that_are_cut_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = [(str(k), grid) for k, grid in enumerate(attention(layers=6)[0::2])]
    monkeypatch.setattr(stacks, "_CACHED_BYTES", 8 * 8 * 8 * 4)  # four layers, and two are left
    assert [len(plan.stacks[0].members) for plan in stacks.plans_for(grids)] == [12, 12]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_step_turns_no_factor_in_memory(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a step on columns makes of factors lies by rows."""
    made = []
    for name in ("turn", "subtract", "combine", "move", "step"):
        plain = getattr(tall, name)

        def watched(*args: object, plain: object = plain, **options: object) -> Tensor:
            made.append(plain(*args, **options))  # type: ignore[operator]
            return made[-1]

        monkeypatch.setattr(tall, name, watched)
    grids = attention()[0::2]
    with pytest.warns(UserWarning, match="singular values"):
        rankfold.orthonormalize_(grids)
    optimizer = rankfold.RiemannianSGD(grids, 0.01, geometry=geometry, momentum=0.9)
    for _ in range(2):
        for grid in grids:
            a, b = (f.view_blocks(f.param[None])[0] for f in (grid.left[0], grid.right[0]))
            (a @ b.mT).square().sum().backward()
        made.clear()
        optimizer.step()
    assert len(made) >= 4
    assert all(tall.by_columns(x) for x in made)
