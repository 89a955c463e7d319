"""The r×r Triton kernels against float64 and against the functions of linalg they stand in for."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from rankfold import linalg, polar, schatten, whitening

from .interpreted import CUDA, DEVICE, in_kernels, on_the_host, quiet, run_in_interpreter
from .test_linalg import randn, with_singular_values

pytest.importorskip("triton")

EPS = torch.finfo(torch.float32).eps

sizes = pytest.mark.parametrize("r", [1, 3, 16, 20, *([64, 100, 128] if CUDA else [])])
pytestmark = quiet


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture
def kernels() -> ModuleType:
    """Imported here, since Triton need not be installed."""
    from rankfold import kernels

    assert kernels._importable()
    return kernels


def relative_error(x: Tensor, reference: Tensor) -> Tensor:
    """Frobenius distance over norm, (members,), from stacks (members, r, r)."""
    reference = reference.cpu().double()
    return linalg.frobenius(x.cpu().double() - reference) / linalg.frobenius(reference)


def conditioned(members: int, r: int, condition: float, seed: int) -> Tensor:
    """(members, r, r) in float64 with singular values from 1 down to 1 / condition."""
    values = condition ** -torch.linspace(0, 1, r, dtype=torch.float64)
    return torch.stack([with_singular_values(values, r, seed + 10 * k) for k in range(members)])


def on_device(x: Tensor) -> Tensor:
    return x.to(DEVICE, torch.float32)


@in_kernels
@sizes
def test_cholesky_inverse(kernels: ModuleType, r: int) -> None:
    x = conditioned(2, r, 30, seed=1)
    gram = on_device(x.mT @ x)
    lower, inverse, lifted = kernels.elimination.cholesky_inverse(gram)
    reference = torch.linalg.cholesky(gram.double().cpu())
    condition = 30**2
    assert relative_error(lower, reference).max() < 2 * condition * EPS
    assert relative_error(inverse, torch.linalg.inv(reference)).max() < 2 * condition * EPS
    assert relative_error(lower @ lower.mT, gram).max() < (4 + r / 4) * EPS
    assert (lower.triu(1) == 0).all()
    assert (inverse.triu(1) == 0).all()
    assert not lifted.any()


@in_kernels
@sizes
def test_cholesky_lifts_what_linalg_lifts(kernels: ModuleType, r: int) -> None:
    healthy = randn(2 * r, r, seed=1)
    repeated, zero_column = healthy.clone(), healthy.clone()
    repeated[:, -1] = repeated[:, 0]
    zero_column[:, r // 2] = 0
    factors = (healthy, healthy[:1], healthy, repeated, zero_column)
    gram = on_device(torch.stack([x.mT @ x for x in factors]))
    lower, inverse, lifted = kernels.elimination.cholesky_inverse(gram)
    expected = linalg.cholesky(gram.cpu())
    assert lifted.tolist() == expected.lifted.tolist()
    assert torch.equal(lower[2], lower[0])
    assert torch.equal(inverse[2], inverse[0])
    for k, (ours, theirs) in enumerate(zip(lower.cpu().double(), expected.lower, strict=True)):
        if r == 1 and k == 4:
            continue  # all zeros have nothing to be lifted by
        # What was added shows in the product.
        product = theirs.double() @ theirs.double().mT
        assert (ours @ ours.mT - product).abs().max() <= (4 + r) * EPS * product.abs().max()
        assert (ours @ inverse[k].cpu().double() - torch.eye(r)).abs().max() < 1e-2


@in_kernels
def test_the_harder_lift(kernels: ModuleType) -> None:
    """Indefinite by more than the first lift adds, by less than the second."""
    gram = torch.eye(20)
    gram[0, 1] = gram[1, 0] = 1 + 2e-4
    lower, _, lifted = kernels.elimination.cholesky_inverse(on_device(gram))
    expected = linalg.cholesky(gram)
    assert lifted.item()
    assert expected.lower.isfinite().all()
    assert relative_error(lower[None], expected.lower[None]).max() < 1e-5


@in_kernels
@sizes
def test_nothing_finite_comes_of_nothing_definite(kernels: ModuleType, r: int) -> None:
    """And its neighbours do not notice."""
    gram = on_device(conditioned(3, r, 3, seed=1))
    gram = gram @ gram.mT
    bad = gram.clone()
    bad[1, r // 2, r // 2] = torch.nan
    bad[2] = 0
    healthy, spoiled = (
        kernels.elimination.cholesky_inverse(gram),
        kernels.elimination.cholesky_inverse(bad),
    )
    inverse, spoiled_inverse = kernels.elimination.inverse(gram), kernels.elimination.inverse(bad)
    for k in range(3):
        if k > 0:
            assert spoiled[2][k]
            assert not spoiled[1][k].isfinite().all()
            assert not spoiled_inverse[k].isfinite().all()
        else:
            assert all(torch.equal(x[k], y[k]) for x, y in zip(healthy, spoiled, strict=True))
            assert torch.equal(inverse[k], spoiled_inverse[k])


@in_kernels
@sizes
@pytest.mark.parametrize("condition", [1.0, 1e6])
def test_inverse(kernels: ModuleType, r: int, condition: float) -> None:
    x = on_device(conditioned(2, r, condition, seed=1))
    reference = torch.linalg.inv(x.double())
    error = relative_error(kernels.elimination.inverse(x), reference)
    library = relative_error(linalg.inverse(x.cpu()), reference)
    assert error.mean() < 3 * library.mean() + 4 * EPS


@in_kernels
@pytest.mark.parametrize("r", [3, 70])
def test_what_is_found_stays(kernels: ModuleType, r: int) -> None:
    """And what is not is made: a member's error decides, and NaN is no small error."""
    x = on_device(conditioned(3, r, 3, seed=1))
    gram, error = x @ x.mT, torch.zeros_like(x)
    error[1, 0, 0], error[2, -1, -1] = 1e-3, torch.nan
    marked = [torch.full_like(x, mark) for mark in (1, 2, 3)]
    found = kernels.members.Found((marked[0],), error, 1e-7)
    inverse = kernels.elimination.inverse(x, found)
    roots = kernels.elimination.cholesky_inverse(
        gram, kernels.members.Found(tuple(marked[1:]), error, 1e-7)
    )
    assert [float(made[0].mean()) for made in (inverse, *roots[:2])] == [1, 2, 3]
    made = kernels.elimination.inverse(x), *kernels.elimination.cholesky_inverse(gram)
    for ours, theirs in zip((inverse, *roots), made, strict=True):
        assert torch.equal(ours[1:], theirs[1:])


