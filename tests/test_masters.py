"""The float32 masters of bfloat16 and float16 weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankfold import Grid, RiemannianSGD

from .reference import GEOMETRIES
from .toys import Toy, clones, same_bits, train

LOW = (torch.bfloat16, torch.float16)


def build(model: Toy, lr: float = 0.125, **options: Any) -> RiemannianSGD:
    return RiemannianSGD(model.grids(), lr, **{"geometry": "fixed-embedded", **options})


def test_tiny_steps_accumulate() -> None:
    """Weights of ±0.75 are 2⁻⁸ apart in bfloat16; no step here moves one by half of that."""
    signs = torch.tensor([[0.75, 0.75], [0.75, -0.75]])
    target = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))

    def run(dtype: torch.dtype, forget: bool = False) -> list[nn.Parameter]:
        params = [nn.Parameter(signs.repeat(n, 1).to(dtype)) for n in (4, 3)]
        optimizer = RiemannianSGD([Grid(*params)], 2**-10, geometry="fixed-quotient")
        for _ in range(128):
            optimizer.zero_grad()
            (params[0].float() @ params[1].float().mT * target).sum().backward()
            held = [optimizer.state[p].get("master", p).detach().clone() for p in params]
            optimizer.step()
            for p, before in zip(params, held, strict=True):
                master = optimizer.state[p].get("master", p)
                assert 0 < (master - before).abs().max() < 2**-9
                if forget:  # as if the sixteen bits of the weight were all there is
                    optimizer.state[p]["master"] = p.detach().float()
        return params

    start = [signs.repeat(n, 1) for n in (4, 3)]
    full, kept = run(torch.float32), run(torch.bfloat16)
    lost = run(torch.bfloat16, forget=True)
    for x, y, z, before in zip(full, kept, lost, start, strict=True):
        assert torch.equal(z.float(), before)  # without a master, nothing has moved
        assert torch.linalg.norm(x - before) > 8 * 2**-9
        assert (y.float() - x).abs().max() < 2**-8


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_weight_is_its_rounded_master(geometry: str, dtype: torch.dtype) -> None:
    model = Toy(dtype)
    optimizer = build(model, 0.01, geometry=geometry, momentum=0.5)
    for step in range(5):
        train(model, optimizer, [step])
        for param in model.parameters():
            master = optimizer.state[param]["master"]
            assert master.dtype == torch.float32
            assert master.shape == param.shape
            assert same_bits([master.to(dtype)], [param])
            assert not torch.equal(master, param.float())


@pytest.mark.parametrize("dtype", LOW)
def test_a_written_weight_wins_over_its_master_element_by_element(dtype: torch.dtype) -> None:
    """Read off a step of length zero, which writes back what it started from."""
    model = Toy(dtype)
    optimizer = build(model, 0.05, geometry="fixed-quotient", momentum=0.5)
    train(model, optimizer, range(4))
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [4])
    kept = [optimizer.state[p]["master"] for p in model.parameters()]
    assert same_bits(kept, masters)  # untouched weights keep every hidden bit

    written = []
    with torch.no_grad():
        for param in model.parameters():
            mask = torch.zeros(param.shape, dtype=torch.bool)
            mask.view(-1)[::3] = True
            written.append(mask)
            param[mask] = param[mask] * 1.5
    values = clones(model)
    train(model, optimizer, [5])
    for param, mask, value, master in zip(
        model.parameters(), written, values, masters, strict=True
    ):
        now = optimizer.state[param]["master"]
        assert same_bits([param], [value])
        assert torch.equal(now[mask], value[mask].float())
        assert torch.equal(now[~mask], master[~mask])
        assert not torch.equal(now[~mask], value[~mask].float())


def test_weights_swapped_in_are_where_the_step_starts() -> None:
    """A moving average, or a reload, that agrees with no master anywhere."""
    model, other = Toy(torch.bfloat16), Toy(torch.bfloat16)
    optimizer = build(model)
    train(model, optimizer, range(2))
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.copy_(1.25 * p)
    model.load_state_dict(other.state_dict())
    train(model, optimizer, [7])
    train(other, build(other), [7])
    assert same_bits(model.parameters(), other.parameters())


class Waits(TorchFunctionMode):
    """Notes what makes the host wait for a value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = getattr(func, "__name__", "")
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        asks_mask = any(
            isinstance(x, Tensor) and x.dtype == torch.bool
            for x in (indices if isinstance(indices, tuple) else (indices,))
        )
        if asks_mask or name in WAITING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


WAITING = (
    *("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"),
    *("nonzero", "masked_select", "unique", "equal", "allclose", "__contains__"),
)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.usefixtures("as_on_a_device")
def test_no_step_but_the_first_waits_for_a_value(geometry: str) -> None:
    model = Toy(torch.bfloat16)
    optimizer = build(model, geometry=geometry, momentum=0.5, normalize="spectral")
    with Waits() as first:
        train(model, optimizer, [0])
    assert first.found  # the one look at values
    with torch.no_grad():
        model.a[0] *= 0.75  # a written weight is noticed on the device
    model.loss(1).backward()
    with Waits() as later:
        optimizer.step()
    assert later.found == []


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_bfloat16_run_stays_close_to_float32(geometry: str) -> None:
    low, full = Toy(torch.bfloat16), Toy(torch.float32)
    start = [w.detach() for w in full.products()]
    for model in (low, full):
        train(model, build(model, 0.05, geometry=geometry, momentum=0.875), range(20))
    for x, y, begin in zip(low.products(), full.products(), start, strict=True):
        distance = torch.linalg.vector_norm(y - begin)
        assert torch.linalg.vector_norm(x - y) < 0.05 * distance


def test_masters_are_copied_with_their_optimizer() -> None:
    for dtype in LOW:
        model = Toy(dtype)
        optimizer = build(model, geometry="isometry-embedded")
        train(model, optimizer, range(2))
        _, twin = copy.deepcopy((model, optimizer))
        for mine, copied in zip(optimizer.state.values(), twin.state.values(), strict=True):
            assert same_bits([mine["master"]], [copied["master"]])
            assert mine["master"] is not copied["master"]
