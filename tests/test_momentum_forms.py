"""All forms of momentum, against the dense reference and alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD

from .beyond import SHAPES, check
from .heads import Heads
from .problems import Case
from .reference import GEOMETRIES
from .toys import Toy, train
from .watching import Deny, DenyReading

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_shape = pytest.mark.parametrize("shape", SHAPES)
FORMS: dict[str, dict[str, Any]] = {
    "heavy": {"momentum_form": "heavy-ball"},
    "heavy, ahead": {"momentum_form": "heavy-ball", "nesterov": True},
    "heavy, second": {"momentum_form": "heavy-ball", "second_moment": 0.75},
    "unit": {"momentum_form": "unit-smoothing"},
    "unit, ahead": {"momentum_form": "unit-smoothing", "nesterov": True},
    "second": {"second_moment": 0.75},
    "adam": {"second_moment": 0.75, "bias_correction": True},
    "nadam": {"second_moment": 0.75, "bias_correction": True, "nesterov": True},
}
every_form = pytest.mark.parametrize("form", FORMS)


def case(geometry: str, shape: str, **options: Any) -> Case:
    heights, widths, rank = SHAPES[shape]
    return Case(geometry, heights=heights, widths=widths, rank=rank, **options)


@every_geometry
@every_shape
@every_form
@pytest.mark.parametrize("normalize", ["metric", "spectral"])
def test_forms(geometry: str, shape: str, form: str, normalize: str) -> None:
    check(case(geometry, shape, momentum=0.5, normalize=normalize), **FORMS[form])


@every_geometry
@every_form
def test_forms_in_float32(geometry: str, form: str) -> None:
    check(case(geometry, "ragged", momentum=0.875), torch.float32, **FORMS[form])


@every_geometry
@pytest.mark.parametrize("shape", ["1x1", "ragged"])
def test_without_a_norm(geometry: str, shape: str) -> None:
    chosen = case(geometry, shape, momentum=0.5, normalize=None)
    check(chosen, momentum_form="heavy-ball")
    check(chosen, bias_correction=True)
    check(chosen, bias_correction=True, nesterov=True)
    for corrected, ahead in ((False, False), (True, False), (True, True)):
        for each in (chosen, replace(chosen, normalize="metric")):
            check(
                each,
                momentum_form="unit-smoothing",
                bias_correction=corrected,
                nesterov=ahead,
            )


@every_geometry
def test_without_momentum(geometry: str) -> None:
    check(case(geometry, "ragged", momentum=0.0), second_moment=0.75)


@pytest.mark.parametrize("geometry", ["fixed-embedded", "fixed-quotient"])
@every_form
@pytest.mark.parametrize("target", [0.0, 0.5])
def test_with_weight_decay(geometry: str, form: str, target: float) -> None:
    chosen = case(geometry, "ragged", momentum=0.5)
    check(chosen, shrink=0.05, decay_to=target, **FORMS[form])


# Heavy balls -------------------------------------------------------------------------------------


def toy(options: dict[str, Any], steps: int = 3, dtype: torch.dtype = torch.float64) -> Toy:
    model = Toy(dtype)
    lr = options.pop("lr", 0.05)
    train(model, RiemannianSGD(model.grids(), lr, **options), range(steps))
    return model


@every_geometry
def test_the_buffer_is_the_step_that_was_taken(geometry: str) -> None:
    """Also where the trust region has cut it: to first order it is the way of the product."""
    limited = geometry in ("fixed-embedded", "fixed-quotient", "isometry-embedded")
    for trust in (None, 1e-4):
        model = Toy(torch.float64)
        lr = 1e-4 if trust is None else 0.5
        optimizer = RiemannianSGD(
            [model.pair()],
            lr,
            geometry=geometry,
            momentum=0.9,
            momentum_form="heavy-ball",
            trust_region=trust,
        )
        for step in range(3):
            before = model.products()[0].detach()
            train(model, optimizer, [step])
        if trust is not None and not limited:
            assert optimizer.counts() == {}
            continue
        assert bool(optimizer.counts()) == (trust is not None)
        moved = model.products()[0].detach() - before
        held = [optimizer.state[p]["momentum"] for p in (model.a, model.b)]
        if "embedded" in geometry:  # kept as (M B, Mᵀ A)
            torch.testing.assert_close(held[0], moved @ model.b, rtol=0, atol=1e-3 * moved.norm())
            torch.testing.assert_close(
                held[1], moved.mT @ model.a, rtol=0, atol=1e-3 * moved.norm()
            )
        else:
            kept = held[0] @ model.b.mT + model.a @ held[1].mT
            torch.testing.assert_close(kept, moved, rtol=0, atol=1e-3 * moved.norm())


@every_geometry
def test_a_heavy_ball_without_a_norm_is_smoothing_by_another_name(geometry: str) -> None:
    """At a constant learning rate η, smoothing's is η / (1 − ν)."""
    common: dict[str, Any] = {"geometry": geometry, "momentum": 0.75, "normalize": None}
    heavy = toy({**common, "momentum_form": "heavy-ball", "lr": 0.01})
    smooth = toy({**common, "lr": 0.04})
    for one, other in zip(heavy.parameters(), smooth.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("geometry", "lefts"), [(g, n) for g in GEOMETRIES for n in (1, 2)], ids=str
)
def test_a_heavy_ball_on_steepest_directions(geometry: str, lefts: int) -> None:
    """The first step is that without momentum; the next one, without a gradient, ν times it."""
    start, plain, heavy = (Heads(torch.float64, lefts=lefts) for _ in range(3))
    common: dict[str, Any] = {"geometry": geometry, "normalize": "schatten-inf"}
    plain.run(RiemannianSGD([plain.grid()], 1e-5, **common), 1)
    optimizer = RiemannianSGD(
        [heavy.grid()], 1e-5, momentum=0.5, momentum_form="heavy-ball", **common
    )
    heavy.run(optimizer, 1)

    def products(model: Heads) -> Tensor:
        return model.a.detach().view(4, lefts, 7, 2) @ model.b.detach().mT[:, None]

    first = products(heavy) - products(start)
    torch.testing.assert_close(products(plain) - products(start), first, rtol=0, atol=1e-12)
    before = products(heavy)
    heavy.zero_grad(set_to_none=False)
    optimizer.step()
    second = products(heavy) - before
    torch.testing.assert_close(second, first / 2, rtol=0, atol=1e-4 * first.abs().max().item())


