"""AdamW in one pass, against torch's own in float64 and in the passes it stands in for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from rankfold import kernels
from rankfold.lab.optimizers import WideAdamW

from .interpreted import CUDA, DEVICE, in_kernels, on_the_host, rounded, run_in_interpreter

pytest.importorskip("triton")

EPS = torch.finfo(torch.float32).eps
# Below a block, across blocks, and not a multiple of anything.
SHAPES = [(5,), (33, 7), (257, 32), (4099,)]
SIZES = [1.0, 0.0, 0.01, 0.0]  # of weights at first: those of 0 are the sum of their steps
RATES = [1e-3, 2e-3, 1.5e-3, 1e-4, 3e-2, 1e-3]
NUMBERS = ("exp_avg", "exp_avg_sq")
# Roundings between one pass and the passes. On a GPU these are torch's fused kernel, which takes
# 1 − 0.999 of float32 numbers, 108 roundings less than 0.001.
_TOO_SMALL = 1 - (1 - float(torch.tensor(0.999))) / 0.001
APART = 8 + (_TOO_SMALL / EPS if CUDA else 0)


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "enabled", True)
    if not CUDA:  # what a GPU has to have, Triton's interpreter does without
        monkeypatch.setattr(kernels, "available", lambda device: kernels.enabled)


def randn(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    drawn = [randn(s, k) * SIZES[k] for k, s in enumerate(SHAPES)]
    return [torch.nn.Parameter(x.to(dtype)) for x in drawn]


def gradients(step: int) -> list[Tensor]:
    """Of sizes from one to a thousandth, and some of them zero."""
    drawn = [randn(s, 100 * step + k) * 10.0 ** -(k % 4) for k, s in enumerate(SHAPES)]
    for gradient in drawn:
        gradient[::3] = 0
    return drawn


def ours(
    decay: float = 0.1, *, capturable: bool = False, momentum: float = 0.0, one_pass: bool = True
) -> WideAdamW:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "enabled", one_pass)
        made = WideAdamW(weights(), 1.0, decay, True, capturable, momentum)
    assert made.one_pass == one_pass
    return made


def take(optimizer: WideAdamW, step: int) -> None:
    optimizer.set_lr(RATES[step % len(RATES)])
    for param, gradient in zip(optimizer.params, gradients(step), strict=True):
        param.grad = gradient
    optimizer.step()


def states(optimizer: WideAdamW) -> Iterator[dict[str, Tensor]]:
    return (optimizer.inner.state[wide] for wide in optimizer.wide)


def close(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """To a few roundings of the largest number."""
    off = (found.double() - expected.double()).abs()
    return bool((off <= rounding * EPS * expected.abs().max()).all())


@in_kernels
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_is_adamw(decay: float, momentum: float, capturable: bool) -> None:
    one = ours(decay, capturable=capturable, momentum=momentum)
    passes = ours(decay, momentum=momentum, one_pass=False)
    exact = weights(torch.float64)
    reference = torch.optim.AdamW(
        exact, 1.0, betas=(momentum or 0.9, 0.999), weight_decay=decay, foreach=False
    )
    for step, rate in enumerate(RATES):
        take(one, step)
        take(passes, step)
        reference.param_groups[0]["lr"] = rate
        for param, gradient in zip(exact, gradients(step), strict=True):
            param.grad = gradient.double()
        reference.step()
    for k, (state, theirs) in enumerate(zip(states(one), states(passes), strict=True)):
        assert close(one.wide[k], exact[k], 8)
        assert close(one.wide[k], passes.wide[k], APART)
        for name in NUMBERS:
            assert close(state[name], reference.state[exact[k]][name], 8)
            assert close(state[name], theirs[name], APART)
        assert torch.equal(state["step"], theirs["step"])
        assert torch.equal(one.params[k], rounded(one.wide[k], torch.bfloat16))


@in_kernels
def test_rounding_does_not_add_up() -> None:
    """Factors near 1, as 0.999, would be rounded at each of these steps, and all one way."""
    lr, decay, steps = 1e-3, 0.1, 200
    weight = torch.nn.Parameter(randn((4096,), 0))
    optimizer = WideAdamW([weight], lr, decay, masters=True)
    assert optimizer.one_pass
    decayed = optimizer.wide[0][::2].double() * (1 - lr * decay) ** steps
    square = torch.zeros(4096, dtype=torch.float64, device=DEVICE)
    for step in range(steps):
        weight.grad = randn((4096,), step)
        weight.grad[::2] = 0
        optimizer.step()
        square += 0.001 * (weight.grad.double() ** 2 - square)
    (state,) = states(optimizer)
    for found, exact in (
        (state["exp_avg_sq"][1::2], square[1::2]),
        (optimizer.wide[0][::2], decayed),
    ):
        assert abs(float((found / exact - 1).mean())) < EPS


@in_kernels
@pytest.mark.parametrize("one_pass", [False, True])
def test_checkpoints_of_either_form(one_pass: bool) -> None:
    """Those of the passes load into one pass, and those of one pass into passes."""
    whole = ours(one_pass=one_pass)
    for step in range(3):
        take(whole, step)
    kept = deepcopy(whole.state_dict())
    resumed = ours(one_pass=not one_pass)
    resumed.load_state_dict(kept)
    with torch.no_grad():
        for param, there in zip(resumed.params, whole.params, strict=True):
            param.copy_(there)
    for step in range(3, 6):
        take(whole, step)
        take(resumed, step)
    for mine, theirs in zip(resumed.wide, whole.wide, strict=True):
        assert close(mine, theirs, APART)
    for state, expected in zip(states(resumed), states(whole), strict=True):
        assert list(state) == list(expected)
        assert torch.equal(state["step"], expected["step"])
        assert all(state[name].dtype == expected[name].dtype for name in state)


@in_kernels
def test_weights_without_gradients_stay() -> None:
    optimizer = ours()
    still, *others = optimizer.params
    before = still.detach().clone()
    take(optimizer, 0)
    optimizer.params[0].grad = None
    moved, kept = still.detach().clone(), optimizer.wide[0].clone()
    optimizer.step()
    assert torch.equal(still, moved)
    assert not torch.equal(still, before)
    assert torch.equal(optimizer.wide[0], kept)
    assert [float(state["step"]) for state in states(optimizer)] == [1.0] + [2.0] * len(others)
    for param in others:
        param.grad = None
    optimizer.step()


@in_kernels
def test_gradients_of_another_layout() -> None:
    turned, straight = ours(), ours()
    gradient = randn((7, 33), 1).mT
    for optimizer, given in ((turned, gradient), (straight, gradient.contiguous())):
        optimizer.params[1].grad = given
        optimizer.step()
    assert torch.equal(turned.params[1], straight.params[1])


@in_kernels
def test_what_goes_as_it_did() -> None:
    """Weights in float32, steps that begin at rounded weights, and weights that have gaps."""
    assert not WideAdamW(weights(torch.float32), 1.0, 0.0, masters=True).one_pass
    assert not WideAdamW(weights(), 1.0, 0.0, masters=False).one_pass
    gaps = torch.nn.Parameter(randn((8, 6), 0)[:, ::2])
    assert not WideAdamW([gaps], 1.0, 0.0, masters=True).one_pass


@pytest.mark.skipif(CUDA, reason="a GPU takes one pass")
def test_a_cpu_goes_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not WideAdamW(weights(), 1.0, 0.0, masters=True).one_pass
