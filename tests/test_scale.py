"""A learned scale of isometries: against its definition, and as part of a normal optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD, orthonormalize_
from rankfold.checks import orthonormality_defect

from .beyond import SHAPES, Beyond
from .heads import Heads, states
from .problems import Blocks, Case, Loss, starting_factors
from .reference import ISOMETRIES
from .test_checkpoints import through_a_file
from .toys import Toy, same_bits, saying, train
from .watching import Deny, DenyReading

every_isometry = pytest.mark.parametrize("geometry", ISOMETRIES)


class Scaled:
    """The reference on U and V, and beside it a number, from dense gradients."""

    def __init__(self, reference: Beyond, scale: float, rate: float) -> None:
        self.reference, self.scale, self.rate = reference, scale, rate

    @property
    def W(self) -> Blocks:
        return [[self.scale * w for w in row] for row in self.reference.W]

    def step(self, grad: Blocks) -> None:
        u, v = self.reference.A, self.reference.B
        inner = [[self.scale * g for g in row] for row in grad]  # with respect to U_i V_jᵀ
        left = [sum(g @ b for g, b in zip(row, v, strict=True)) for row in inner]
        columns = zip(*inner, strict=True)
        right = [sum(g.T @ a for g, a in zip(column, u, strict=True)) for column in columns]

        def flat(lefts: Any, rights: Any, power: float) -> Tensor:
            parts = [len(v) ** power * x for x in lefts], [len(u) ** power * x for x in rights]
            return torch.cat([x.flatten() for part in parts for x in part])

        # In the metric of the factors, and a gradient in its dual.
        point, gradient = flat(u, v, 0.5), flat(left, right, -0.5)
        cosine = torch.cosine_similarity(point, gradient, dim=0)
        self.reference.step(inner)
        self.scale *= math.exp(-self.rate * float(cosine))


@every_isometry
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", ["metric", "spectral", None])
@pytest.mark.parametrize("scale", [0.02, 1.0, 7.0])
def test_against_the_definition(
    geometry: str, shape: str, normalize: str | None, scale: float
) -> None:
    heights, widths, rank = SHAPES[shape]
    case = Case(geometry, normalize=normalize, heights=heights, widths=widths, rank=rank)
    generator = case.generator()
    left, right = starting_factors(case, generator)
    lr = 0.03 if normalize else 0.003 / scale**2
    reference = Beyond(geometry, left, right, lr=lr, momentum=0.5, normalize=normalize)
    expected = Scaled(reference, scale, 0.1)
    loss = Loss(expected.W, rank, generator)
    # The scale is the sides' product, whoever has more of it.
    params = [
        [nn.Parameter(size * x) for x in side]
        for side, size in ((left, 2 * scale**0.5), (right, scale**0.5 / 2))
    ]
    optimizer = RiemannianSGD(
        Grid(*params), lr, geometry=geometry, momentum=0.5, normalize=normalize, scale_lr=0.1
    )
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(loss([[a @ b.T for b in params[1]] for a in params[0]]))
        optimizer.step()
        expected.step(loss.gradient(expected.W))
        for a, row in zip(params[0], expected.W, strict=True):
            for b, w in zip(params[1], row, strict=True):
                torch.testing.assert_close(
                    (a @ b.T).detach(), w, rtol=0, atol=1e-11 * max(1.0, scale)
                )
    assert abs(expected.scale / scale - 1) > 1e-3


@every_isometry
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_it_finds_the_scale_of_its_target(geometry: str, scale: float) -> None:
    start, goal = Heads(torch.float64), Heads(torch.float64, seed=1)
    target = scale * (goal.a @ goal.b.mT).detach()
    optimizer = RiemannianSGD([start.grid()], 0.1, geometry=geometry, scale_lr=0.2)
    for step in range(300):
        optimizer.zero_grad()
        (start.a @ start.b.mT - target).square().sum().backward()
        fade = 0.98 ** max(0, step - 50)
        optimizer.param_groups[0].update(lr=0.1 * fade, scale_lr=0.2 * fade)
        optimizer.step()
    values = torch.linalg.svdvals((start.a @ start.b.mT).detach())[:, :2]
    torch.testing.assert_close(values, torch.full_like(values, scale), rtol=0.02, atol=0)


@every_isometry
def test_without_a_rate_scales_stay(geometry: str) -> None:
    """And steps are those of the orthonormal factors with the gradients of the scaled products."""
    plain, scaled = Heads(torch.float64), Heads(torch.float64)
    with torch.no_grad():
        scaled.a.mul_(3)
        scaled.b.mul_(0.5)
        scaled.target.mul_(1.5)  # a quadratic loss scales with both
    runs = []
    for model, rate in ((plain, None), (scaled, 0.0)):
        optimizer = RiemannianSGD(
            [model.grid()], 0.05, geometry=geometry, momentum=0.5, scale_lr=rate
        )
        model.run(optimizer, 4)
        runs.append(optimizer)
    torch.testing.assert_close(scaled.a.detach(), 3 * plain.a.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(scaled.b.detach(), plain.b.detach() / 2, rtol=1e-12, atol=1e-13)
    momenta = [run.state[m.a]["momentum"] for run, m in zip(runs, (plain, scaled), strict=True)]
    torch.testing.assert_close(momenta[1], 1.5**2 * momenta[0], rtol=1e-11, atol=1e-12)


@every_isometry
def test_it_climbs(geometry: str) -> None:
    sizes = []
    for maximize in (False, True):
        model = Heads(torch.float64)
        with torch.no_grad():
            model.target.copy_((4 * model.a @ model.b.mT)[:, None])
        optimizer = RiemannianSGD(
            [model.grid()], 1e-6, geometry=geometry, scale_lr=0.1, maximize=maximize
        )
        model.run(optimizer, 1)
        sizes.append((model.a @ model.b.mT).square().sum().item())
    # All of the gradient is along the factors: log s moves by the whole rate.
    assert sizes[0] == pytest.approx(8 * math.exp(0.2), rel=1e-6)
    assert sizes[1] == pytest.approx(8 * math.exp(-0.2), rel=1e-6)


@every_isometry
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_continuation_is_bit_identical(geometry: str, dtype: torch.dtype) -> None:
    """Nothing but the factors knows the scale."""
    model, fresh = Toy(dtype), Toy(dtype, seed=1)
    options: dict[str, Any] = {"geometry": geometry, "momentum": 0.5, "scale_lr": 0.1}
    optimizer = RiemannianSGD(model.grids(), 0.05, **options)
    train(model, optimizer, range(3))
    loaded = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    second = RiemannianSGD(fresh.grids(), 0.5, geometry=geometry)
    fresh.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(3, 6))
    train(fresh, second, range(3, 6))
    assert same_bits(model.parameters(), fresh.parameters())
    assert optimizer.state[model.a].keys() <= {"momentum", "master"}


@every_isometry
def test_a_member_that_is_skipped_keeps_its_scale(geometry: str) -> None:
    model = Heads()
    with torch.no_grad():
        model.a.mul_(0.3)
    optimizer = RiemannianSGD([model.grid()], 0.05, geometry=geometry, momentum=0.5, scale_lr=0.1)
    model.run(optimizer, 2)
    model.backward()
    assert model.a.grad is not None
    model.a.grad[1, 0, 0] = torch.nan
    before = [x.clone() for x in states(optimizer, model)]
    optimizer.step()
    after = states(optimizer, model)
    assert all(torch.equal(x[1], y[1]) for x, y in zip(before, after, strict=True))
    assert all((x[[0, 2, 3]] != y[[0, 2, 3]]).any() for x, y in zip(before, after, strict=True))
    assert optimizer.counts() == {"w[1]": {"skipped": 1}}


@every_isometry
@pytest.mark.usefixtures("as_on_a_device")
def test_a_captured_step_is_the_step(geometry: str) -> None:
    models = Heads(), Heads()
    for model, captured in zip(models, (False, True), strict=True):
        rates: list[Any] = [0.05, 0.1]
        if captured:
            rates = [torch.tensor(rate) for rate in rates]
        optimizer = RiemannianSGD(
            [model.grid()], rates[0], geometry=geometry, scale_lr=rates[1], capturable=captured
        )
        model.run(optimizer, 4)
        model.backward()
        with Deny(), DenyReading():
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one - other).abs().max() < 1e-6


@every_isometry
def test_factors_stay_orthonormal_but_for_the_scale(geometry: str) -> None:
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.05, geometry=geometry, scale_lr=0.05)
    optimizer.record_diagnostics()
    model.run(optimizer, 500)
    for k in range(4):
        sizes = [p[k].detach().norm() / 2**0.5 for p in model.parameters()]
        for p, size in zip(model.parameters(), sizes, strict=True):
            assert orthonormality_defect(p[k] / size) < 2e-6
        numbers = optimizer.diagnostics()[f"w[{k}]"]
        assert numbers["scale"] == pytest.approx(float(sizes[0] * sizes[1]), rel=1e-6)
        assert numbers["left_orthogonality_defect"] < 2e-6


def test_what_counts_as_scaled() -> None:
    """One scale a side; blocks of different sizes, or columns, are no isometry."""
    generator = torch.Generator().manual_seed(0)
    a, b = (nn.Parameter(torch.randn(2, n, 3, generator=generator)) for n in (7, 6))
    with pytest.warns(UserWarning, match="singular values"):
        orthonormalize_(Grid(a, b))

    def build(rate: float | None) -> RiemannianSGD:
        return RiemannianSGD(Grid(a, b), 0.1, geometry="isometry-quotient", scale_lr=rate)

    build(None)
    with torch.no_grad():
        a.mul_(2)
    build(0.1)
    with pytest.raises(ValueError, match="not orthonormal, "):
        build(None)
    with torch.no_grad():
        a[0] /= 2
    with pytest.raises(ValueError, match="left factors are not orthonormal but for one common"):
        build(0.1)


def test_errors() -> None:
    def build(**options: Any) -> None:
        RiemannianSGD(Toy().grids(), **{"lr": 0.1, "geometry": "isometry-quotient", **options})

    for options, words in (
        ({"geometry": "fixed-embedded", "scale_lr": 0.1}, ("scale_lr is for isometries",)),
        ({"scale_lr": -1.0}, ("scale_lr must be finite and not negative", "-1.0")),
        ({"scale_lr": math.nan}, ("scale_lr must be finite",)),
        ({"scale_lr": torch.ones(2)}, ("tensor scale_lr must be 0-dim", "(2,)")),
        (
            {"scale_lr": 0.1, "lr": torch.tensor(0.1), "capturable": True},
            ("capturable=True needs scale_lr as a 0-dim tensor",),
        ),
        ({"weight_decay": 0.1}, ("isometry-quotient has no weight_decay", "scale_lr")),
    ):
        with pytest.raises(ValueError, match=saying(*words)):
            build(**options)
