"""The product-only linear algebra against LAPACK's factorizations, in float64 and float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankfold import linalg, polar, rank_core, tall
from rankfold.geometries.settling import moved_spread
from rankfold.geometries.terms import LONGEST_CAPTURED

DTYPES = [torch.float64, torch.float32]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_singular_values(values: Tensor, rows: int, seed: int) -> Tensor:
    """(rows, r) with these singular values and random singular vectors."""
    r = len(values)
    u = torch.linalg.qr(randn(rows, r, seed=seed)).Q
    v = torch.linalg.qr(randn(r, r, seed=seed + 1)).Q
    return (u * values) @ v.T


def svd_polar(x: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e3])
@pytest.mark.parametrize("asked", [True, False])
def test_orthonormal_frame_is_a_qr(
    asked: bool, dtype: torch.dtype, condition: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tall, "can_ask", lambda x: asked)
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 6).double()
    factor = torch.stack([with_singular_values(values, 40, seed) for seed in range(3)])
    frame, _ = linalg.orthonormal_frames(factor.to(dtype), factor.to(dtype))
    eps = torch.finfo(dtype).eps
    basis = factor.to(dtype) @ frame.inverse
    gram = basis.double().mT @ basis.double()
    assert (gram - torch.eye(6)).abs().max() < 30 * eps * condition
    assert (basis @ frame.triangle - factor).abs().max() < 30 * eps
    assert (frame.triangle @ frame.inverse - torch.eye(6)).abs().max() < 30 * eps * condition
    if not asked:
        assert (frame.triangle.tril(-1) == 0).all()
        assert (frame.triangle.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [0.0, 0.03, 0.3, 0.6])
def test_polar_of_a_bounded_step(dtype: torch.dtype, reach: float) -> None:
    u = torch.linalg.qr(randn(4, 30, 5, seed=1)).Q
    xi = randn(4, 30, 5, seed=2)
    xi = xi - u @ linalg.sym(u.mT @ xi)
    xi = xi * reach / torch.linalg.matrix_norm(xi, ord=2)[:, None, None]
    x = (u + xi).to(dtype)
    result = x @ polar.polar_scaling(x.mT @ x, polar.Spread(2 * reach**2 + 0.05))
    eps = torch.finfo(dtype).eps
    assert (result - svd_polar(x)).abs().max() < 20 * eps
    gram = result.double().mT @ result.double() - torch.eye(5)
    assert torch.linalg.matrix_norm(gram, ord=2).max() < 10 * eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [0.03, 0.25, 0.3, LONGEST_CAPTURED])
@pytest.mark.parametrize("towards", ["anywhere", "ends"])
def test_polar_of_any_step_of_a_graph_takes_one_pass(
    dtype: torch.dtype, reach: float, towards: str
) -> None:
    """Up to the longest, in directions that are not tangent, or along the columns themselves."""
    spread = moved_spread(reach)
    assert polar.is_small(spread)
    u = torch.linalg.qr(randn(4, 30, 5, seed=1)).Q
    xi = randn(4, 30, 5, seed=2)
    if towards == "ends":
        xi = u * torch.tensor([-1.0, 1, -1, 1, -1])
    xi = xi * (2**0.5 * reach) / torch.linalg.matrix_norm(xi, ord=2)[:, None, None]
    x = (u + xi).to(dtype)
    result = x @ polar.polar_scaling(x.mT @ x, spread)
    eps = torch.finfo(dtype).eps
    assert (result - svd_polar(x)).abs().max() < 20 * eps
    gram = result.double().mT @ result.double() - torch.eye(5)
    assert torch.linalg.matrix_norm(gram, ord=2).max() < 10 * eps


@pytest.mark.parametrize("reach", [0.7, 0.71, 1.0, 10.0, 1000.0])
def test_a_step_that_can_lose_rank_takes_two(reach: float) -> None:
    assert not polar.is_small(moved_spread(reach))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 10.0, 100.0])
def test_polar_when_nothing_is_known(dtype: torch.dtype, size: float) -> None:
    u = torch.linalg.qr(randn(3, 30, 5, seed=3)).Q
    x = (u + size * randn(3, 30, 5, seed=4) / 30**0.5).to(dtype)
    rough = x @ polar.polar_scaling(x.mT @ x, None)
    result = rough @ polar.polish_scaling(rough.mT @ rough)
    eps = torch.finfo(dtype).eps
    gram = result.double().mT @ result.double() - torch.eye(5)
    assert torch.linalg.matrix_norm(gram, ord=2).max() < 10 * eps
    condition = torch.linalg.cond(x.double()).max().item()
    assert (result - svd_polar(x)).abs().max() < 50 * eps * condition


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_polished_is_orthonormal_to_rounding_or_refused(dtype: torch.dtype) -> None:
    """Also next to where the steps end, and a root is nearly there."""
    least = torch.logspace(0, -2, 400, dtype=torch.float64)
    values = torch.stack([torch.ones_like(least), least], -1)
    x = torch.stack([with_singular_values(v, 20, seed) for seed, v in enumerate(values)]).to(dtype)
    scaling = polar.polish_scaling(x.mT @ x)
    made = scaling.isfinite().flatten(1).all(1)
    result = x.double() @ scaling.double()
    defect = (result.mT @ result - torch.eye(2)).abs().amax((1, 2))
    # The Gram matrix is itself known to rounding, of which its smallest value takes a larger share.
    assert (defect < 8 * torch.finfo(dtype).eps / least**2)[made].all()
    assert made[least > 0.25].all()
    assert not made[least < 0.1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_gives_the_qr_with_the_canonical_sign(dtype: torch.dtype) -> None:
    u = torch.linalg.qr(randn(3, 20, 4, seed=5)).Q
    x = (u + 0.02 * randn(3, 20, 4, seed=6)).to(dtype)
    q, r = torch.linalg.qr(x.double())
    expected = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    found = x @ linalg.cholesky(x.mT @ x).inverse.mT
    assert (found - expected).abs().max() < 20 * torch.finfo(dtype).eps


def rank_problem(t: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S + γK, γX, γY (orthogonal parts in their own coordinates) with σ_r(S) = 1, ‖T‖₂ = t."""
    r = 4
    core = with_singular_values(torch.linspace(1, 30, r).double(), r, seed)
    parts = randn(3, 2, r, r, seed=seed + 2)[0]
    k, x = parts
    y = randn(r, r, seed=seed + 5)
    step = torch.cat([torch.cat([k, y.T], 1), torch.cat([x, torch.zeros(r, r)], 1)])
    scale = t / torch.linalg.matrix_norm(step, ord=2)
    return core + scale * k, scale * x, scale * y, core


