"""Repairs of factor gradients that no function of the product has, against their definitions.

Every repair is the nearest tangent vector in some least-squares sense. Here the tangent space is a
dense basis, the nearest vector is found by LAPACK, and the library has to agree, on gradients
drawn for each factor by itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import linalg
from rankfold.geometries import Pair

from .points import Case, dense, stacked
from .reference import FIXED, GEOMETRIES, ISOMETRIES, Reference, matrix_of
from .toys import same_bits

WIDE = torch.float64
REPAIRS = ("none", "average", "exact")
every_grid = pytest.mark.parametrize("grid", [(1, 1), (4, 1), (2, 3)])


def case_of(name: str, grid: tuple[int, int], seed: int = 0) -> Case:
    return Case(name, *grid, 7, 6, 3, seed)


def stretched(case: Case, condition: float) -> Pair:
    """A point whose stacked factors both have this condition number, in unrelated directions."""
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), case.r, dtype=WIDE)
    sides = []
    for side, x in enumerate(case.random(1)):
        basis = torch.linalg.qr(stacked(x)).Q
        turn = torch.linalg.qr(case.random(60 + side).left[:, 0, : case.r]).Q
        sides.append((basis * values @ turn.mT).view_as(x))
    return Pair(*sides)


def reference(case: Case, point: Pair, member: int) -> Reference:
    return Reference(case.name, list(point.left[member]), list(point.right[member]), lr=1.0)


def flat(pair: Pair, member: int) -> Tensor:
    """A pair as one upstairs vector of the reference."""
    return torch.cat([x[member].flatten() for x in pair])


def nearest(basis: Tensor, linear: Tensor, target: Tensor) -> Tensor:
    """The x in the span of ``basis`` (size, d) with ``linear @ x`` nearest to ``target``."""
    solution: Tensor = torch.linalg.lstsq(linear @ basis, target[:, None]).solution
    return basis @ solution[:, 0]


def nearest_to_gradients(space: Tensor, a: Tensor, b: Tensor, g_a: Tensor, g_b: Tensor) -> Tensor:
    """argmin ‖ΞB − G_A‖² + ‖ΞᵀA − G_B‖² over Ξ in the span of ``space`` (m·n, d), as (m, n)."""
    m, n = len(a), len(b)

    def both(x: Tensor) -> Tensor:
        xi = x.view(-1, m, n)
        return torch.cat([(xi @ b).flatten(1), (xi.mT @ a).flatten(1)], 1)

    target = torch.cat([g_a.flatten(), g_b.flatten()])
    return nearest(space, matrix_of(both, m * n), target).view(m, n)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# Fixed rank, embedded ----------------------------------------------------------------------------


@every_grid
@pytest.mark.parametrize(("condition", "tolerance"), [(None, 1e-12), (1e3, 1e-11)])
def test_the_exact_repair_is_the_nearest_tangent_matrix(
    grid: tuple[int, int], condition: float | None, tolerance: float
) -> None:
    case = case_of("fixed-embedded", grid)
    point = case.point() if condition is None else stretched(case, condition)
    grad, geometry = case.random(10), case.geometry
    repaired = geometry.gradient(geometry.frame(point), grad, "exact")
    found = dense(geometry, point, repaired)
    a, b = stacked(point.left), stacked(point.right)
    for k in range(2):
        space = reference(case, point, k).spaces.downstairs
        g_a, g_b = stacked(grad.left)[k], stacked(grad.right)[k]
        expected = nearest_to_gradients(space, a[k], b[k], g_a, g_b)
        assert relative(found[k], expected) < tolerance
        # What is returned are that matrix's own factor gradients, which momentum may average.
        assert relative(stacked(repaired.left)[k], expected @ b[k]) < tolerance
        assert relative(stacked(repaired.right)[k], expected.T @ a[k]) < tolerance
        # The gradients were far from consistent, so there was something to repair.
        assert relative(expected @ b[k], g_a) > 0.05


@every_grid
@pytest.mark.parametrize("repair", ["none", "average"])
def test_the_average_repair_is_the_mean_of_the_overlaps(grid: tuple[int, int], repair: str) -> None:
    """K* = (K_C + K_D)/2, which is argmin ‖ΞV − C‖² + ‖ΞᵀU − D‖²; no repair is cheaper here."""
    case = case_of("fixed-embedded", grid, seed=1)
    point, grad, geometry = case.point(), case.random(10), case.geometry
    found = dense(geometry, point, geometry.gradient(geometry.frame(point), grad, repair))
    for k in range(2):
        (u, r_a), (v, r_b) = (torch.linalg.qr(stacked(x)[k]) for x in point)
        c, d = (
            torch.linalg.solve(r.T, stacked(g)[k].T).T
            for r, g in zip((r_b, r_a), grad, strict=True)
        )
        k_c, k_d = u.T @ c, d.T @ v
        mean = (k_c + k_d) / 2
        expected = (c - u @ k_c) @ v.T + u @ (d - v @ k_d.T).T + u @ mean @ v.T
        assert relative(found[k], expected) < 1e-12
        space = reference(case, point, k).spaces.downstairs
        assert relative(found[k], nearest_to_gradients(space, u, v, c, d)) < 1e-12
        assert (k_c - k_d).norm() > 0.5 * mean.norm()


@every_grid
def test_the_two_repairs_differ_unless_the_factors_are_orthonormal(grid: tuple[int, int]) -> None:
    case = case_of("fixed-embedded", grid)
    geometry, grad = case.geometry, case.random(10)
    balanced = Pair(*(torch.linalg.qr(stacked(x)).Q.view_as(x) for x in case.random(1)))
    for point, same in ((case.point(), False), (balanced, True)):
        frame = geometry.frame(point)
        exact, average = (
            dense(geometry, point, geometry.gradient(frame, grad, r)) for r in ("exact", "average")
        )
        difference = relative(exact, average)
        assert difference < 1e-13 if same else difference > 1e-2


# Partial isometries, embedded --------------------------------------------------------------------


@every_grid
@pytest.mark.parametrize("repair", REPAIRS)
def test_isometries_always_take_the_nearest_tangent_matrix(
    grid: tuple[int, int], repair: str
) -> None:
    """argmin ‖ΞV − G_U‖² + ‖ΞᵀU − G_V‖² over tangent Ξ, with stacked factors for grids."""
    case = case_of("isometry-embedded", grid, seed=2)
    point, grad, geometry = case.point(), case.random(10), case.geometry
    gradient = geometry.gradient(geometry.frame(point), grad, repair)
    found = dense(geometry, point, gradient)
    for k in range(2):
        u, v, g_u, g_v = (stacked(x)[k] for x in (*point, *grad))
        spaces = reference(case, point, k).spaces
        expected = nearest_to_gradients(spaces.downstairs, u, v, g_u, g_v)
        assert relative(found[k], expected) < 1e-12
        if grid != (1, 1):  # these keep the gradient upstairs, as the horizontal lift
            above = flat(gradient, k)
            lift = nearest(spaces.horizontal, spaces.jacobian, expected.flatten())
            assert relative(above, lift) < 1e-12


@every_grid
def test_a_grid_of_isometries_repairs_the_rank_first_and_then_projects(
    grid: tuple[int, int],
) -> None:
    """The same in two stages: nearest among matrices of the rank, then among the grid's own.

    The stacked factors have 𝒰ᵀ𝒰 = I·1 and 𝒱ᵀ𝒱 = J·1, which makes the Sylvester equation of the
    first stage trivial: K* = (I K_D + J K_C)/(I + J) in orthonormal frames.
    """
    case = case_of("isometry-embedded", grid, seed=3)
    point, grad, geometry = case.point(), case.random(10), case.geometry
    found = dense(geometry, point, geometry.gradient(geometry.frame(point), grad))
    i, j = grid
    for k in range(2):
        u, v, g_u, g_v = (stacked(x)[k] for x in (*point, *grad))
        lefts, rights = list(point.left[k]), list(point.right[k])
        fixed = Reference("fixed-embedded", lefts, rights, lr=1.0).spaces.downstairs
        first = nearest_to_gradients(fixed, u, v, g_u, g_v)
        # U = 𝒰/√I, V = 𝒱/√J, C = G_𝒰/√J, D = G_𝒱/√I
        basis_u, basis_v, c, d = u / i**0.5, v / j**0.5, g_u / j**0.5, g_v / i**0.5
        k_c, k_d = basis_u.T @ c, d.T @ basis_v
        middle = (i * k_d + j * k_c) / (i + j)
        by_hand = (
            (c - basis_u @ k_c) @ basis_v.T
            + basis_u @ (d - basis_v @ k_d.T).T
            + basis_u @ middle @ basis_v.T
        )
        assert relative(by_hand, first) < 1e-12
        space = reference(case, point, k).spaces.downstairs
        second = (space @ (space.T @ first.flatten())).view_as(first)
        assert relative(found[k], second) < 1e-12
        assert relative(second, first) > 0.05  # the second stage has work to do


# Horizontal projections --------------------------------------------------------------------------


@every_grid
def test_the_fixed_quotient_repair_is_the_nearest_horizontal_vector(grid: tuple[int, int]) -> None:
    case = case_of("fixed-quotient", grid, seed=4)
    point, grad, geometry = case.point(), case.random(10), case.geometry
    frame = geometry.frame(point)
    found = {repair: geometry.gradient(frame, grad, repair) for repair in REPAIRS}
    assert same_bits(found["average"], found["exact"])
    for k in range(2):
        a, b, g_a, g_b = (stacked(x)[k] for x in (*point, *grad))
        lift = torch.cat(
            [
                torch.linalg.solve(b.T @ b, g_a.T).T.flatten(),
                torch.linalg.solve(a.T @ a, g_b.T).T.flatten(),
            ]
        )
        assert relative(flat(found["none"], k), lift) < 1e-12
        s = reference(case, point, k).spaces
        expected = nearest(s.horizontal, s.root, s.root @ lift)
        assert relative(flat(found["exact"], k), expected) < 1e-12
        assert relative(lift, expected) > 0.05


@every_grid
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("name", ["isometry-quotient", "isometry-canonical"])
def test_upstairs_isometries_take_the_nearest_tangent_and_horizontal_vector(
    name: str, grid: tuple[int, int], repair: str
) -> None:
    """Nearest to the provisional lift, which represents the factor gradients in the metric."""
    case = case_of(name, grid, seed=5)
    point, grad, geometry = case.point(), case.random(10), case.geometry
    found = geometry.gradient(geometry.frame(point), grad, repair)
    i, j = grid
    canonical = name == "isometry-canonical"
    lefts = [g + u @ u.mT @ g if canonical else g for u, g in zip(point, grad, strict=True)]
    lift = Pair(lefts[0] / j, lefts[1] / i)
    # Tangent-projected factor by factor, as the gradient of each factor alone would be.
    own = [
        g - u @ (g.mT @ u if canonical else linalg.sym(u.mT @ g))
        for u, g in zip(point, grad, strict=True)
    ]
    provisional = Pair(own[0] / j, own[1] / i)
    for k in range(2):
        s = reference(case, point, k).spaces
        for start in (lift, provisional):
            vector = flat(start, k)
            expected = nearest(s.horizontal, s.root, s.root @ vector)
            assert relative(flat(found, k), expected) < 1e-12
            assert relative(vector, expected) > 0.05


# Consistent gradients ----------------------------------------------------------------------------


@every_grid
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_consistent_gradients_are_left_alone(name: str, grid: tuple[int, int], repair: str) -> None:
    case = case_of(name, grid, seed=6)
    geometry, point = case.geometry, case.point()
    z, grad = case.ambient(point, 10)
    gradient = geometry.gradient(geometry.frame(point), grad, repair)
    found = dense(geometry, point, gradient)
    for k in range(2):
        own = reference(case, point, k)
        rows = z[k].split(case.m)
        expected = own.gradient([list(row.split(case.n, 1)) for row in rows])
        assert relative(found[k], own.matrix(expected)) < 1e-12
        if not own.lives_downstairs:
            assert relative(flat(gradient, k), expected) < 1e-12
        elif name in FIXED:
            assert relative(flat(gradient, k), flat(grad, k)) < 1e-12


# The option --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_option_reaches_the_step(name: str) -> None:
    """A small step without normalization moves W by −lr times the repaired gradient."""
    case = case_of(name, (2, 3), seed=7)
    geometry, point, grad = case.geometry, case.point(), case.random(10)
    lr, moved = 1e-6, {}
    for repair in REPAIRS:
        factors: list[list[Tensor]] = [[nn.Parameter(x.clone()) for x in side[0]] for side in point]
        for side, gradients in zip(factors, grad, strict=True):
            for x, g in zip(side, gradients[0], strict=True):
                x.grad = g.clone()
        lefts, rights = factors
        optimizer = rankfold.RiemannianSGD(
            [rankfold.Grid(lefts, rights)],
            lr,
            geometry=name,
            normalize=None,
            gradient_repair=repair,
        )
        with pytest.warns(UserWarning, match="inconsistent"):
            optimizer.step()
        a, b = torch.cat(lefts).detach(), torch.cat(rights).detach()
        moved[repair] = (a, b)
        start = stacked(point.left)[0] @ stacked(point.right)[0].T
        gradient = geometry.gradient(geometry.frame(point), grad, repair)
        expected = -lr * dense(geometry, point, gradient)[0]
        assert relative(a @ b.T - start, expected) < 1e-4
    # What a repair of the fixed quotient takes away is vertical, and shows in the factors alone.
    differ = {"fixed-embedded": ("exact", "average"), "fixed-quotient": ("none", "average")}
    if name in differ:
        one, other = (moved[repair][0] for repair in differ[name])
        assert (one - other).abs().max() > 1e-2 * lr
    else:
        assert name in ISOMETRIES
        assert same_bits([*moved["none"] * 2], [*moved["average"], *moved["exact"]])


# Linear algebra ----------------------------------------------------------------------------------


def positive(condition: float, size: int, seed: int) -> Tensor:
    """Symmetric positive definite (size, size) with eigenvalues from 1/condition to 1."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=WIDE)).Q
    values = torch.logspace(-torch.tensor(condition).log10().item(), 0, size, dtype=WIDE)
    return linalg.sym(q * values @ q.mT)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e4, 1e-4), (1e-8, 1e-8)])
