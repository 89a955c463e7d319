"""Products of float32 matrices by bfloat16 ones: the form that kernels take on a GPU.

In the interpreter, too, where kernels otherwise multiply float32 as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .interpreted import CUDA, DEVICE, in_kernels, on_the_host, quiet, run_in_interpreter

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")

from rankfold.kernels import products as made_of  # noqa: E402  (it imports Triton)
from rankfold.kernels.refine import tile  # noqa: E402

EPS = torch.finfo(torch.float32).eps
R = 32
pytestmark = quiet


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


@triton.jit  # type: ignore[untyped-decorator]
def _products_kernel(x_ptr, y_ptr, dot_ptr, rough_ptr, overlap_ptr, gram_ptr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    place, _, _ = tile(R, R)
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    tl.store(dot_ptr + place, made_of.dot(x, y, "bf16x6"))
    tl.store(rough_ptr + place, made_of.rough(x, y, "bf16x6"))
    tl.store(overlap_ptr + place, made_of.overlap(x, y, "bf16x6"))
    half = made_of.half_gram(x, "bf16x6")
    tl.store(gram_ptr + place, half + tl.trans(half))


@triton.jit  # type: ignore[untyped-decorator]
def _parts_kernel(x_ptr, out_ptr, count, R: tl.constexpr):  # type: ignore[no-untyped-def]
    place, _, _ = tile(R, R)
    x = tl.load(x_ptr + place)
    first, second, third = made_of._split(x)
    tl.store(out_ptr + place, first.to(tl.float32))
    tl.store(out_ptr + count + place, second.to(tl.float32))
    tl.store(out_ptr + 2 * count + place, third.to(tl.float32))
    first, second = made_of._halve(x)
    tl.store(out_ptr + 3 * count + place, first.to(tl.float32))
    tl.store(out_ptr + 4 * count + place, second.to(tl.float32))


def random(seed: int, spread: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, R, R, generator=generator)
    return (x * torch.exp(spread * torch.randn(2, R, R, generator=generator))).to(DEVICE)


def parts(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Three that are the number, and two that nearly are."""
    made = x.new_empty(5, *x.shape)
    _parts_kernel[(len(x),)](x, made, x.numel(), R=R)
    return list(made[:3]), list(made[3:])


def in_kernel(x: Tensor, y: Tensor) -> list[Tensor]:
    """x y, roughly the same, xᵀ y and xᵀ x."""
    made = [torch.empty_like(x) for _ in range(4)]
    _products_kernel[(len(x),)](x, y, *made, R=R)
    return made


def products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x y by six products and by three: of a kernel, or of its parts, as the interpreter has no
    bfloat16 to multiply.
    """
    if CUDA:
        made, rough, _, _ = in_kernel(x, y)
        return made, rough
    (x1, x2, x3), (a1, a2) = parts(x)
    (y1, y2, y3), (b1, b2) = parts(y)
    return x3 @ y1 + x2 @ y2 + x1 @ y3 + x2 @ y1 + x1 @ y2 + x1 @ y1, a2 @ b1 + a1 @ b2 + a1 @ b1


@in_kernels
@pytest.mark.parametrize("spread", [0.0, 10.0])
def test_three_parts_are_the_number(spread: float) -> None:
    x = random(1, spread)
    x[0, 0, :4] = torch.tensor([0.0, -0.0, 1 + 2**-23, -(2 - 2**-23)])
    three, two = parts(x)
    assert torch.equal(three[0].double() + three[1] + three[2], x.double())
    assert ((two[0].double() + two[1] - x.double()).abs() <= 2**-16 * x.abs()).all()
    for part in (*three, *two):
        assert torch.equal(part, part.bfloat16().float())
    assert (three[1].abs() <= 2**-7 * x.abs()).all()
    assert (three[2].abs() <= 2**-16 * x.abs()).all()


@in_kernels
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_six_products_are_as_good_as_float32(spread: float) -> None:
    x, y = random(2, spread), random(3, spread)
    six, three = products(x, y)
    exact, size = x.double() @ y.double(), x.double().abs() @ y.double().abs()

    def off(made: Tensor) -> Tensor:
        return (made.double() - exact) / size

    assert off(six).abs().max() < 2 * off(x @ y).abs().max() + EPS
    assert off(six).mean().abs() < EPS / 8  # nothing is left out to one side
    assert EPS < off(three).abs().max() < 2**-15
    assert off(three).abs().mean() < 2**-17


@pytest.mark.skipif(not CUDA, reason="the interpreter has no bfloat16 to multiply")
def test_overlaps_are_products_with_the_transpose() -> None:
    x, y = random(6), random(7)
    made = in_kernel(x, y)[2]
    exact = x.double().mT @ y.double()
    assert (made.double() - exact).abs().max() < 4 * EPS * exact.abs().max()


@in_kernels
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_four_products_make_a_gram_matrix(spread: float) -> None:
    x = random(8, spread)
    if CUDA:
        made = in_kernel(x, x)[3]
    else:
        (x1, x2, x3), _ = parts(x)
        half = x1.mT @ x3 + x1.mT @ x2 + 0.5 * (x2.mT @ x2 + x1.mT @ x1)
        made = half + half.mT
    exact, size = x.double().mT @ x.double(), x.double().abs().mT @ x.double().abs()
    off, usual = ((y.double() - exact) / size for y in (made, x.mT @ x))
    assert off.abs().max() < 2 * usual.abs().max() + EPS
    assert off.mean().abs() < EPS / 8
    assert torch.equal(made, made.mT)


@in_kernels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_ends_in_nan(bad: float) -> None:
    x, y = random(4), random(5)
    x[0, 3, 4] = bad
    for made in products(x, y):
        assert made[0, 3].isnan().all()
        assert made[0, :3].isfinite().all()
        assert made[1].isfinite().all()
