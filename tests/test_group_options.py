"""Options of parameter groups that are misspelt, or written into them later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rankfold import Grid, RiemannianSGD, orthonormalize_
from rankfold.geometries import geometry_for
from rankfold.groups import Rate, step_options

from .heads import Heads

LATER: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"normalize": "frobenius"}, "normalize must be"),
    "range": ({"momentum": 1.5}, r"momentum must be in \[0, 1\)"),
    "together": ({"tilt": 0.25}, "tilt is of whitened steps"),
    "geometry": ({"geometry": "fixed"}, "unknown geometry 'fixed'"),
    "retraction": ({"retraction": "qr"}, "fixed-quotient has no retraction 'qr'"),
    "kind": ({"growth": "half"}, "growth must be a number"),
}


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("loaded", [False, True])
def test_options_written_later_are_checked(case: str, loaded: bool) -> None:
    later, message = LATER[case]
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.1, geometry="fixed-quotient", momentum=0.5)
    model.backward()
    optimizer.step()
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0].update(later)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # nor does asking again help
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_geometry_set_later_looks_at_the_factors() -> None:
    a, b = (nn.Parameter(torch.randn(m, 2)) for m in (5, 4))
    optimizer = RiemannianSGD(Grid(a, b), 0.1, geometry="fixed-quotient")
    for p in (a, b):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.param_groups[0]["geometry"] = "isometry-quotient"
    with pytest.raises(ValueError, match="orthonormal"):
        optimizer.step()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("option", "first", "then"),
    [
        ("geometry", "fixed-quotient", "fixed-embedded"),
        ("geometry", "isometry-embedded", "isometry-quotient"),
        ("momentum_form", "smoothing", "heavy-ball"),
        ("momentum_form", "heavy-ball", "unit-smoothing"),
        ("momentum_form", "smoothing", "unit-smoothing"),
    ],
)
def test_momentum_that_lost_its_meaning_is_forgotten(
    option: str, first: str, then: str, loaded: bool
) -> None:
    """Of other coordinates or units, or of steps where it is of gradients; after loading too."""
    model, other = Heads(torch.float64), Heads(torch.float64)
    common: dict[str, Any] = {"geometry": "fixed-quotient", "momentum": 0.5}
    common["bias_correction"] = option == "geometry"
    optimizer = RiemannianSGD([model.grid()], 0.01, **{**common, option: first})
    model.run(optimizer, 3)
    other.load_state_dict(model.state_dict())
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0][option] = then
    model.run(optimizer, 2)
    other.run(RiemannianSGD([other.grid()], 0.01, **{**common, option: then}), 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_learned_scale_is_not_thrown_away() -> None:
    model = Heads(torch.float64)
    orthonormalize_([model.grid()])
    with torch.no_grad():
        model.a.mul_(4)
    optimizer = RiemannianSGD([model.grid()], 0.01, geometry="isometry-quotient", scale_lr=0.1)
    model.run(optimizer, 2)
    optimizer.param_groups[0]["scale_lr"] = None
    with pytest.raises(ValueError, match="orthonormal"):
        model.run(optimizer, 1)


def test_what_one_group_is_refused_does_not_pass_for_another() -> None:
    """The first group's new geometry is still new once the second one's option is mended."""
    models = [Heads(torch.float64, seed=seed) for seed in (0, 1)]
    groups = [{"grids": [Grid(model.a, model.b, groups=4)]} for model in models]
    optimizer = RiemannianSGD(groups, 0.01, geometry="fixed-quotient", momentum=0.5)
    for model in models:
        model.backward()
    optimizer.step()
    first, second = optimizer.param_groups
    first["geometry"], second["momentum"] = "fixed-embedded", 2.0
    with pytest.raises(ValueError, match="momentum must be"):
        optimizer.step()
    second["momentum"] = 0.5
    for model in models:
        model.zero_grad(set_to_none=False)
    before = models[0].a.detach().clone()
    optimizer.step()  # no gradient, and no momentum any more
    torch.testing.assert_close(models[0].a.detach(), before, rtol=0, atol=1e-13)


def test_a_schedule_of_momentum_goes_on() -> None:
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.1, geometry="fixed-quotient", momentum=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    momenta = set()
    for _ in range(6):
        model.backward()
        optimizer.step()
        momenta.add(optimizer.param_groups[0]["momentum"])
        schedule.step()
    assert len(momenta) > 3


def test_a_misspelt_option_of_a_group() -> None:
    grid = Heads().grid()
    for name, meant in (("momentun", "momentum"), ("normalise", "normalize")):
        with pytest.raises(ValueError, match=f"no option '{name}'; did you mean '{meant}'"):
            RiemannianSGD([{"grids": [grid], name: 0.5}], 0.1, geometry="fixed-quotient")
    kept = RiemannianSGD([{"grids": [grid], "max_momentum": 1}], 0.1, geometry="fixed-quotient")
    assert kept.param_groups[0]["max_momentum"] == 1


@pytest.mark.parametrize("kind", [np.float32, torch.tensor])
def test_numbers_of_any_kind_reach_a_step_as_floats(kind: Any) -> None:
    """Kernels take a tensor for an address, and numbers of NumPy for nothing they know."""
    told = {"norm_floor": kind(0.5), "growth": kind(0.5), "row_balance": kind(0.5)}
    optimizer = RiemannianSGD(
        Heads().grid(), 0.1, geometry="fixed-quotient", normalize="whitened", **told
    )
    (group,) = optimizer.param_groups
    options = step_options(group, Rate(0.1), geometry_for("fixed-quotient", 1, 1), 1.0)
    for name in told:
        assert type(getattr(options, name)) is float
        assert getattr(options, name) == 0.5
