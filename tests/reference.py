"""A dense float64 reference of the algorithms of Knight (2026), from the definitions alone.

Five geometries on grids ``W_ij = A_i B_jᵀ`` (a single pair is the 1×1 grid). Nothing here is a
closed formula for a gradient, a lift, a projection or a norm. At each point the linear maps that
define the geometry are written out as matrices, and everything else is a consequence:

* the *tangent space upstairs*, at the factors, is everything (fixed rank) or the numerical null
  space of the linearized Stiefel constraints (partial isometries);
* the *vertical space* is the null space of the differential of the product in it;
* the *horizontal space* is the complement of the vertical one in the geometry's metric;
* the *tangent space downstairs*, at the product, is the range of that differential;
* the *gradient* solves ``g(grad, h) = df(h)`` for all tangent ``h``.

Every numerical rank is compared with the dimension that theory gives, so a bad threshold fails.

Shapes, for I left factors of m_i×r, J right factors of n_j×r, m = Σ m_i, n = Σ n_j:

========  =============  ======================================================================
``A, B``  (m, r), (n, r) the factors, stacked: the blocks of ``A Bᵀ`` are the W_ij
upstairs  (N,)           (dA_1, ..., dA_I, dB_1, ..., dB_J) flattened, N = (m + n) r
downst.   (m n,)         the block matrix of all the dW_ij, flattened; its Euclidean norm is the
                         Frobenius norm of the collection
========  =============  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = ("fixed-embedded", "fixed-quotient")
ISOMETRIES = ("isometry-embedded", "isometry-quotient", "isometry-canonical")
GEOMETRIES = FIXED + ISOMETRIES


def retractions(geometry: str, singleton: bool) -> tuple[str, ...]:
    """The retractions of a geometry, its default first."""
    if geometry == "fixed-embedded":
        return ("svd", "orthographic")
    if geometry == "fixed-quotient":
        return ("additive",)
    if geometry == "isometry-embedded" and singleton:
        return ("svd",)
    return ("polar", "qr")


def matrix_of(linear: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The matrix of a linear map given on batches: (batch, size) -> (batch, anything)."""
    return linear(torch.eye(size, dtype=torch.float64)).flatten(1).T


