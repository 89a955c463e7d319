"""Trajectories of the products W_ij, against a dense reference built from the definitions.

The optimizer differentiates a smooth loss of the products through its own factors; the reference
gets the dense gradient of the same loss at its own point. They never exchange anything after the
start. In float64 the two must agree, block by block and step by step, to 1e-9 of the distance
travelled; in float32 to 1e-4 of the size of the block. The path stays within a quarter of the
smallest nonzero singular value of the blocks at the start, inside the domain of every retraction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import rankfold

from .reference import FIXED, GEOMETRIES, ISOMETRIES, Reference, polar, retractions

STEPS = 6
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Blocks = list[list[Tensor]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small only lose time to a thread pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The problems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One problem, one set of options. Equal cases draw equal numbers."""

    geometry: str
    retraction: str | None = None
    normalize: str | None = "metric"
    momentum: float = 0.875
    heights: tuple[int, ...] = (7,)
    widths: tuple[int, ...] = (5,)
    rank: int = 2
    condition: float = 3.0  # of every block of W; 1 repeats one singular value r times
    start: str = "balanced"  # balanced, left, right, orthonormal: who carries the spread
    norm_floor: float = 2**-23
    decay: float = 1.0  # of the learning rate, a step

    def __str__(self) -> str:
        """The test id: the geometry, then whatever is not left at its default."""
        words = [self.geometry]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in ("heights", "widths"):
                words.append("+".join(map(str, value)))
            elif value != field.default:
                words.append(f"{field.name}={value}")
        return "-".join(words)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))


def random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A uniformly random orthonormal (rows, columns)."""
    return polar(torch.randn(rows, columns, generator=generator, dtype=torch.float64))


def starting_factors(case: Case, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Factors A_i (m_i, r), B_j (n_j, r) whose products have the condition number asked for.

    W_ij = U_i D_i diag(s) E_j V_jᵀ, with D_i and E_j diagonal and near I, to make the blocks of a
    grid unlike each other. How diag(s) is shared between the factors is the case's ``start``; a
    random gauge, of condition 2, then mixes the columns.

    The numbers are those of float32 factors, so that both precisions start at the same products;
    orthonormal factors are made orthonormal again after the rounding.
    """

    def draw(rows: int) -> Tensor:
        return random_orthonormal(rows, case.rank, generator)

    lefts, rights = [draw(m) for m in case.heights], [draw(n) for n in case.widths]
    if case.geometry in ISOMETRIES or case.start == "orthonormal":
        return (
            [polar(u.float().double()) for u in lefts],
            [polar(v.float().double()) for v in rights],
        )
    s = torch.logspace(0, -1, case.rank, base=case.condition, dtype=torch.float64)
    share = {"balanced": 0.5, "left": 1.0, "right": 0.0}[case.start]
    turn = random_orthonormal(case.rank, case.rank, generator)
    gauge = turn * torch.linspace(1, 2, case.rank, dtype=torch.float64)
    cogauge = turn / torch.linspace(1, 2, case.rank, dtype=torch.float64)
    vary = len(lefts) + len(rights) > 2 and case.condition > 1

    def factor(frame: Tensor, power: float, mix: Tensor) -> Tensor:
        near = 1 + 0.25 * torch.rand(case.rank, generator=generator, dtype=torch.float64) * vary
        return ((frame * near * s**power) @ mix).float().double()

    return (
        [factor(u, share, gauge) for u in lefts],
        [factor(v, 1 - share, cogauge) for v in rights],
    )


def smallest_singular_value(blocks: Blocks, rank: int) -> float:
    """The smallest σ_r over the blocks W_ij."""
    return min(float(torch.linalg.svdvals(w)[rank - 1]) for row in blocks for w in row)