# Unit gradients ----------------------------------------------------------------------------------


@every_geometry
@pytest.mark.parametrize("normalize", ["metric", "whitened", None])
def test_how_long_gradients_are_makes_no_difference(geometry: str, normalize: str | None) -> None:
    """Each by another factor: a mean of the gradients themselves would be that of the longest."""
    models = []
    for factors in ((1, 1, 1), (8, 2**-6, 2**10)):
        model = Heads(torch.float64)
        optimizer = RiemannianSGD(
            [model.grid()],
            0.01,
            geometry=geometry,
            momentum=0.75,
            momentum_form="unit-smoothing",
            nesterov=True,
            normalize=normalize,
        )
        for factor in factors:
            model.backward(factor)
            optimizer.step()
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@every_geometry
def test_a_gradient_of_zero_stays_one(geometry: str) -> None:
    model = Heads(torch.float64)
    optimizer = RiemannianSGD(
        [model.grid()], 0.01, geometry=geometry, momentum=0.5, momentum_form="unit-smoothing"
    )
    model.backward(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert optimizer.counts() == {}
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=1e-14)


# Steps -------------------------------------------------------------------------------------------


@every_geometry
def test_the_first_corrected_step_is_a_gradient_step(geometry: str) -> None:
    common: dict[str, Any] = {"geometry": geometry, "normalize": None, "lr": 0.01}
    plain = toy(dict(common), steps=1)
    corrected = toy({**common, "momentum": 0.875, "bias_correction": True}, steps=1)
    for one, other in zip(plain.parameters(), corrected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@every_geometry
def test_diagnostics_see_the_step_that_was_made(geometry: str, momentum: float) -> None:
    """One of constant gradient norms: the mean norm is the norm, and the step of length lr."""
    for options in FORMS.values():
        if not momentum and (options.get("momentum_form") or options.get("bias_correction")):
            continue
        model = Toy(torch.float64)
        optimizer = RiemannianSGD(
            [model.pair()], 1e-3, geometry=geometry, **{"momentum": momentum, **options}
        )
        optimizer.record_diagnostics()
        train(model, optimizer, [0])
        numbers = optimizer.diagnostics()["pair[0]"]
        start = Toy(torch.float64).products()[0]
        moved = (model.products()[0] - start).norm().item()
        ahead = 1 + momentum if options.get("nesterov") else 1.0
        heavy, unit = (options.get("momentum_form") == f for f in ("heavy-ball", "unit-smoothing"))
        smoothed = not (heavy or unit or "bias_correction" in options)
        expected = 1e-3 * (1 - momentum if smoothed else ahead if heavy else 1)
        assert numbers["step_metric_norm"] == pytest.approx(expected, rel=1e-9)
        if "embedded" in geometry:
            assert moved == pytest.approx(expected, rel=1e-2)


DECAYS: list[dict[str, float]] = [{"weight_decay": 0.5}, {"weight_decay": 0.5, "decay_to": 1.0}]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("geometry", "decay"),
    [(g, decay) for g in GEOMETRIES for decay in [{}, *(DECAYS if g.startswith("fixed") else [])]],
)
@every_form
def test_nothing_is_factored_or_asked_for(
    geometry: str, form: str, decay: dict[str, float]
) -> None:
    for lr in (0.05, torch.tensor(0.05)):
        model = Heads()
        optimizer = RiemannianSGD(
            [model.grid()], lr, geometry=geometry, **{"momentum": 0.5, **FORMS[form], **decay}
        )
        model.run(optimizer, 1)
        with Deny(), DenyReading():
            optimizer.step()


@pytest.mark.parametrize(
    "told",
    [
        {"bias_correction": True},
        {"momentum_form": "heavy-ball"},
        {"momentum_form": "unit-smoothing"},
        {"nesterov": True},
    ],
)
def test_a_momentum_set_to_zero_later_is_refused_where_others_need_it(told: dict[str, Any]) -> None:
    a, b = (nn.Parameter(torch.randn(m, 2)) for m in (5, 4))
    optimizer = RiemannianSGD(Grid(a, b), 0.1, geometry="fixed-quotient", momentum=0.5, **told)
    optimizer.param_groups[0]["momentum"] = 0.0
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    before = a.detach().clone()
    with pytest.raises(ValueError, match="needs a momentum above 0"):
        optimizer.step()
    assert torch.equal(a, before)
