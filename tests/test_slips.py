"""Each slip of the paper, put back into the library, is caught.

A detector is a comparison that must hold; each test runs it on the library as it is, where it
passes, and on the library with the paper's printed formula in place, where it must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import linalg
from rankfold.geometries import Pair
from rankfold.geometries.embedded import EmbeddedGeometry, NewCoefficients, TangentXKY
from rankfold.geometries.fixed_quotient import FixedQuotient, GramFrame
from rankfold.geometries.isometry_canonical import IsometryCanonical
from rankfold.geometries.isometry_embedded import IsometryEmbeddedGrid
from rankfold.geometries.isometry_quotient import IsometryQuotient
from rankfold.geometries.stiefel import StiefelFrame, StiefelGeometry, StiefelTangent
from rankfold.linalg import skew, sym

from .points import Case
from .reference import Reference

TOLERANCE = 1e-9


def trajectory_error(geometry: str, grid: tuple[int, int], normalize: str = "metric") -> float:
    """Largest error of W over 6 momentum steps against the dense reference, per distance moved."""
    generator = torch.Generator().manual_seed(5)

    def orthonormal(rows: int) -> Tensor:
        return torch.linalg.qr(torch.randn(rows, 3, generator=generator, dtype=torch.float64)).Q

    left, right = [orthonormal(7) for _ in range(grid[0])], [orthonormal(6) for _ in range(grid[1])]
    target = torch.randn(7 * grid[0], 6 * grid[1], generator=generator, dtype=torch.float64)
    a: list[Tensor] = [nn.Parameter(x.clone()) for x in left]
    b: list[Tensor] = [nn.Parameter(x.clone()) for x in right]
    lr = 0.03
    optimizer = rankfold.RiemannianSGD(
        [rankfold.Grid(a, b)], lr, geometry=geometry, momentum=0.875, normalize=normalize
    )
    reference = Reference(geometry, left, right, lr=lr, momentum=0.875, normalize=normalize)
    start, worst = torch.cat(left) @ torch.cat(right).T, 0.0
    for _ in range(6):
        optimizer.zero_grad()
        ((torch.cat(a) @ torch.cat(b).T - target) ** 2).sum().backward()
        optimizer.step()
        dense = torch.cat([torch.cat(row, 1) for row in reference.W])
        gradient = 2 * (dense - target)
        reference.step([list(row.split(6, 1)) for row in gradient.split(7)])
        ours = (torch.cat(a) @ torch.cat(b).T).detach()
        theirs = torch.cat([torch.cat(row, 1) for row in reference.W])
        worst = max(worst, ((ours - theirs).norm() / (theirs - start).norm()).item())
    return worst


def skew_condition_error(name: str, grid: tuple[int, int]) -> float:
    """How much U_i S_i with symmetric S_i, normal to the manifold, changes the gradient."""
    case = Case(name, *grid, 7, 6, 3, seed=3)
    geometry, point = case.geometry, case.point()
    frame, (_, grad) = geometry.frame(point), case.ambient(point, 10)
    shifted = [g + p @ sym(p.mT @ e) for g, p, e in zip(grad, point, case.random(40), strict=True)]
    before, after = geometry.gradient(frame, grad), geometry.gradient(frame, Pair(*shifted))
    return max((x - y).abs().max().item() for x, y in zip(before, after, strict=True))


def horizontality_error(name: str, grid: tuple[int, int]) -> float:
    """How far the gradient of inconsistent factor gradients is from horizontal."""
    case = Case(name, *grid, 7, 6, 3, seed=3)
    geometry, point = case.geometry, case.point()
    found = geometry.gradient(geometry.frame(point), case.random(10))
    left, right = point.left.mT @ found.left, point.right.mT @ found.right
    return (grid[1] * left.sum(1) + grid[0] * right.sum(1)).abs().max().item()


# The formulas as printed ---------------------------------------------------------------------

carry = EmbeddedGeometry.carry


def printed_carry(
    self: EmbeddedGeometry, coords: TangentXKY, new: NewCoefficients, deskew: bool
) -> Pair:
    """A.1 Step 5 with M Q_Y = U R_Y and Mᵀ Q_X = V R_X: R R where Rᵀ R belongs."""
    r_x, r_y = linalg.cholesky(coords.xx).lower.mT, linalg.cholesky(coords.yy).lower.mT
    return carry(self, coords._replace(xx=r_x @ r_x, yy=r_y @ r_y), new, deskew)


def printed_reduced_transport(self: StiefelGeometry, frame: StiefelFrame, overlaps: Pair) -> Pair:
    """A.4 Step 5 in its "considerably reduced" form."""
    left, right = overlaps
    return Pair(left + skew(right) / 2, right + skew(left) / 2)


def printed_spectral_norm(
    self: StiefelGeometry, frame: StiefelFrame, coords: StiefelTangent
) -> Tensor:
    """A.3.1 Step 3 with S = Q Λ^{1/2}."""
    (u, v), m_u, m_v = frame.point, coords.left.xi, coords.right.xi
    stack = [x.flatten(1, 2) for x in (m_u, u, v, m_v)]
    a, b = torch.cat(stack[:2], -1), torch.cat(stack[2:], -1)
    values, q = torch.linalg.eigh(a.mT @ a)
    s = q * values.clamp_min(0).sqrt()[:, None]
    product = s @ (b.mT @ b) @ s.mT
    return torch.linalg.eigvalsh(product)[..., -1].clamp_min(0).sqrt()


def printed_quotient_transport(
    self: FixedQuotient, frame: GramFrame, momentum: Pair, given: bool = False
) -> Pair:
    """A.2 Step 5 with the two triangular factors of BᵀB in the printed order."""
    a, b = (x.view_as(m) for x, m in zip(frame.point, momentum, strict=True))
    left, right = (a.mT @ momentum.left).sum(1), (b.mT @ momentum.right).sum(1)
    towards_a = frame.left.inverse.mT @ (frame.left.inverse @ left)
    towards_b = right.mT @ frame.right.inverse @ frame.right.inverse.mT
    shift = ((towards_a - towards_b) / 2)[:, None]
    return Pair(momentum.left - a @ shift, momentum.right + b @ shift.mT)


def printed_quotient_average(self: StiefelGeometry, frame: StiefelFrame, overlap: Pair) -> Pair:
    """A.4 Steps 1 and 2: one averaged K for both factors."""
    k = sym(overlap.left + overlap.right) / 2
    return Pair(k, k)


def printed_canonical_average(self: StiefelGeometry, frame: StiefelFrame, overlap: Pair) -> Pair:
    """A.5 Steps 1 and 2: one averaged K for both factors."""
    k = (overlap.left.mT + overlap.right) / 2
    return Pair(k, k.mT)


def printed_cheap_omega(self: StiefelGeometry, frame: StiefelFrame, overlap: Pair) -> Pair:
    """A.3.1 Steps 1 and 2, and B.4: Ω and Ψ from one averaged Γ."""
    i, j = frame.i, frame.j
    alpha, beta = skew(overlap.left), -skew(overlap.right)
    gamma = (alpha.sum(1, keepdim=True) + beta.sum(1, keepdim=True)) / 2
    omega, psi = alpha / j - gamma / (2 * i * j), gamma / (2 * i * j) - beta / i
    return Pair(overlap.left / j - omega, overlap.right / i - psi)


Detector = Callable[[], float]
SLIPS: list[tuple[type, str, Callable[..., Any], Detector]] = [
    (EmbeddedGeometry, "carry", printed_carry, lambda: trajectory_error("fixed-embedded", (1, 1))),
    (EmbeddedGeometry, "carry", printed_carry, lambda: trajectory_error("fixed-embedded", (2, 3))),
    (
        EmbeddedGeometry,
        "carry",
        printed_carry,
        lambda: trajectory_error("isometry-embedded", (1, 1)),
    ),
    (
        StiefelGeometry,
        "arrival",
        printed_reduced_transport,
        lambda: trajectory_error("isometry-quotient", (1, 1)),
    ),
    (
        StiefelGeometry,
        "spectral_norm",
        printed_spectral_norm,
        lambda: trajectory_error("isometry-embedded", (2, 3), "spectral"),
    ),
    (
        FixedQuotient,
        "arrive",
        printed_quotient_transport,
        lambda: trajectory_error("fixed-quotient", (1, 1)),
    ),
    (
        IsometryQuotient,
        "corrections",
        printed_quotient_average,
        lambda: skew_condition_error("isometry-quotient", (1, 1)),
    ),
    (
        IsometryCanonical,
        "corrections",
        printed_canonical_average,
        lambda: skew_condition_error("isometry-canonical", (1, 1)),
    ),
    (
        IsometryEmbeddedGrid,
        "corrections",
        printed_cheap_omega,
        lambda: horizontality_error("isometry-embedded", (2, 3)),
    ),
]


@pytest.mark.parametrize(("owner", "method", "printed", "detector"), SLIPS)
def test_the_printed_formula_is_caught(
    owner: type,
    method: str,
    printed: Callable[..., Any],
    detector: Detector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert detector() < TOLERANCE
    monkeypatch.setattr(owner, method, printed)
    # Caught with room to spare, so that it is the slip and not rounding that is seen.
    assert detector() > 1e3 * TOLERANCE