@in_kernels
@sizes
def test_inverse_needs_its_pivots(kernels: ModuleType, r: int) -> None:
    """A permuted triangle: zeros on the diagonal, every pivot off it."""
    triangle = randn(r, r, seed=1).tril(-1) / r + torch.eye(r)
    x = on_device(triangle[:, torch.arange(r - 1, -1, -1)])
    assert (
        relative_error(kernels.elimination.inverse(x)[None], torch.linalg.inv(x.double())[None])
        < 20 * EPS
    )


@in_kernels
@sizes
def test_any_leading_dimensions_and_strides(kernels: ModuleType, r: int) -> None:
    x = on_device(conditioned(2, r, 3, seed=1)).unflatten(0, (1, 2))
    gram = x @ x.mT
    wide = torch.zeros(2, 1, r, 2 * r + 1, device=DEVICE)
    strided = wide[..., 1::2].transpose(0, 1)
    strided.copy_(gram)
    lower, _, lifted = kernels.elimination.cholesky_inverse(strided.mT)
    assert lifted.shape == (1, 2)
    reference = torch.linalg.cholesky(gram.double())
    assert relative_error(lower[0], reference[0]).max() < 50 * EPS
    strided.copy_(x)
    reference = torch.linalg.inv(x.double())
    assert relative_error(kernels.elimination.inverse(x.mT).mT[0], reference[0]).max() < 50 * EPS
    assert relative_error(kernels.elimination.inverse(strided)[0], reference[0]).max() < 50 * EPS
    assert kernels.elimination.inverse(x[0, 0]).shape == (r, r)
    assert kernels.elimination.inverse(x[:0]).shape == (0, 2, r, r)


@in_kernels
@sizes
def test_inverse_sqrt(kernels: ModuleType, r: int) -> None:
    values = torch.linspace(0.6, 1.4, r, dtype=torch.float64)
    vectors = torch.linalg.qr(randn(4, r, r, seed=1)).Q
    gram = on_device((vectors * values) @ vectors.mT)
    reference = (vectors / values.sqrt()) @ vectors.mT
    steps = polar.newton_schulz_steps(0.4, torch.float32)
    library = relative_error(polar.inverse_sqrt(gram.cpu(), steps), reference).max()
    error = relative_error(kernels.roots.inverse_sqrt(gram.mT, steps, scale=1.0), reference).max()
    assert error < 2 * library + 2 * EPS
    one_step = kernels.roots.inverse_sqrt(gram, 1, scale=1.0)
    assert relative_error(one_step, polar.inverse_sqrt(gram.cpu(), 1)).max() < 2 * EPS


@in_kernels
@sizes
def test_inverse_sqrt_where_none_is_found(kernels: ModuleType, r: int) -> None:
    vectors = torch.linalg.qr(randn(4, r, r, seed=1)).Q
    values = 1.5 + torch.linspace(-1, 1, r, dtype=torch.float64)
    gram = on_device((vectors * values) @ vectors.mT)
    reference = (vectors / values.sqrt()) @ vectors.mT
    made, error = torch.zeros_like(gram), torch.zeros_like(gram)
    error[1::2, 0, 0] = 0.5
    found = kernels.members.Found((made,), error, 0.1)
    steps = polar.newton_schulz_steps(2 / 3, torch.float32)
    result = kernels.roots.inverse_sqrt(gram, steps, scale=1 / 1.5, found=found)
    assert not result[::2].any()
    assert relative_error(result[1::2], reference[1::2]).max() < 16 * EPS


