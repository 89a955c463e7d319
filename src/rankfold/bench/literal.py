"""The ten algorithms as Knight (2026) writes them in appendix A, with its slips corrected.

Householder QR, SVD and eigendecompositions, momentum in the appendix's own coordinates: the slow
form the library's products must agree with, and are timed against. Batched over (batch, I, m, r)
and (batch, J, n, r). Without momentum nothing is transported, and the state stays None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..geometries import Pair, StepOptions
from ..linalg import skew, sym

State = Any


def frobenius_square(x: Tensor) -> Tensor:
    """Sum of squares over all but the batch."""
    return x.square().flatten(1).sum(1)


def scale_of(norm: Tensor, options: StepOptions) -> Tensor:
    """γ (batch, 1, 1): minus the learning rate over the floored norm."""
    return (-options.lr / norm.clamp_min(options.norm_floor))[:, None, None]


def middle(k: Tensor, r_x: Tensor, r_y: Tensor) -> Tensor:
    """[[K, R_Yᵀ], [R_X, 0]] (batch, 2r, 2r)."""
    top = torch.cat([k, r_y.mT], -1)
    return torch.cat([top, torch.cat([r_x, torch.zeros_like(k)], -1)], -2)


def orthogonal_polar(x: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns."""
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    nearest: Tensor = u @ vt
    return nearest


def canonical_qr(x: Tensor) -> Tensor:
    """The Q factor for an R with positive diagonal."""
    q, r = torch.linalg.qr(x)
    signed: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return signed


class LiteralEmbedded:
    """A.1 (fixed rank, grids by stacking) and A.3 (isometry, single pair): CD-coordinates."""

    def __init__(self, isometry: bool) -> None:
        self.isometry = isometry

    def step(
        self, point: Pair, grad: Pair, state: State, options: StepOptions
    ) -> tuple[Pair, State]:
        """One step; the state is (C_M, D_M, U, R_A, V, R_B)."""
        a, b, g_a, g_b = (x.flatten(1, 2) for x in (*point, *grad))
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(len(a), -1, -1)
        if self.isometry:
            u, r_a, v, r_b = a, eye, b, eye
        else:
            (u, r_a), (v, r_b) = torch.linalg.qr(a), torch.linalg.qr(b)
        c = torch.linalg.solve_triangular(r_b, g_a, upper=True, left=False)
        d = torch.linalg.solve_triangular(r_a, g_b, upper=True, left=False)
        if self.isometry:
            c, d = c - u @ sym(u.mT @ c), d - v @ sym(v.mT @ d)
        if state is not None:
            # The saved frames span the same spaces as these: turn the coordinates over to them.
            c_m, d_m, u_m, v_m = state
            nu = options.momentum
            c = nu * c_m @ (v_m.mT @ v) + (1 - nu) * c
            d = nu * d_m @ (u_m.mT @ u) + (1 - nu) * d
        elif options.momentum:
            c, d = (1 - options.momentum) * c, (1 - options.momentum) * d
        k = (u.mT @ c + d.mT @ v) / 2
        k = skew(k) if self.isometry else k
        (q_x, r_x), (q_y, r_y) = torch.linalg.qr(c - u @ k), torch.linalg.qr(d - v @ k.mT)
        core = middle(k, r_x, r_y)
        kind: Any = 2 if options.normalize == "spectral" else "fro"
        norm = torch.linalg.matrix_norm(core, ord=kind)
        gamma = scale_of(norm if options.normalize else torch.ones_like(norm), options)
        zero = torch.zeros_like(k)
        target = middle(r_a @ r_b.mT, zero, zero) + gamma * core
        left, sigma, right = torch.linalg.svd(target)
        r = k.shape[-1]
        u_r, v_r = left[..., :r], right.mT[..., :r]
        new_u, new_v = torch.cat([u, q_x], -1) @ u_r, torch.cat([v, q_y], -1) @ v_r
        root = torch.ones_like(sigma[:, :r]) if self.isometry else sigma[:, :r].sqrt()
        new = Pair(
            (new_u * root[:, None]).view_as(point.left),
            (new_v * root[:, None]).view_as(point.right),
        )
        if not options.momentum:
            return new, None
        c_m = c @ v_r[:, :r] + u @ (r_y.mT @ v_r[:, r:])
        d_m = d @ u_r[:, :r] + v @ (r_x.mT @ u_r[:, r:])
        if self.isometry:
            overlap = sym(new_u.mT @ c_m)
            c_m, d_m = c_m - new_u @ overlap, d_m - new_v @ overlap
        return new, (c_m, d_m, new_u, new_v)