@pytest.mark.parametrize("conditions", [(1.0, 1.0), (1e2, 1e4), (1.0, 1e6), (1e6, 1e6)])
@pytest.mark.parametrize("r", [1, 4, 9])
def test_sylvester(r: int, conditions: tuple[float, float], scales: tuple[float, float]) -> None:
    """Against the Kronecker system, to within what its condition number allows."""
    a, b = (
        torch.stack([s * positive(c, r, seed + k) for k in range(3)])
        for seed, c, s in zip((0, 10), conditions, scales, strict=True)
    )
    c = torch.randn(3, r, r, generator=torch.Generator().manual_seed(20), dtype=WIDE)
    found = linalg.sylvester(a, b, c)
    eye = torch.eye(r, dtype=WIDE)
    for k in range(3):
        system = torch.kron(a[k], eye) + torch.kron(eye, b[k])  # on rows laid end to end
        expected = torch.linalg.solve(system, c[k].flatten()).view(r, r)
        condition = torch.linalg.cond(system).item()
        assert relative(found[k], expected) < 20 * condition * torch.finfo(WIDE).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("r", [1, 3, 32, 150])
def test_norm_bound(r: int, scale: float, dtype: torch.dtype) -> None:
    """Never below the largest singular value, never 1% above; all values equal is the worst."""
    generator = torch.Generator().manual_seed(r)
    x = torch.randn(6, r, r, generator=generator, dtype=WIDE)
    x[1] = torch.linalg.qr(x[1]).Q
    x[2] = x[2].triu()
    x[3] = torch.outer(x[3, 0], x[3, -1])
    x[4] = torch.linalg.qr(x[4]).Q * torch.logspace(0, -12, r, dtype=WIDE)
    x[5] = -torch.eye(r, dtype=WIDE)
    x = (scale * x).to(dtype)
    exact = torch.linalg.matrix_norm(x.double(), ord=2)
    ratio = linalg.norm_bound(x).double() / exact
    assert ratio.min() >= 1 - 20 * torch.finfo(dtype).eps
    assert ratio.max() <= 1.01
    if r == 150:
        assert ratio[5] > 1.001  # a bound and not an estimate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cholesky_lifts_what_fails_and_nothing_else(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 12, 5, generator=generator, dtype=WIDE).to(dtype)
    x[0, 1, :, 4] = x[0, 1, :, 2]
    x[1, 0] = 0
    x[1, 3, :, 1:] = x[1, 3, :, :1] * torch.tensor([1.0, 2.0, -1.0, 0.5]).to(dtype)
    gram = x.mT @ x
    expected, info = torch.linalg.cholesky_ex(gram)
    sound = torch.ones(2, 4, dtype=torch.bool)
    sound[0, 1] = sound[1, 0] = sound[1, 3] = False
    lower, _, lifted = linalg.cholesky(gram)
    assert not lifted[sound].any()
    assert same_bits([lower[sound]], [expected[sound]])
    failed = info != 0
    assert failed[1, 0]  # zeros
    assert lifted[failed].all()
    # What was lifted factors a matrix close to its own; nothing helps one of zeros.
    lifted[1, 0] = False
    near = lower[lifted] @ lower[lifted].mT - gram[lifted]
    size = torch.linalg.matrix_norm(gram[lifted])
    assert lower[lifted].isfinite().all()
    assert (torch.linalg.matrix_norm(near) < 1e5 * torch.finfo(dtype).eps * size).all()


def test_damping_is_a_ridge_for_every_member() -> None:
    x = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(4), dtype=WIDE)
    x[1] = 0
    lower, _, lifted = linalg.cholesky(x.mT @ x, 0.25)
    expected = torch.linalg.cholesky(x.mT @ x + 0.25 * torch.eye(4, dtype=WIDE))
    assert (lower - expected).abs().max() < 1e-14
    assert not lifted.any()