def ranked_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal bases of the range, of the null space's complement, and of the null space.

    Shapes (rows, rank), (columns, rank), (columns, columns − rank). The numerical rank must be
    the one expected, by a wide margin on either side.
    """
    u, s, vt = torch.linalg.svd(matrix, full_matrices=True)
    top = s[0] if rank else 1.0
    assert rank <= len(s), f"rank {rank} expected of a matrix of shape {tuple(matrix.shape)}"
    assert bool((s[:rank] > 1e-4 * top).all()), f"fewer than {rank} dimensions: {s.tolist()}"
    assert bool((s[rank:] < 1e-9 * top).all()), f"more than {rank} dimensions: {s.tolist()}"
    return u[:, :rank], vt[:rank].T, vt[rank:].T


def polar(matrix: Tensor) -> Tensor:
    """The orthonormal polar factor of a matrix (rows, r) of full column rank."""
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    result: Tensor = u @ vt
    return result


def signed_qr(matrix: Tensor) -> Tensor:
    """The Q factor (rows, r) of the thin QR whose R has a nonnegative diagonal."""
    q, r = torch.linalg.qr(matrix)
    result: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)
    return result


@dataclass(frozen=True)
class Spaces:
    """The linear algebra of one point. d is the dimension of the manifold downstairs."""

    jacobian: Tensor  # (m n, N): the differential of (A, B) -> A Bᵀ
    root: Tensor  # (anything, N): the metric upstairs is g(x, y) = ⟨root x, root y⟩
    tangent: Tensor  # (N, t): a Frobenius-orthonormal basis of the tangent space upstairs
    vertical: Tensor  # (N, t - d): a g-orthonormal basis of the vertical space
    horizontal: Tensor  # (N, d): a g-orthonormal basis of the horizontal space
    downstairs: Tensor  # (m n, d): a Frobenius-orthonormal basis of the tangent space downstairs


class Reference:
    """Momentum descent on one grid, one step at a time, by dense linear algebra.

    ``A`` and ``B`` are the lists of factors at the start; for the isometry geometries they must
    be orthonormal. ``step`` takes the dense Euclidean gradients with respect to each W_ij at the
    current point.

    The two embedded geometries that live downstairs (``fixed-embedded``, and ``isometry-embedded``
    on a 1×1 grid) keep their momentum as a matrix and choose new factors freely after each step.
    All the others keep factors and momentum upstairs.
    """

    def __init__(
        self,
        geometry: str,
        A: Sequence[Tensor],
        B: Sequence[Tensor],
        *,
        lr: float,
        momentum: float = 0.0,
        normalize: str | None = "metric",
        norm_floor: float = 2**-23,
        retraction: str | None = None,
        nesterov: bool = False,
    ) -> None:
        self.geometry = geometry
        self.nesterov = nesterov
        self.heights = [a.shape[0] for a in A]
        self.widths = [b.shape[0] for b in B]
        self.m, self.n, self.r = sum(self.heights), sum(self.widths), A[0].shape[1]
        self.fixed = geometry in FIXED
        singleton = len(A) == len(B) == 1
        self.lives_downstairs = geometry == "fixed-embedded" or (
            geometry == "isometry-embedded" and singleton
        )
        allowed = retractions(geometry, singleton)
        self.retraction = retraction or allowed[0]
        if geometry not in GEOMETRIES or self.retraction not in allowed:
            raise ValueError(f"no {self.retraction!r} retraction in geometry {geometry!r}")
        if normalize not in ("metric", "spectral", None):
            raise ValueError(f"unknown normalization {normalize!r}")
        self.lr, self.momentum = lr, momentum
        self.normalize, self.norm_floor = normalize, norm_floor
        self.move_to(torch.cat(list(A)).double(), torch.cat(list(B)).double())
        size = self.m * self.n if self.lives_downstairs else (self.m + self.n) * self.r
        self.M = torch.zeros(size, dtype=torch.float64)

    # The point ---------------------------------------------------------------------------------

    def move_to(self, a: Tensor, b: Tensor) -> None:
        """Stand at the stacked factors a (m, r), b (n, r), and lay out the spaces there."""
        self.a, self.b = a, b
        self.spaces = self._spaces()

    @property
    def A(self) -> list[Tensor]:
        """The left factors A_i (m_i, r)."""
        return list(torch.split(self.a, self.heights))

    @property
    def B(self) -> list[Tensor]:
        """The right factors B_j (n_j, r)."""
        return list(torch.split(self.b, self.widths))

    @property
    def W(self) -> list[list[Tensor]]:
        """The dense blocks W_ij (m_i, n_j)."""
        return [[a @ b.T for b in self.B] for a in self.A]

    def unflatten(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Upstairs vectors (..., N) as stacked (..., m, r) and (..., n, r)."""
        da, db = torch.split(z, [self.m * self.r, self.n * self.r], dim=-1)
        batch = z.shape[:-1]
        return da.reshape(*batch, self.m, self.r), db.reshape(*batch, self.n, self.r)

    def matrix(self, vector: Tensor) -> Tensor:
        """What a tangent vector, in this geometry's own coordinates, is downstairs: (m, n)."""
        if not self.lives_downstairs:
            vector = self.spaces.jacobian @ vector
        return vector.reshape(self.m, self.n)

    # The definitions: map, constraints, metric ---------------------------------------------------

    def _differential(self, z: Tensor) -> Tensor:
        """z -> (dA_i B_jᵀ + A_i dB_jᵀ)_ij, (batch, N) -> (batch, m, n)."""
        da, db = self.unflatten(z)
        return da @ self.b.T + self.a @ db.mT

    def _constraints(self, z: Tensor) -> Tensor:
        """z -> dF_iᵀ F_i + F_iᵀ dF_i for all factors F_i, (batch, N) -> (batch, (I + J) r²)."""
        da, db = self.unflatten(z)
        moves = [*torch.split(da, self.heights, dim=-2), *torch.split(db, self.widths, dim=-2)]
        gram_moves = [f.T @ df for f, df in zip(self.A + self.B, moves, strict=True)]
        return torch.cat([(g + g.mT).flatten(1) for g in gram_moves], dim=1)

    def _metric_root(self, z: Tensor) -> Tensor:
        """A linear map whose Gram matrix is the metric upstairs, (batch, N) -> (batch, anything).

        Fixed rank:  Σ_ij ⟨ΞA_i B_jᵀ, HA_i B_jᵀ⟩ + ⟨ΞB_j A_iᵀ, HB_j A_iᵀ⟩, which is the weighting of
                     ⟨ΞA_i, HA_i⟩ by B_jᵀB_j and of ⟨ΞB_j, HB_j⟩ by A_iᵀA_i.
        Quotient:    J Σ_i ⟨ΞU_i, HU_i⟩ + I Σ_j ⟨ΞV_j, HV_j⟩.
        Canonical:   the same with the weights I − U_iU_iᵀ/2 and I − V_jV_jᵀ/2 on the left.

        Working with a root, and not with the Gram matrix, keeps the condition number unsquared.
        The embedded geometries use no metric upstairs, except that the isometry grid lifts by the
        horizontal space of the quotient geometry; for the others any metric will do here.
        """
        da, db = self.unflatten(z)
        if self.fixed:
            return torch.cat([(da @ self.b.T).flatten(1), (db @ self.a.T).flatten(1)], dim=1)
        moves = [*torch.split(da, self.heights, dim=-2), *torch.split(db, self.widths, dim=-2)]
        counts = [len(self.widths)] * len(self.heights) + [len(self.heights)] * len(self.widths)
        parts = []
        for factor, move, count in zip(self.A + self.B, moves, counts, strict=True):
            if self.geometry == "isometry-canonical":
                weight = torch.eye(len(factor), dtype=torch.float64) - factor @ factor.T / 2
                move = torch.linalg.cholesky(weight).T @ move
            parts.append(count**0.5 * move.flatten(1))
        return torch.cat(parts, dim=1)

    def _dimensions(self) -> tuple[int, int]:
        """Dimensions of the tangent spaces upstairs and downstairs, from theory."""
        r = self.r
        if self.fixed:
            return (self.m + self.n) * r, (self.m + self.n - r) * r
        stiefel = sum(rows * r - r * (r + 1) // 2 for rows in self.heights + self.widths)
        return stiefel, stiefel - r * (r - 1) // 2

    def _spaces(self) -> Spaces:
        """The consequences of the three definitions above."""
        size = (self.m + self.n) * self.r
        above, below = self._dimensions()
        jacobian = matrix_of(self._differential, size)
        root = matrix_of(self._metric_root, size)
        if self.fixed:
            tangent = torch.eye(size, dtype=torch.float64)
        else:
            tangent = ranked_svd(matrix_of(self._constraints, size), size - above)[2]
        assert tangent.shape[1] == above
        # In a g-orthonormal basis of the tangent space, g-orthogonal means orthogonal: there, the
        # vertical space is the null space of the differential, the horizontal one the complement.
        triangle = torch.linalg.qr(root @ tangent, mode="r").R
        basis = torch.linalg.solve_triangular(triangle, tangent, upper=True, left=False)
        downstairs, complement, null = ranked_svd(jacobian @ basis, below)
        return Spaces(jacobian, root, tangent, basis @ null, basis @ complement, downstairs)

    def metric(self, x: Tensor, y: Tensor) -> Tensor:
        """The Riemannian inner product of two tangent vectors in this geometry's coordinates."""
        if "embedded" in self.geometry:
            return (self.matrix(x) * self.matrix(y)).sum()
        return (self.spaces.root @ x) @ (self.spaces.root @ y)

    # One step ------------------------------------------------------------------------------------

    def gradient(self, grad: Sequence[Sequence[Tensor]]) -> Tensor:
        """Solve g(gradient, h) = df(h) for all tangent h; grad holds the Euclidean G_ij."""
        g = torch.cat([torch.cat(list(row), dim=1) for row in grad]).double().flatten()
        s = self.spaces
        if "embedded" in self.geometry:  # the metric is Frobenius, downstairs
            below = s.downstairs @ (s.downstairs.T @ g)
            return below if self.lives_downstairs else self.lift(below)
        return s.horizontal @ (s.horizontal.T @ (s.jacobian.T @ g))

    def lift(self, below: Tensor) -> Tensor:
        """The horizontal vector (N,) over a tangent vector (m n,) downstairs."""
        s = self.spaces
        solution: Tensor = torch.linalg.lstsq(s.jacobian @ s.horizontal, below[:, None]).solution
        return s.horizontal @ solution[:, 0]

    def divisor(self, vector: Tensor) -> float:
        """What a step is divided by: the floored norm, or 1 without normalization."""
        if self.normalize is None:
            return 1.0
        if self.normalize == "spectral":
            size = torch.linalg.matrix_norm(self.matrix(vector), ord=2)
        else:
            size = self.metric(vector, vector).sqrt()
        return max(float(size), self.norm_floor)

    def retract(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """The new stacked factors (m, r), (n, r) after a step from the current point."""
        if self.lives_downstairs:
            w = self.a @ self.b.T
            target = w + self.matrix(step)
            if self.retraction == "orthographic":
                target = self._orthographic(w, target)
            u, _, vt = torch.linalg.svd(target, full_matrices=False)
            u, v = u[:, : self.r], vt[: self.r].T
            # Truncated, UΣVᵀ is the projection of W + Ξ to the columns of U. As a least-squares fit
            # it does not ask U to be orthonormal beyond rounding, and keeps one more digit of W.
            return (u, torch.linalg.lstsq(u, target).solution.T) if self.fixed else (u, v)
        da, db = self.unflatten(step)
        a, b = self.a + da, self.b + db
        if self.retraction == "additive":
            return a, b
        orthonormalize = polar if self.retraction == "polar" else signed_qr
        return (
            torch.cat([orthonormalize(factor) for factor in torch.split(a, self.heights)]),
            torch.cat([orthonormalize(factor) for factor in torch.split(b, self.widths)]),
        )

    def _orthographic(self, w: Tensor, target: Tensor) -> Tensor:
        """The rank-r matrix that differs from the target by a normal vector at w, all (m, n).

        In the bases [U U⊥], [V V⊥] of w, normal vectors fill the (⊥, ⊥) block alone, where the
        target has nothing, and the rank is r exactly if that block is E₂₁ E₁₁⁻¹ E₁₂.
        """
        r = self.r
        u, _, vt = torch.linalg.svd(w, full_matrices=True)
        e = u.T @ target @ vt.T
        corner = e[r:, :r] @ torch.linalg.solve(e[:r, :r], e[:r, r:])
        normal: Tensor = u[:, r:] @ corner @ vt[r:]
        return target + normal

    def transport(self, vector: Tensor) -> Tensor:
        """Reread a tangent vector of the old point at the current one, and project it there."""
        s = self.spaces
        if self.lives_downstairs:
            return s.downstairs @ (s.downstairs.T @ vector)
        tangent = s.tangent @ (s.tangent.T @ vector)
        return s.horizontal @ ((s.root @ s.horizontal).T @ (s.root @ tangent))

    def step(self, grad: Sequence[Sequence[Tensor]]) -> None:
        """One iteration: gradient, momentum, normalization, retraction, transport."""
        gradient = self.gradient(grad)
        self.M = self.momentum * self.M + (1 - self.momentum) * gradient
        along = self.M
        if self.nesterov:
            along = self.momentum * self.M + (1 - self.momentum) * gradient
        self.move_to(*self.retract(-self.lr * along / self.divisor(along)))
        self.M = self.transport(self.M)