class LiteralQuotient:
    """A.2: horizontal lifts, Cholesky factors of the Gram matrices, grids by stacking."""

    def step(
        self, point: Pair, grad: Pair, state: State, options: StepOptions
    ) -> tuple[Pair, State]:
        """One step; the state is the horizontal (M_A, M_B)."""
        a, b, g_a, g_b = (x.flatten(1, 2) for x in (*point, *grad))
        l_a, l_b = (torch.linalg.cholesky(x.mT @ x) for x in (a, b))
        m_a = torch.cholesky_solve(g_a.mT, l_b).mT
        m_b = torch.cholesky_solve(g_b.mT, l_a).mT
        nu = options.momentum
        if nu:
            old_a, old_b = state if state is not None else (torch.zeros_like(m_a), 0 * m_b)
            m_a, m_b = nu * old_a + (1 - nu) * m_a, nu * old_b + (1 - nu) * m_b
        if options.normalize == "spectral":
            norm = torch.linalg.matrix_norm(m_a @ b.mT + a @ m_b.mT, ord=2)
        else:
            norm = (frobenius_square(m_a @ l_b) + frobenius_square(m_b @ l_a)).sqrt()
        gamma = scale_of(norm if options.normalize else torch.ones_like(norm), options)
        a, b = a + gamma * m_a, b + gamma * m_b
        new = Pair(a.view_as(point.left), b.view_as(point.right))
        if not nu:
            return new, None
        l_a, l_b = (torch.linalg.cholesky(x.mT @ x) for x in (a, b))
        shift = torch.cholesky_solve(a.mT @ m_a, l_a) - torch.cholesky_solve(b.mT @ m_b, l_b).mT
        return new, (m_a - a @ shift / 2, m_b + b @ shift.mT / 2)


class LiteralStiefel:
    """A.3.1 (isometry-embedded grids), A.4 and A.5 (quotient, canonical), pairs and grids."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gradient(self, point: Pair, grad: Pair) -> Pair:
        """The lifted Riemannian gradient."""
        (u, v), (g_u, g_v) = point, grad
        i, j = u.shape[1], v.shape[1]
        if self.name == "isometry-quotient":
            return Pair((g_u - u @ sym(g_u.mT @ u)) / j, (g_v - v @ sym(g_v.mT @ v)) / i)
        if self.name == "isometry-canonical":
            return Pair((g_u - u @ (g_u.mT @ u)) / j, (g_v - v @ (g_v.mT @ v)) / i)
        alpha, beta = skew(u.mT @ g_u), skew(g_v.mT @ v)
        x, y = (g_u - u @ (u.mT @ g_u)) / j, (g_v - v @ (v.mT @ g_v)) / i
        gamma = (alpha.sum(1, keepdim=True) + beta.sum(1, keepdim=True)) / 2
        omega, psi = alpha / j - gamma / (2 * i * j), gamma / (2 * i * j) - beta / i
        return Pair(x + u @ omega, y + v @ psi)

    def norm(self, point: Pair, m: Pair, spectral: bool) -> Tensor:
        """The metric or the spectral norm of a horizontal vector, (batch,)."""
        (u, v), (m_u, m_v) = point, m
        i, j = u.shape[1], v.shape[1]
        omega, psi = u.mT @ m_u, v.mT @ m_v
        if spectral:
            eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device).expand(len(u), -1, -1)
            s_omega, s_psi = omega.sum(1), psi.sum(1)
            left = torch.cat([(m_u.mT @ m_u).sum(1), s_omega.mT], -1)
            left = torch.cat([left, torch.cat([s_omega, i * eye], -1)], -2)
            right = torch.cat([j * eye, s_psi], -1)
            right = torch.cat([right, torch.cat([s_psi.mT, (m_v.mT @ m_v).sum(1)], -1)], -2)
            values, vectors = torch.linalg.eigh(left)
            s = values.clamp_min(0).sqrt()[..., None] * vectors.mT
            largest: Tensor = torch.linalg.eigvalsh(s @ right @ s.mT)[..., -1]
            return largest.clamp_min(0).sqrt()
        total = j * frobenius_square(m_u) + i * frobenius_square(m_v)
        if self.name == "isometry-canonical":
            total = total - (j * frobenius_square(omega) + i * frobenius_square(psi)) / 2
        elif self.name == "isometry-embedded":
            total = total - 2 * (omega.sum(1) * psi.sum(1)).sum((-2, -1))
        return total.sqrt()

    def step(
        self, point: Pair, grad: Pair, state: State, options: StepOptions
    ) -> tuple[Pair, State]:
        """One step; the state is the horizontal (M_U, M_V)."""
        nu, m = options.momentum, self.gradient(point, grad)
        if nu:
            old = state if state is not None else Pair(*map(torch.zeros_like, m))
            m = Pair(*(nu * o + (1 - nu) * g for o, g in zip(old, m, strict=True)))
        norm = self.norm(point, m, options.normalize == "spectral")
        gamma = scale_of(norm if options.normalize else torch.ones_like(norm), options)
        retract = canonical_qr if options.retraction == "qr" else orthogonal_polar
        new = Pair(*(retract(p + gamma[:, None] * t) for p, t in zip(point, m, strict=True)))
        if not nu:
            return new, None
        t_u, t_v = (t - p @ sym(t.mT @ p) for p, t in zip(new, m, strict=True))
        i, j = new.left.shape[1], new.right.shape[1]
        total = j * (new.left.mT @ t_u).sum(1) + i * (new.right.mT @ t_v).sum(1)
        omega = total[:, None] / (2 * i * j)
        return new, Pair(t_u - new.left @ omega, t_v - new.right @ omega)


def literal_for(
    name: str, lefts: int, rights: int
) -> LiteralEmbedded | LiteralQuotient | LiteralStiefel:
    """The literal algorithm of a geometry for members of lefts × rights factors."""
    if name == "fixed-quotient":
        return LiteralQuotient()
    if name == "fixed-embedded" or (name == "isometry-embedded" and lefts == rights == 1):
        return LiteralEmbedded(isometry=name.startswith("isometry"))
    return LiteralStiefel(name)