class Loss:
    """A smooth nonlinear function of the blocks, whose gradient turns over the path's length.

    With x_ij = (W_ij − T_ij)/σ and σ the smallest σ_r at the start:
    σ (Σ_ij ½‖P_ij ∘ x_ij‖² + ⟨D_ij, sin x_ij⟩ + ½ (Σ_ij ⟨C_ij, x_ij⟩)²). The last term couples
    the blocks.
    """

    def __init__(self, blocks: Blocks, rank: int, generator: torch.Generator) -> None:
        def draw(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        self.scale = smallest_singular_value(blocks, rank)
        size = sum(w.numel() for row in blocks for w in row)
        self.coefficients = [
            [(w + self.scale * draw(w), draw(w), draw(w), draw(w) / size**0.5) for w in row]
            for row in blocks
        ]

    def __call__(self, blocks: Blocks) -> Tensor:
        total = coupling = blocks[0][0].new_zeros(())
        for row, coefficients in zip(blocks, self.coefficients, strict=True):
            for w, quadruple in zip(row, coefficients, strict=True):
                t, p, d, c = (x.to(w.dtype) for x in quadruple)
                x = (w - t) / self.scale
                total = total + 0.5 * ((p * x) ** 2).sum() + (d * x.sin()).sum()
                coupling = coupling + (c * x).sum()
        return self.scale * (total + 0.5 * coupling**2)

    def gradient(self, blocks: Blocks) -> Blocks:
        """The dense Euclidean gradient with respect to every block."""
        leaves = [[w.detach().requires_grad_() for w in row] for row in blocks]
        flat = iter(torch.autograd.grad(self(leaves), [w for row in leaves for w in row]))
        return [[next(flat) for _ in row] for row in leaves]


# The two trajectories ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the reference did: the start, the learning rate, and W after 0, 1, ..., 6 steps."""

    left: list[Tensor]
    right: list[Tensor]
    loss: Loss
    lr: float
    floored: bool  # whether the first gradient is shorter than the norm's floor
    trajectory: list[Blocks]


@functools.lru_cache(maxsize=4)
def expected(case: Case) -> Expected:
    """The reference trajectory, at a learning rate that spends most of the path allowed."""
    generator = case.generator()
    left, right = starting_factors(case, generator)
    reference = Reference(
        case.geometry,
        left,
        right,
        lr=1.0,
        momentum=case.momentum,
        normalize=case.normalize,
        norm_floor=case.norm_floor,
        retraction=case.retraction,
    )
    start = reference.W
    loss = Loss(start, case.rank, generator)
    allowed = smallest_singular_value(start, case.rank) / 4

    gradient = reference.gradient(loss.gradient(start))
    length = float(torch.linalg.matrix_norm(reference.matrix(gradient)))
    divisor = reference.divisor(gradient)
    floored = divisor == case.norm_floor
    # Without a norm to divide by the first steps are shorter: momentum fades in.
    fade = case.momentum if case.normalize is None or floored else 0.0
    steps = sum(case.decay**t * (1 - fade ** (t + 1)) for t in range(STEPS))
    lr = reference.lr = 0.9 * allowed / steps * divisor / length

    trajectory = [start]
    for _ in range(STEPS):
        reference.step(loss.gradient(reference.W))
        reference.lr *= case.decay
        trajectory.append(reference.W)
    path = sum(distance(old, new) for old, new in itertools.pairwise(trajectory))
    assert allowed / 2 < path <= allowed
    return Expected(left, right, loss, lr, floored, trajectory)


def distance(old: Blocks, new: Blocks) -> float:
    """The Frobenius distance of two collections of blocks."""
    squares = [
        ((u - v) ** 2).sum()
        for old_row, new_row in zip(old, new, strict=True)
        for u, v in zip(old_row, new_row, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt())


def library_trajectory(case: Case, want: Expected, dtype: torch.dtype) -> Iterator[Blocks]:
    """W after each step of the optimizer, multiplied out in float64."""
    left = [nn.Parameter(a.to(dtype, copy=True)) for a in want.left]
    right = [nn.Parameter(b.to(dtype, copy=True)) for b in want.right]
    optimizer = rankfold.RiemannianSGD(
        [rankfold.Grid(left, right)],
        lr=want.lr,
        geometry=case.geometry,
        momentum=case.momentum,
        normalize=case.normalize,
        norm_floor=case.norm_floor,
        retraction=case.retraction,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(want.loss([[a @ b.T for b in right] for a in left]))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= case.decay
        yield [[a.detach().double() @ b.detach().double().T for b in right] for a in left]


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare the two trajectories, block by block, after every step."""
    want = expected(case)
    start = want.trajectory[0]
    steps = zip(want.trajectory[1:], library_trajectory(case, want, dtype), strict=True)
    for t, (there, here) in enumerate(steps, start=1):
        for i, j in itertools.product(range(len(case.heights)), range(len(case.widths))):
            error = torch.linalg.matrix_norm(here[i][j] - there[i][j])
            travelled = there[i][j] - start[i][j] if dtype == torch.float64 else there[i][j]
            relative = float(error / torch.linalg.matrix_norm(travelled))
            assert relative <= TOLERANCE[dtype], f"W_{i}{j} is off by {relative:.1e} at step {t}"


def parametrize(cases: list[Case], dtypes: tuple[torch.dtype, ...]) -> pytest.MarkDecorator:
    """Run every case in every dtype, the dtypes side by side so that they share a reference."""
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
            for case, dtype in itertools.product(cases, dtypes)
        ],
    )


BOTH = (torch.float64, torch.float32)
GRIDS = {
    "1x1": ((7,), (5,)),
    "4x1": ((5, 5, 5, 5), (6,)),
    "1x3": ((6,), (4, 4, 4)),
    "2x3": ((5, 5), (4, 4, 4)),
    "ragged": ((4, 7, 2), (5, 3)),
}
NORMALIZATIONS: tuple[str | None, ...] = ("metric", "spectral", None)


def methods(heights: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Every geometry with every retraction it has on a grid."""
    for geometry in GEOMETRIES:
        for retraction in retractions(geometry, len(heights) == len(widths) == 1):
            yield geometry, retraction


OPTIONS = [
    Case(geometry, retraction, normalize, momentum, heights, widths)
    for heights, widths in GRIDS.values()
    for geometry, retraction in methods(heights, widths)
    for normalize in NORMALIZATIONS
    for momentum in (0.0, 0.125, 0.875)
]


@parametrize(OPTIONS, BOTH)
def test_every_option_on_every_grid(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


# m > n, m < n, m = n, r = 1, r = min(m, n), on one block and on grids.
SHAPES = [
    ((14,), (4,), 3),
    ((4,), (14,), 3),
    ((8,), (8,), 3),
    ((6,), (5,), 1),
    ((1,), (5,), 1),
    ((9,), (3,), 3),
    ((3,), (9,), 3),
    ((4,), (4,), 4),
    ((12, 12), (4, 4, 4), 3),
    ((4, 4), (9, 9, 9), 3),
    ((5, 5), (5, 5), 4),
    ((5, 3), (4, 2, 1), 1),
    ((3, 8), (6, 3, 5), 3),
    ((3, 3), (3, 3, 3), 3),
]


@parametrize(
    [
        Case(geometry, retraction, normalize, momentum, heights, widths, rank)
        for heights, widths, rank in SHAPES
        for geometry, retraction in methods(heights, widths)
        for normalize, momentum in (("metric", 0.875), ("spectral", 0.125))
    ],
    BOTH,
)
def test_shapes(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def conditioned(condition: float, starts: tuple[str, ...]) -> list[Case]:
    """The fixed-rank methods, single and on a ragged grid, at one condition number."""
    return [
        Case(geometry, retraction, normalize, momentum, heights, widths, 4, condition, start=start)
        for heights, widths in [((14,), (9,)), ((9,), (12,)), ((6, 9), (7, 4, 6))]
        for geometry, retraction in methods(heights, widths)
        if geometry in FIXED
        for normalize, momentum in (("metric", 0.875), ("spectral", 0.125), (None, 0.875))
        for start in starts
    ]


@parametrize(conditioned(1e3, ("balanced", "left", "right")), (torch.float64,))
def test_conditioning_up_to_1e3_in_float64(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(conditioned(30.0, ("balanced", "left", "right")), (torch.float32,))
def test_conditioning_up_to_30_in_float32(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(conditioned(1.0, ("orthonormal", "balanced", "left")), BOTH)
def test_repeated_singular_values(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@parametrize(
    [
        Case(geometry, retraction, normalize, 0.875, heights, widths, norm_floor=300.0)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry, retraction in methods(heights, widths)
        for normalize in ("metric", "spectral")
    ],
    BOTH,
)
def test_the_norm_floor(case: Case, dtype: torch.dtype) -> None:
    """Below the floor steps shrink with the momentum, and its norm plays no part."""
    assert expected(case).floored
    check(case, dtype)


@parametrize(
    [
        Case(geometry, retraction, normalize, heights=heights, widths=widths, decay=0.5)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry, retraction in methods(heights, widths)
        for normalize in NORMALIZATIONS
    ],
    BOTH,
)
def test_a_falling_learning_rate(case: Case, dtype: torch.dtype) -> None:
    """Normalized, the first step takes nearly half of the path: retractions have the most to do."""
    check(case, dtype)


@parametrize(
    [
        Case(geometry, None, heights=heights, widths=widths)
        for heights, widths in (GRIDS["1x1"], GRIDS["ragged"])
        for geometry in GEOMETRIES
    ],
    (torch.float64,),
)
def test_the_default_retraction(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_the_problems_are_as_hard_as_they_say() -> None:
    for condition in (1.0, 30.0, 1e3):
        for case in conditioned(condition, ("balanced", "left", "right")):
            left, right = starting_factors(case, case.generator())
            for a, b in itertools.product(left, right):
                s = torch.linalg.svdvals(a @ b.T)[: case.rank]
                assert condition / 1.7 < float(s[0] / s[-1]) < condition * 1.7


# The reference itself ----------------------------------------------------------------------------

REFERENCE_GRIDS = [((7,), (5,), 3), ((3,), (6,), 3), ((4, 6), (5, 3, 4), 2)]


def reference_at(
    geometry: str, shape: tuple[tuple[int, ...], tuple[int, ...], int], retraction: str | None
) -> tuple[Reference, torch.Generator]:
    """A reference at a generic point, and the generator to go on drawing from."""
    heights, widths, rank = shape
    case = Case(geometry, retraction, heights=heights, widths=widths, rank=rank)
    generator = case.generator()
    left, right = starting_factors(case, generator)
    reference = Reference(geometry, left, right, lr=0.1, momentum=0.5, retraction=retraction)
    return reference, generator


def random_tangent(reference: Reference, generator: torch.Generator) -> Tensor:
    """A random tangent vector, in the reference's own coordinates."""
    s = reference.spaces
    basis = s.downstairs if reference.lives_downstairs else s.horizontal
    return basis @ torch.randn(basis.shape[1], generator=generator, dtype=torch.float64)


reference_methods = pytest.mark.parametrize(
    ("geometry", "retraction", "shape"),
    [
        (geometry, retraction, shape)
        for shape in REFERENCE_GRIDS
        for geometry, retraction in methods(*shape[:2])
    ],
)
reference_geometries = pytest.mark.parametrize(
    ("geometry", "shape"), list(itertools.product(GEOMETRIES, REFERENCE_GRIDS))
)
Shape = tuple[tuple[int, ...], tuple[int, ...], int]


def assert_equal(here: Tensor, there: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("geometry", [name for name in GEOMETRIES if "embedded" not in name])
@pytest.mark.parametrize("shape", REFERENCE_GRIDS)
def test_reference_metric_is_the_bilinear_form(geometry: str, shape: Shape) -> None:
    """The metrics upstairs, term by term as Knight (2026) writes them."""
    reference, generator = reference_at(geometry, shape, None)
    size = reference.spaces.root.shape[1]
    x, y = torch.randn(2, size, generator=generator, dtype=torch.float64)
    x_left, x_right = reference.unflatten(x)
    y_left, y_right = reference.unflatten(y)
    total = torch.zeros((), dtype=torch.float64)
    lefts = zip(
        reference.A,
        torch.split(x_left, reference.heights),
        torch.split(y_left, reference.heights),
        strict=True,
    )
    for a, xa, ya in lefts:
        rights = zip(
            reference.B,
            torch.split(x_right, reference.widths),
            torch.split(y_right, reference.widths),
            strict=True,
        )
        for b, xb, yb in rights:
            if geometry == "fixed-quotient":
                total += torch.trace(xa.T @ ya @ (b.T @ b)) + torch.trace(xb.T @ yb @ (a.T @ a))
            else:
                total += torch.trace(xa.T @ ya) + torch.trace(xb.T @ yb)
            if geometry == "isometry-canonical":
                total -= torch.trace(xa.T @ a @ a.T @ ya) / 2 + torch.trace(xb.T @ b @ b.T @ yb) / 2
    assert_equal(reference.metric(x, y), total)


@reference_geometries
def test_reference_spaces_split_the_tangent_space(geometry: str, shape: Shape) -> None:
    reference, generator = reference_at(geometry, shape, None)
    s = reference.spaces
    both = s.root @ torch.cat([s.vertical, s.horizontal], dim=1)
    assert both.shape[1] == s.tangent.shape[1]
    assert_equal(both.T @ both, torch.eye(both.shape[1], dtype=torch.float64))
    assert_equal(s.jacobian @ s.vertical, torch.zeros_like(s.jacobian @ s.vertical))
    # The vertical space is the gauge: (A S, −B Sᵀ), with S skew for isometries.
    gauge = torch.randn(reference.r, reference.r, generator=generator, dtype=torch.float64)
    if geometry in ISOMETRIES:
        gauge = gauge - gauge.T
    z = torch.cat([(reference.a @ gauge).flatten(), -(reference.b @ gauge.T).flatten()])
    assert_equal(s.vertical @ ((s.root @ s.vertical).T @ (s.root @ z)), z)


@reference_methods
def test_reference_tangent_vectors_are_velocities(
    geometry: str, retraction: str, shape: Shape
) -> None:
    """A retraction leaves along its tangent vector, with an error of second order."""
    reference, generator = reference_at(geometry, shape, retraction)
    xi = random_tangent(reference, generator)
    w, velocity = reference.a @ reference.b.T, reference.matrix(xi)

    def error(t: float) -> Tensor:
        a, b = reference.retract(t * xi)
        return a @ b.T - w - t * velocity

    sizes = [float(torch.linalg.matrix_norm(error(t))) for t in (2e-3, 1e-3, 5e-4)]
    scale = float(torch.linalg.matrix_norm(velocity))
    assert sizes[-1] < 1e-2 * 5e-4 * scale
    if reference.retraction == "svd" and reference.r == min(w.shape) and reference.fixed:
        assert sizes[0] < 1e-12  # nothing to truncate
    elif sizes[0] > 1e-12:
        assert all(3.8 < big / small < 4.2 for big, small in itertools.pairwise(sizes))
    if reference.retraction == "orthographic":
        below = reference.spaces.downstairs
        assert float((below.T @ error(0.05).flatten()).norm()) < 1e-12


@reference_methods
def test_reference_gradient_is_the_derivative(geometry: str, retraction: str, shape: Shape) -> None:
    """g(grad, h) is the derivative of the loss along the retraction of h."""
    reference, generator = reference_at(geometry, shape, retraction)
    loss = Loss(reference.W, reference.r, generator)
    gradient = reference.gradient(loss.gradient(reference.W))
    for _ in range(3):
        h = random_tangent(reference, generator)

        def along(t: float, h: Tensor = h) -> float:
            a, b = reference.retract(t * h)
            lefts, rights = torch.split(a, reference.heights), torch.split(b, reference.widths)
            return float(loss([[x @ y.T for y in rights] for x in lefts]))

        t = 1e-4
        slope = (8 * (along(t) - along(-t)) - (along(2 * t) - along(-2 * t))) / (12 * t)
        length = float(reference.metric(gradient, gradient) * reference.metric(h, h)) ** 0.5
        assert abs(slope - float(reference.metric(gradient, h))) < 1e-8 * length


@reference_methods
def test_reference_steps_keep_to_the_manifold(geometry: str, retraction: str, shape: Shape) -> None:
    """Points stay on the manifold, and transported momentum is tangent, by classical criteria."""
    reference, generator = reference_at(geometry, shape, retraction)
    loss = Loss(reference.W, reference.r, generator)
    for _ in range(3):
        reference.step(loss.gradient(reference.W))
        eye = torch.eye(reference.r, dtype=torch.float64)
        if geometry in ISOMETRIES:
            for factor in reference.A + reference.B:
                assert_equal(factor.T @ factor, eye)
        u, v = torch.linalg.qr(reference.a)[0], torch.linalg.qr(reference.b)[0]
        velocity = reference.matrix(reference.M)
        outside = velocity - u @ (u.T @ velocity)
        assert_equal(outside - outside @ v @ v.T, torch.zeros_like(outside))
        for i, a in enumerate(reference.A):
            for j, b in enumerate(reference.B):
                if geometry in ISOMETRIES:
                    rows = torch.split(velocity, reference.heights)[i]
                    core = a.T @ torch.split(rows, reference.widths, dim=1)[j] @ b
                    assert_equal(core, -core.T)


@reference_geometries
def test_reference_transport_is_the_projection_printed(geometry: str, shape: Shape) -> None:
    """The projections that Knight (2026) states with the definitions, in sections 3 to 5."""
    reference, generator = reference_at(geometry, shape, None)
    a, b = reference.a, reference.b
    count = (len(reference.A), len(reference.B))
    if reference.lives_downstairs:
        z = torch.randn(reference.m, reference.n, generator=generator, dtype=torch.float64)
        p, q = a @ torch.linalg.pinv(a), b @ torch.linalg.pinv(b)
        printed = p @ z + z @ q - p @ z @ q
        if geometry in ISOMETRIES:
            core = a.T @ z @ b
            printed = printed - a @ (core + core.T) @ b.T / 2
        assert_equal(reference.transport(z.flatten()), printed.flatten())
        return
    z = torch.randn(reference.M.shape, generator=generator, dtype=torch.float64)
    da, db = reference.unflatten(z)
    if geometry == "fixed-quotient":
        shift = (torch.linalg.pinv(a) @ da - (torch.linalg.pinv(b) @ db).T) / 2
        printed = torch.cat([(da - a @ shift).flatten(), (db + b @ shift.T).flatten()])
    else:
        moves = [*torch.split(da, reference.heights), *torch.split(db, reference.widths)]
        factors = reference.A + reference.B
        tangent = [d - f @ (f.T @ d + d.T @ f) / 2 for f, d in zip(factors, moves, strict=True)]
        weights = [count[1]] * count[0] + [count[0]] * count[1]
        turn = sum(
            (k * f.T @ d for k, f, d in zip(weights, factors, tangent, strict=True)),
            start=torch.zeros(reference.r, reference.r, dtype=torch.float64),
        ) / (2 * count[0] * count[1])
        printed = torch.cat(
            [(d - f @ turn).flatten() for f, d in zip(factors, tangent, strict=True)]
        )
    assert_equal(reference.transport(z), printed)
