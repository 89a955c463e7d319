"""Products to take steps on, and convex problems solved slowly, for tests of Schatten norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rankfold
from rankfold.geometries import Pair

from .points import Case, dense, options, stacked

Projection = Callable[[Tensor], Tensor]

EXPONENTS = (1.0, 1.2, 1.5, 3.0, 10.0, math.inf)
NORMALIZATIONS = (*(f"schatten-{p:g}" for p in EXPONENTS), "schatten-2", "whitened")


def dual(p: float) -> float:
    """q with 1/p + 1/q = 1."""
    return {1.0: math.inf, math.inf: 1.0}.get(p) or p / (p - 1)


def raised(share: Tensor) -> Tensor:
    """Squares of singular values that were a share of their sum, after both passes of whitening."""
    for ridge in (2.0**-16, 2.0**-8):
        share = share * (1 + ridge) / (share + ridge)
    return share


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


# Convex problems ---------------------------------------------------------------------------------


def norm_of(x: Tensor, p: float) -> float:
    """The Schatten-p norm."""
    return float(torch.linalg.vector_norm(torch.linalg.svdvals(x), p))


def best_value(core: Tensor, normal: Projection, p: float) -> float:
    """The largest ⟨core, D⟩ over tangent D with ‖D‖_p ≤ 1, to 1e-3.

    By its dual, the least ‖core + N‖_q. What is returned is bounded from both sides: a direction
    attains it but for 1e-3, and none can exceed the dual value.
    """
    solve = _by_splitting if p in (1, math.inf) else _by_quasi_newton
    lower, upper = solve(core, normal, p)
    assert upper - lower < 1e-3 * upper
    return upper


def _attained(core: Tensor, normal: Projection, direction: Tensor, p: float) -> float:
    tangent = direction - normal(direction)
    return float((core * tangent).sum()) / norm_of(tangent, p)


def _by_splitting(core: Tensor, normal: Projection, p: float) -> tuple[float, float]:
    """Alternating directions; projections on the balls of p = 1 and p = ∞ are simple."""
    whole, shadow = core.clone(), torch.zeros_like(core)
    values = torch.linalg.svdvals(core)
    threshold = values.mean() if p == math.inf else 0.2 * values.amax()
    lower, upper = 0.0, math.inf
    for _ in range(4000):
        u, s, vh = torch.linalg.svd(whole - shadow, full_matrices=False)
        ball = _project(s / threshold, p)
        direction, shrunk = (u * ball) @ vh, (u * (s - threshold * ball)) @ vh
        lower = max(lower, _attained(core, normal, direction, p))
        moved = core + normal(shrunk + shadow)
        shadow, whole = shadow + shrunk - moved, moved
        upper = min(upper, norm_of(whole, dual(p)))
        if upper - lower < 5e-4 * upper:
            break
    return lower, upper


def _project(values: Tensor, p: float) -> Tensor:
    """The nearest vector of ℓᵖ norm at most 1 to one without negative entries."""
    if p == math.inf:
        return values.clamp_max(1)
    if values.sum() <= 1:
        return values
    falling = values.sort(descending=True).values
    levels = (falling.cumsum(0) - 1) / torch.arange(1, len(values) + 1)
    level = levels[int((falling > levels).sum()) - 1]
    return (values - level).clamp_min(0)


def _by_quasi_newton(core: Tensor, normal: Projection, p: float) -> tuple[float, float]:
    """L-BFGS on the dual norm, which is smooth but where singular values vanish.

    There a line search may find no way down, as rounding has it, and the search stops too early.
    From there it is begun anew.
    """
    q = dual(p)
    free = torch.zeros_like(core, requires_grad=True)

    def value() -> Tensor:
        values = torch.linalg.svdvals(core + normal(free))
        return torch.linalg.vector_norm(values, q)

    lower, upper = 0.0, math.inf
    for _ in range(20):
        optimizer = torch.optim.LBFGS(
            [free], max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
        )

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = value()
            loss.backward()
            return loss

        optimizer.step(closure)
        u, s, vh = torch.linalg.svd((core + normal(free)).detach(), full_matrices=False)
        direction = (u * (s / s.amax()) ** (q - 1)) @ vh
        lower = max(lower, _attained(core, normal, direction, p))
        upper = min(upper, value().item())
        if upper - lower < 5e-4 * upper:
            break
    return lower, upper


def orthonormal(x: Tensor) -> Tensor:
    """A basis of what the columns span."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, s > 1e-10 * s.amax()]


def share(p: float) -> float:
    """How much of the best value a direction must reach."""
    return 0.99 if 1.5 <= p <= 4 else 0.95


def norm_error(p: float, dtype: torch.dtype) -> float:
    """By how much a direction of 30 columns or fewer may be too long.

    For p = 1 the norm is found by products, to 1%. For others it comes from a Gram matrix, whose
    rounding is a singular value of up to its root.
    """
    return 0.01 if p == 1 else 30 * float(torch.finfo(dtype).eps) ** min(1.0, p / 2)


# Directions of steps ------------------------------------------------------------------------------


def gradients(point: Pair, z: Tensor) -> Pair:
    """Of ⟨Z, W⟩, in the arithmetic of the point."""
    z = z.to(point.left)
    left = (z @ stacked(point.right)).view_as(point.left)
    return Pair(left, (z.mT @ stacked(point.left)).view_as(point.right))


def step_direction(
    case: Case, point: Pair, grad: Pair, normalize: str, **told: Any
) -> tuple[Pair, Tensor]:
    """What a step goes along, as rates of both factors, and as a matrix."""
    geometry = case.geometry
    chosen = options(geometry.retractions[0], normalize=normalize, **told)
    frame = geometry.frame(point)
    coords = geometry.coordinates(frame, geometry.gradient(frame, grad))
    found = geometry.direction(frame, coords, chosen)
    if hasattr(geometry, "matrix"):
        return point, geometry.matrix(found)
    tangent = Pair(found.left.xi, found.right.xi) if case.geometry.isometry else found.vector
    return tangent, dense(geometry, point, tangent)