@in_kernels
@sizes
def test_scaled_inverse_sqrt(kernels: ModuleType, r: int) -> None:
    values = torch.logspace(1.5, 0, r, dtype=torch.float64)
    vectors = torch.linalg.qr(randn(4, r, r, seed=1)).Q
    gram = on_device((vectors * values) @ vectors.mT)
    gram[2] = torch.nan
    reference = ((vectors / values.sqrt()) @ vectors.mT)[[0, 1, 3]]
    result = kernels.roots.inverse_sqrt(gram, 12)
    library = polar.scaled_inverse_sqrt(gram.cpu(), 12)
    assert not result[2].isfinite().any()
    error, library_error = (
        relative_error(x[[0, 1, 3]], reference).max() for x in (result, library)
    )
    assert error < 2 * library_error + 2 * EPS


@in_kernels
@pytest.mark.parametrize("r", [1, 3, 20, *([64] if CUDA else [])])
def test_inverse_root_of_any_rank(kernels: ModuleType, r: int) -> None:
    """Singular ones too, whatever their size, and a member that is not finite is that one alone."""
    from rankfold.kernels import whiten

    x = conditioned(4, r, 1e4, seed=2) * torch.tensor([1.0, 1e-6, 1e6, 1.0])[:, None, None]
    x[3, :, r // 2 :] = 0
    gram = (x.mT @ x).expand(2, 4, r, r).clone()
    gram[1, 2] = torch.nan
    scale = linalg.trace(gram).clamp_min(1e-12)
    values, vectors = torch.linalg.eigh(gram[0] / scale[0, :, None, None])
    lifted = scale[0, :, None] * (values.clamp_min(0) + 2.0**-16) / (1 + 2.0**-16)
    reference = (vectors / lifted.sqrt()[:, None]) @ vectors.mT
    steps = len(schatten.stretches(2.0**-8, torch.float32))
    found = whiten.inverse_root(on_device(gram).mT, on_device(scale), 2.0**-8, 2.0**-8, steps)
    library = schatten.inverse_root(gram[0].float(), scale[0].float())
    error, library_error = (relative_error(y, reference).max() for y in (found[0], library))
    assert error < 2 * library_error + 2 * EPS
    assert not found[1, 2].isfinite().any()
    assert torch.equal(found[1, [0, 1, 3]], found[0, [0, 1, 3]])
    assert torch.equal(found[0], found[0].mT)


@in_kernels
@quiet
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("tilt", whitening.TILTS)
@pytest.mark.parametrize("r", [3, *([20, 64] if CUDA else [])])
def test_even_parts(
    kernels: ModuleType, r: int, tilt: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the plain form in float64: shares, who is tilted, a zero, what is not finite."""
    members, blocks = 18, 2
    x = conditioned(members * blocks, r, 300, seed=3).view(members, blocks, r, r)
    x = x * 10.0 ** torch.arange(-6, members - 6).double()[:, None, None, None]
    x[[1, 12], 1] *= 1e-9  # far less than the other of its side, and below the floor or not
    x[-2, 1, 0, 0] = torch.nan
    x[-1] = 0
    share = torch.rand(members, generator=torch.Generator().manual_seed(1)) if told else None
    tilted = torch.arange(members) % 3 > 0 if told else None

    def found(x: Tensor) -> tuple[Tensor, Tensor]:
        given = None if share is None else share.to(x)
        mask = None if tilted is None else tilted.to(x.device)
        return whitening._even(x, None, 3, whitening.Manner(2.0**-23, tilt, 0.0, mask), given)

    exact = found(x)
    monkeypatch.setattr(kernels, "serve_small", lambda *x: True)
    ours = found(on_device(x))
    monkeypatch.setattr(kernels, "serve_small", lambda *x: False)
    plain = found(on_device(x).cpu())
    for made in ours:
        assert not made[-2].isfinite().any()
        assert not made[-1].any()
    for mine, library, reference in zip(ours, plain, exact, strict=True):
        error, library_error = (
            relative_error(y[:-2].flatten(0, 1).view(32, 1, -1), reference[:-2].view(32, 1, -1))
            for y in (mine, library)
        )
        assert error.square().mean().sqrt() < 1.5 * library_error.square().mean().sqrt() + 2 * EPS


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_in_a_graph(kernels: ModuleType) -> None:
    x = on_device(conditioned(4, 64, 3, seed=1))
    gram = x @ x.mT

    def everything() -> list[Tensor]:
        return [
            *kernels.elimination.cholesky_inverse(gram),
            kernels.elimination.inverse(x),
            kernels.roots.inverse_sqrt(gram, 3),
        ]

    expected = everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything()
    for result in results:
        result.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
