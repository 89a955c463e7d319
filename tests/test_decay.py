"""Weight decay of products, against the dense reference and by what defines it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankfold import Grid, RiemannianSGD, kernels, polar
from rankfold.geometries.fixed_embedded import FixedEmbedded

from . import points
from .beyond import SHAPES, check
from .problems import Case
from .reference import FIXED, retractions
from .toys import Toy, train

METHODS = [(g, r) for g in FIXED for r in retractions(g, singleton=False)]
every_method = pytest.mark.parametrize(("geometry", "retraction"), METHODS)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def case(geometry: str, retraction: str, shape: str, **options: Any) -> Case:
    heights, widths, rank = SHAPES[shape]
    return Case(geometry, retraction, heights=heights, widths=widths, rank=rank, **options)


@every_method
@every_shape
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("target", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.875])
def test_decayed_steps(
    geometry: str, retraction: str, shape: str, dtype: torch.dtype, target: float, momentum: float
) -> None:
    """A tenth of the way to the target in every step, far more than anybody would ask for."""
    chosen = case(geometry, retraction, shape, momentum=momentum)
    check(chosen, dtype, shrink=0.1, decay_to=target)


@every_method
@pytest.mark.parametrize("shape", ["1x1", "ragged"])
@pytest.mark.parametrize("normalize", ["spectral", None])
def test_with_other_normalizations_and_look_ahead(
    geometry: str, retraction: str, shape: str, normalize: str | None
) -> None:
    chosen = case(geometry, retraction, shape, normalize=normalize)
    check(chosen, shrink=0.05)
    check(chosen, shrink=0.05, decay_to=3.0, nesterov=True)


def pair(scale: float = 1.0) -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    sides = (torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in (9, 7))
    a, b = (nn.Parameter(scale * side) for side in sides)
    return a, b


def steps_without_a_gradient(
    a: nn.Parameter, b: nn.Parameter, steps: int, **options: Any
) -> RiemannianSGD:
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    optimizer = RiemannianSGD(Grid(a, b), 0.1, **options)
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("geometry", FIXED)
def test_without_a_gradient_factors_share_a_homothety_evenly(geometry: str) -> None:
    a, b = pair()
    start = [x.detach().clone() for x in (a, b)]
    steps_without_a_gradient(a, b, 4, geometry=geometry, weight_decay=0.5, momentum=0.5)
    for now, before in zip((a, b), start, strict=True):
        # The share is a series, which leaves 5/128 of its fourth power to the other factor.
        torch.testing.assert_close(now.detach(), 0.95**2 * before, rtol=2e-6, atol=0)
    torch.testing.assert_close(
        (a @ b.mT).detach(), 0.95**4 * start[0] @ start[1].mT, rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("geometry", FIXED)
def test_singular_values_end_at_their_target(geometry: str, scale: float) -> None:
    """From above and from far below, while singular vectors and the balance of factors stay."""
    a, b = pair(scale)
    u, _, vt = torch.linalg.svd((a @ b.mT).detach(), full_matrices=False)
    balance = a.norm() / b.norm()
    steps_without_a_gradient(a, b, 200, geometry=geometry, weight_decay=2.0, decay_to=0.7)
    expected = 0.7 * u[:, :3] @ vt[:3]
    torch.testing.assert_close((a @ b.mT).detach(), expected, rtol=0, atol=1e-8 * max(1, scale**2))
    assert 0.5 < (a.norm() / b.norm() / balance).item() < 2


def test_inverse_modulus() -> None:
    generator = torch.Generator().manual_seed(3)
    u, v = (
        torch.linalg.qr(torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)).Q
        for _ in range(2)
    )
    for dtype in (torch.float64, torch.float32):
        bound = 2e4 * torch.finfo(dtype).eps * 5  # twice what is added to 1e-4, for 5 columns
        for size in (1e-6, 1.0, 1e6):
            s = size * torch.logspace(0, -2, 5, dtype=torch.float64)
            x = ((u * s) @ v.mT).to(dtype)
            found = (x @ polar.inverse_modulus(x)).double()
            assert (found - u @ v.mT).norm() < bound
    zero = torch.zeros(2, 3, 3)
    assert (zero @ polar.inverse_modulus(zero)).abs().max() == 0
    # A rank that is missing is not made up.
    thin = torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(thin @ polar.inverse_modulus(thin), thin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("geometry", FIXED)
@pytest.mark.parametrize("target", [0.0, 0.5])
def test_a_member_that_is_skipped_does_not_decay(geometry: str, target: float) -> None:
    models = Toy(), Toy()
    for model in models:
        optimizer = RiemannianSGD(
            model.grids(), 0.1, geometry=geometry, weight_decay=0.5, decay_to=target, momentum=0.5
        )
        train(model, optimizer, [0])
        model.zero_grad()
        model.loss(1).backward()
        if model is models[1]:
            assert model.a.grad is not None
            model.a.grad[0, 0] = torch.nan
            held = [model.a.detach().clone(), optimizer.state[model.b]["momentum"].clone()]
        optimizer.step()
    assert torch.equal(models[1].a, held[0])
    assert torch.equal(optimizer.state[models[1].b]["momentum"], held[1])
    assert torch.equal(models[0].q, models[1].q)


@pytest.mark.parametrize("geometry", FIXED)
@pytest.mark.parametrize("target", [0.0, 0.5])
def test_a_captured_step_decays_as_others_do(geometry: str, target: float) -> None:
    models = Toy(torch.float64), Toy(torch.float64)
    rates: tuple[float | torch.Tensor, ...] = (0.1, torch.tensor(0.1, dtype=torch.float64))
    for model, lr in zip(models, rates, strict=True):
        optimizer = RiemannianSGD(
            model.grids(),
            lr,
            geometry=geometry,
            weight_decay=0.5,
            decay_to=target,
            momentum=0.5,
            capturable=isinstance(lr, torch.Tensor),
        )
        train(model, optimizer, range(4))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_learning_rate_that_has_risen_too_far_changes_nothing() -> None:
    model = Toy()
    optimizer = RiemannianSGD(model.grids(), 0.1, geometry="fixed-quotient", weight_decay=2.0)
    train(model, optimizer, [0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="lr times weight_decay must be below 1"):
        train(model, optimizer, [1])
    assert all(map(torch.equal, before, model.parameters()))


def test_a_fused_step_that_would_take_more_than_there_is_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rates of tensors are not looked at, and no NaN may be written for them."""
    here = points.Case("fixed-embedded", 1, 1, 6, 5, 3, 1)
    geometry, point = here.geometry, here.point()
    assert isinstance(geometry, FixedEmbedded)
    frame = geometry.frame(point)
    coords = geometry.coordinates(frame, here.ambient(point, 10)[1])
    square = torch.zeros_like(coords.k)
    made = [square] * 4, [square] * 4, square[..., 0], torch.ones_like(square[:, 0, :2]).mT
    fused = SimpleNamespace(fixed_embedded=lambda *_: made)
    monkeypatch.setattr(kernels, "retraction", fused, raising=False)
    lr = torch.tensor([0.5, 3.0], dtype=torch.float64)
    told = replace(points.options("svd", weight_decay=0.6), lr=lr)
    landing = geometry._retract_in_one(frame, coords, -lr, told)
    assert landing.alive.tolist() == [True, False]
    assert torch.equal(landing.point.left[1], point.left[1])
    assert not torch.equal(landing.point.left[0], point.left[0])


@pytest.mark.parametrize("retraction", ["svd", "orthographic"])
@pytest.mark.parametrize("decay_to", [0.0, 0.5])
def test_a_rate_on_the_device_that_is_too_large_for_its_decay(
    decay_to: float, retraction: str
) -> None:
    """The host does not see it, and 1 − ηλ < 0 would turn the sign of the product."""
    a, b = (nn.Parameter(torch.randn(n, 3)) for n in (9, 7))
    before = [p.detach().clone() for p in (a, b)]
    optimizer = RiemannianSGD(
        Grid(a, b), torch.tensor(5.0), geometry="fixed-embedded", retraction=retraction,
        weight_decay=0.5, decay_to=decay_to,
    )  # fmt: skip
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    optimizer.step()
    assert optimizer.counts() == {"grid0[0]": {"skipped": 1}}
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
