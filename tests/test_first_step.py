"""The one look at values before a first step: orthonormal? of full rank? gradients consistent?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankfold import Factor, Grid, RiemannianSGD, attention_grids, checks
from rankfold.checks import warn_if_inconsistent

from .reference import FIXED, GEOMETRIES, ISOMETRIES
from .toys import Toy, orthonormal, saying, unchanged


@pytest.mark.parametrize("geometry", ISOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_factors_that_are_not_orthonormal(dtype: torch.dtype, geometry: str) -> None:
    """At construction, and on the first step if they stopped being so in between."""
    words = ("'heads[1]'", "left factors", "not orthonormal", "= 0.21 ", "orthonormalize_")
    model = Toy(dtype)
    optimizer = RiemannianSGD(model.grids(), 0.1, geometry=geometry, momentum=0.5)
    with torch.no_grad():
        model.q[4:6].mul_(1.1)  # third query, so second member; 1.1² − 1 = 0.21
    expected = saying(*words) if dtype != torch.bfloat16 else saying(*words[:3], words[4])
    with unchanged(model.parameters()), pytest.raises(ValueError, match=expected):
        RiemannianSGD(model.grids(), 0.1, geometry=geometry)
    other = RiemannianSGD([Toy().pair()], 0.1, geometry=geometry)
    with unchanged(model.parameters(), other), pytest.raises(ValueError, match=expected):
        other.add_param_group({"grids": [model.heads()]})
    model.loss(0).backward()
    for _ in range(2):
        with unchanged(model.parameters(), optimizer), pytest.raises(ValueError, match=expected):
            optimizer.step()


def test_how_far_from_orthonormal_is_too_far() -> None:
    for dtype, near, far in ((torch.float32, 4e-4, 7e-4), (torch.bfloat16, 0.004, 0.02)):
        for stretch, fine in ((near, True), (far, False)):
            model = Toy(dtype)
            with torch.no_grad():
                model.b.mul_(1 + stretch)
            if fine:
                RiemannianSGD(model.grids(), 0.1, geometry="isometry-quotient")
            else:
                with pytest.raises(ValueError, match=saying("'pair[0]'", "right factors")):
                    RiemannianSGD(model.grids(), 0.1, geometry="isometry-quotient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", FIXED)
def test_rank_deficient_factor(geometry: str, dtype: torch.dtype) -> None:
    """Zero, with a column twice, or with one that depends on the others, on the first step."""
    for seed in range(10):
        for spoil in range(3):
            generator = torch.Generator().manual_seed(seed)
            a, b = (nn.Parameter(torch.randn(n, 3, generator=generator).to(dtype)) for n in (7, 5))
            good = Toy(dtype)
            with torch.no_grad():
                b.mul_(0 if spoil == 0 else 1)
                b[:, 2] = b[:, 1] if spoil == 1 else b[:, 1] * 2
            groups = [{"grids": good.grids()}, {"grids": [Grid(a, b, name="w")]}]
            optimizer = RiemannianSGD(groups, 0.1, geometry=geometry, momentum=0.5)
            (good.loss(0) + (a @ b.mT).square().sum() + a.sum()).backward()
            words = saying(
                "'w[0]'", "right factor 0", "full column rank 3", "full_rank_start_", "damping"
            )
            params = [a, b, *good.parameters()]
            with unchanged(params, optimizer), pytest.raises(ValueError, match=words):
                optimizer.step()


def linear_pair(axis: int, dtype: torch.dtype) -> tuple[RiemannianSGD, Tensor]:
    """Two square weights whose loss is one of the product along axis 1 alone."""
    generator = torch.Generator().manual_seed(0)
    a, b = (nn.Parameter(orthonormal(8, 8, generator).to(dtype)) for _ in range(2))
    target = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    good = Toy(dtype)
    wrong = Grid(Factor(a, axis=axis), Factor(b, axis=axis), name="square")
    optimizer = RiemannianSGD([*good.grids(), wrong], 0.1, geometry="fixed-quotient")
    product = a.double() @ b.double().mT
    return optimizer, good.loss(0) + (product - target).square().sum()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_axis_is_warned_of_once(dtype: torch.dtype, geometry: str) -> None:
    optimizer, loss = linear_pair(0, dtype)
    optimizer.param_groups[0]["geometry"] = geometry
    loss.backward()
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.warns(UserWarning, match=saying("gradients of square[0]", "axis=")) as caught:
        optimizer.step()
    (warning,) = caught
    assert "pair" not in str(warning.message)
    assert warning.filename == __file__  # the line that called step
    assert not torch.equal(before[-1], optimizer.param_groups[0]["params"][-1])  # only a warning
    optimizer.step()


def test_code_without_a_name_is_warned_too() -> None:
    """What exec runs in a namespace of its own."""
    optimizer, loss = linear_pair(0, torch.float32)
    loss.backward()
    with pytest.warns(UserWarning, match="inconsistent"):
        exec("step()", {"step": optimizer.step})


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_right_axis_is_not(dtype: torch.dtype, geometry: str) -> None:
    optimizer, loss = linear_pair(1, dtype)
    optimizer.param_groups[0]["geometry"] = geometry
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_is_attention(dtype: torch.dtype, low: torch.dtype | None) -> None:
    """Rounding alone makes the gradients of a real layer disagree, and nobody is told of that."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(32, 4, batch_first=True, dtype=dtype)
        x = torch.randn(4, 16, 32, dtype=dtype)
    optimizer = RiemannianSGD(attention_grids(layer), 0.01, geometry="fixed-quotient")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
            y, _ = layer(x, x, x, need_weights=False)
        (y.float() - x.float()).square().mean().backward()
        optimizer.step()
        # A fresh optimizer looks again.
        optimizer = RiemannianSGD(attention_grids(layer), 0.01, geometry="fixed-quotient")


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nor_are_overlaps_of_nothing_but_rounding(dtype: torch.dtype, geometry: str) -> None:
    """A gradient orthogonal to both factors: AᵀG_A and G_BᵀB are zero, but for rounding."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        wide = [orthonormal(n, 3, generator) for n in (32, 24)]
        a, b = (nn.Parameter(x.to(dtype)) for x in wide)
        target = torch.randn(32, 24, generator=generator, dtype=torch.float64)
        target -= wide[0] @ (wide[0].mT @ target @ wide[1]) @ wide[1].mT
        optimizer = RiemannianSGD([Grid(a, b)], 0.01, geometry=geometry)
        (a.double() @ b.double().mT * target).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_isometries_need_only_the_skew_parts_to_agree(geometry: str) -> None:
    """Weight decay on one factor is no loss of the product, unless the factor has no length."""
    model = Toy()
    optimizer = RiemannianSGD([model.pair()], 0.01, geometry=geometry)
    (model.loss(0) + 10 * model.a.square().sum()).backward()
    if geometry in ISOMETRIES:
        optimizer.step()
    else:
        with pytest.warns(UserWarning, match=saying("pair[0]", "inconsistent")):
            optimizer.step()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_gradients_that_say_nothing_are_waited_for(value: float) -> None:
    """As of heads behind an output that starts at zero, or of a loss scaled too far."""
    optimizer, loss = linear_pair(0, torch.float32)
    loss.backward()
    params = optimizer.param_groups[0]["params"]
    grads = [p.grad.clone() for p in params]
    for _ in range(3):
        for p in params:
            p.grad.fill_(value)
        optimizer.step()  # warnings are errors here
    for p, grad in zip(params, grads, strict=True):
        p.grad.copy_(grad)
    with pytest.warns(UserWarning, match="inconsistent"):
        optimizer.step()
    optimizer.step()


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at values waits for the device, so that a member without gradients is let be."""
    looks = 0

    def look(*args: Any) -> list[bool]:
        nonlocal looks
        looks += 1
        return warn_if_inconsistent(*args)

    monkeypatch.setattr(checks, "warn_if_inconsistent", look)
    optimizer, loss = linear_pair(0, torch.float32)
    loss.backward()
    for p in optimizer.param_groups[0]["params"]:
        p.grad.zero_()
    for _ in range(20):
        optimizer.step()
    assert looks == 10 * len({"pair", "heads", "square"})