def assemble(left: Tensor, right: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(U left + X) N⁻¹ (V + Y right)ᵀ in the bases [U Q_X], [V Q_Y] where X, Y are coordinates."""
    eye = torch.eye(len(left), dtype=left.dtype)
    overlap = eye + right.T @ y.T @ y @ right
    tall = torch.cat([left, x]) @ torch.linalg.inv(overlap)
    return tall @ torch.cat([eye, y @ right]).T


@pytest.mark.parametrize(("t", "tolerance"), [(0.01, 1e-14), (0.1, 1e-13), (0.3, 1e-11)])
def test_best_rank_core_is_the_truncated_svd(t: float, tolerance: float) -> None:
    core, x, y, _ = rank_problem(t, seed=11)
    left, right, inverse, unconverged = rank_core.best_rank_core(
        core, x.T @ x, y.T @ y, torch.linalg.inv(core)
    )
    whole = torch.cat([torch.cat([core, y.T], 1), torch.cat([x, torch.zeros_like(core)], 1)])
    u, s, vt = torch.linalg.svd(whole)
    best = (u[:, :4] * s[:4]) @ vt[:4]
    assert torch.linalg.matrix_norm(assemble(left, right, x, y) - best) < tolerance * s[0]
    assert not unconverged
    assert (inverse @ left - torch.eye(4)).abs().max() < 1e-13


def test_best_rank_core_marks_what_did_not_converge() -> None:
    easy, hard = rank_problem(0.05, seed=12), rank_problem(40.0, seed=13)
    core, x, y = (torch.stack(pair) for pair in list(zip(easy, hard, strict=True))[:3])
    left, right, _, unconverged = rank_core.best_rank_core(core, x.mT @ x, y.mT @ y, core)
    assert unconverged.tolist() == [False, True]
    # The last iterate is kept, and no iterate moves further than twice the step.
    moved = assemble(left[1], right[1], x[1], y[1])
    moved[:4, :4] -= hard[3]
    k = core[1] - hard[3]
    step = (k.square().sum() + x[1].square().sum() + y[1].square().sum()).sqrt()
    assert torch.linalg.matrix_norm(moved) <= 2 * step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["random", "equal", "crowded", "rank-one", "zero", "tiny"])
def test_spectral_norm(dtype: torch.dtype, case: str) -> None:
    m, n, r, i, j = 24, 18, 4, 2, 3
    u = torch.linalg.qr(randn(5, m, r, seed=21)).Q * i**0.5
    v = torch.linalg.qr(randn(5, n, r, seed=22)).Q * j**0.5
    c, d = randn(5, m, r, seed=23), randn(5, n, r, seed=24)
    if case in ("equal", "crowded"):
        # C Vᵀ alone, with (nearly) equal singular values: nothing may divide by their gaps.
        values = 1 + (torch.arange(r) * 1e-7 if case == "crowded" else torch.zeros(r)).double()
        c, d = torch.linalg.qr(c).Q * values, torch.zeros_like(d)
    elif case == "rank-one":
        c, d = c[..., :1] * randn(5, 1, r, seed=25), torch.zeros_like(d)
    elif case == "zero":
        c, d = torch.zeros_like(c), torch.zeros_like(d)
    elif case == "tiny":
        c, d = 1e-12 * c, 1e-12 * d
    expected = torch.linalg.matrix_norm(c @ v.mT + u @ d.mT, ord=2)
    c, d, u, v = (x.to(dtype) for x in (c, d, u, v))
    found = linalg.spectral_norm(c.mT @ c, u.mT @ c, d.mT @ d, v.mT @ d, i, j)
    tolerance = 1e-10 if dtype == torch.float64 else 5e-6
    assert (found - expected).abs().max() <= tolerance * expected.max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_inverse_from_a_guess_depends_on_no_neighbour(dtype: torch.dtype) -> None:
    values = torch.logspace(0, -1, 6).double()
    x = torch.stack([with_singular_values(values, 6, seed) for seed in range(4)])
    exact = torch.linalg.inv(x)
    guess = exact + torch.tensor([1e-4, 1e-7, 1.0, 0.0])[:, None, None] * randn(4, 6, 6, seed=5)
    x, guess = x.to(dtype), guess.to(dtype)
    stained = x.clone()
    stained[3] = torch.nan
    found = linalg.inverse(stained, guess)
    assert (found[:3] - exact[:3]).abs().max() < 1e3 * torch.finfo(dtype).eps
    assert found[3].isnan().all()
    for k in range(3):
        assert torch.equal(linalg.inverse(x[k : k + 1], guess[k : k + 1])[0], found[k])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_root_near_the_identity_depends_on_no_neighbour(dtype: torch.dtype) -> None:
    x = randn(3, 20, 6, seed=6)
    sizes = torch.tensor([1e-7, 1e-3, 1.0])[:, None, None]
    gram = (torch.eye(6) + sizes * (x.mT @ x) / 20).to(dtype)
    root, inverse_root = linalg.root_near_identity(gram)
    eps = torch.finfo(dtype).eps
    assert (root @ root.mT - gram).abs().max() < 30 * eps
    assert (root @ inverse_root - torch.eye(6)).abs().max() < 30 * eps
    for k in range(3):
        alone = linalg.root_near_identity(gram[k : k + 1])
        assert torch.equal(alone[0][0], root[k])
        assert torch.equal(alone[1][0], inverse_root[k])