def heads(groups: int, dtype: torch.dtype, lefts: int = 4, rights: int = 4) -> RiemannianSGD:
    """Heads that go by themselves, as one grid of so many groups, with gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        nn.Parameter(torch.cat([orthonormal(9, 3, generator).mT for _ in range(n)]).to(dtype))
        for n in (lefts, rights)
    )
    grid = Grid(
        Factor(q, axis=0, blocks=lefts), Factor(k, axis=0, blocks=rights), groups=groups, name="qk"
    )
    queries, keys = q.view(lefts, 3, 9).mT.double(), k.view(rights, 3, 9).mT.double()
    products = queries @ keys.mT.repeat_interleave(lefts // rights, 0)
    target = torch.randn(products.shape, generator=generator, dtype=torch.float64)
    (products - target).square().sum().backward()
    return RiemannianSGD([grid], 0.01, geometry="fixed-quotient")


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forgotten_groups_are_warned_of(dtype: torch.dtype, geometry: str) -> None:
    for lefts, rights, given, times in ((4, 4, 1, 4), (4, 4, 2, 2), (4, 2, 1, 2), (6, 6, 1, 6)):
        optimizer = heads(given, dtype, lefts, rights)
        optimizer.param_groups[0]["geometry"] = geometry
        words = ("qk[0]", f"{times} products apart", f"groups= were {times} times")
        with pytest.warns(UserWarning, match=saying(*words)):
            optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_groups_and_true_grids_are_not(dtype: torch.dtype, geometry: str) -> None:
    for lefts, rights in ((4, 4), (4, 2)):
        optimizer = heads(rights, dtype, lefts, rights)
        optimizer.param_groups[0]["geometry"] = geometry
        optimizer.step()
    generator = torch.Generator().manual_seed(1)
    a, b = (
        [nn.Parameter(orthonormal(9, 3, generator).to(dtype)) for _ in range(count)]
        for count in (4, 2)
    )
    products = torch.stack(tuple(a)).double() @ torch.cat(tuple(b)).double().mT
    target = torch.randn(products.shape, generator=generator, dtype=torch.float64)
    (products - target).square().sum().backward()
    RiemannianSGD([Grid(a, b)], 0.01, geometry=geometry).step()


def test_parameters_put_in_the_place_of_a_grids_own() -> None:
    """As FSDP2 does through Accelerate: the grids would be stepped on and the model would not."""
    model = Toy()
    optimizer = RiemannianSGD(model.grids(), 0.1, geometry="fixed-quotient")
    others = [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"] = others
    for p in others:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=saying("grid 'pair'", "has replaced them", "FSDP2")):
        optimizer.step()


def test_parameters_of_another_shape() -> None:
    """As FSDP leaves them where it flattens them in place."""
    model = Toy()
    optimizer = RiemannianSGD(model.grids(), 0.1, geometry="fixed-quotient")
    model.loss(0).backward()
    model.q.grad = None
    model.q.data = model.q.data.flatten()
    words = ("grid 'heads'", "left[0]", "(8, 6)", "(48,)", "FSDP")
    with pytest.raises(RuntimeError, match=saying(*words)):
        optimizer.step()
