"""Both sides of a stack in one call are both sides in two."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rankfold import kernels, tall, together, whitening
from rankfold.defaults import RECOMMENDED
from rankfold.geometries import GEOMETRIES, Pair, geometry_for
from rankfold.geometries.terms import Sides
from rankfold.together import as_one, both, empty_like_both, halves

from .interpreted import (
    CUDA,
    DEVICE,
    INTERPRETED,
    in_kernels,
    on_the_host,
    quiet,
    run_in_interpreter,
)
from .points import Case, options

plain = pytest.mark.skipif(INTERPRETED, reason="has no kernels to interpret")
M, R = 9, 3


@on_the_host
def test_in_interpreter() -> None:
    pytest.importorskip("triton")
    run_in_interpreter(__file__)


class Served:
    """In place of the kernels, as `together` sees them: always there, all other modules plain."""

    def serve(self, *tensors: Tensor) -> bool:
        return True


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "kernels", Served())


def lying(pair: Any) -> Pair:
    """A pair behind each other in memory."""
    left, right = pair
    whole = torch.empty(left.numel() + right.numel(), dtype=left.dtype, device=left.device)
    parts = whole.split([left.numel(), right.numel()])
    return Pair(*(part.view_as(x).copy_(x) for part, x in zip(parts, pair, strict=True)))


class Two(NamedTuple):
    left: Tensor
    right: Tensor


@plain
@pytest.mark.parametrize("members", [1, 4])
def test_what_lies_together_is_a_view(members: int) -> None:
    whole = torch.randn(2 * members, 5, 3)
    for x in (whole, whole.mT, whole[:, 1:4], whole[:, :, 0]):
        left, right = halves(x)
        one = as_one(left, right)
        assert torch.equal(one, x)
        assert one.data_ptr() == x.data_ptr()
        assert one.stride()[1:] == x.stride()[1:]


@plain
def test_what_lies_otherwise_is_copied() -> None:
    whole = torch.randn(6, 2, 5, 3)
    apart = [
        (whole[:3], whole[3:].clone()),
        (whole[3:], whole[:3]),  # the other way round
        (whole[:, 0], whole[:, 1]),  # in turns
        (whole[:4], whole[2:]),  # over each other
        (whole[:2], whole[4:]),  # with others in between
        (whole[:3], whole[:3]),
        (whole[:2], whole[2:4].transpose(1, 2).reshape(2, 3, 10).mT.reshape(2, 2, 5, 3)),
    ]
    for left, right in apart:
        one = as_one(left, right)
        assert torch.equal(one, torch.cat((left, right)))
        assert one.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


@plain
@pytest.mark.usefixtures("served")
def test_one_call_where_tall_ones_lie_together() -> None:
    seen: list[torch.Size] = []

    def function(x: Tensor, c: Tensor, mask: Tensor) -> Two:
        seen.append(x.shape)
        return Two(tall.choose(x @ c, x, mask), x.mT @ x)

    pair = torch.randn(4, M, R), torch.randn(4, M, R)
    small = torch.randn(4, R, R), torch.randn(4, R, R)
    masks = torch.rand(4) > 0.5, torch.rand(4) > 0.5
    expected = [function(*each) for each in zip(pair, small, masks, strict=True)]
    for given, calls in ((pair, 2), (lying(pair), 1)):
        seen.clear()
        found = both(function, given, small, masks)
        assert len(seen) == calls
        for ours, theirs in zip(found, expected, strict=True):
            assert isinstance(ours, Two)
            assert all(map(torch.equal, ours, theirs))
    seen.clear()
    uneven = lying((torch.randn(4, M, R), torch.randn(4, M + 1, R)))
    both(function, uneven, small, masks)
    assert [shape[1] for shape in seen] == [M, M + 1]


@plain
def test_two_calls_without_kernels() -> None:
    """A CPU has its own orders of memory, and nothing to gain."""
    seen: list[torch.Size] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x

    both(function, lying((torch.randn(4, M, R), torch.randn(4, M, R))))
    assert seen == [(4, M, R), (4, M, R)]


@plain
def test_room_for_results() -> None:
    left, right = empty_like_both(torch.empty(3, 2, 2), torch.empty(3, 2, 2))
    assert as_one(left, right).data_ptr() == left.data_ptr()
    left, right = empty_like_both(torch.empty(3, 2, 2), torch.empty(3, 1, 2))
    assert (left.shape, right.shape) == ((3, 2, 2), (3, 1, 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "metric": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "normalize": "whitened"},
    "heavy-ball": {"momentum": 0.9, "momentum_form": "heavy-ball"},
    "unit": {"momentum": 0.9, "momentum_form": "unit-smoothing", "normalize": "whitened"},
    "steepest": {"momentum": 0.9, "normalize": "schatten-inf"},
    "decay": {"momentum": 0.9, "weight_decay": 0.1},
}


def step(name: str, grid: tuple[int, int], how: dict[str, Any], together: bool) -> list[Tensor]:
    """Two steps, one member with a gradient that is not a number; all that came of them."""
    case = Case(name, *grid, M, M, R, seed=7)
    geometry = geometry_for(name, *grid)
    dtype = torch.float64 if DEVICE == "cpu" and not INTERPRETED else torch.float32

    def placed(pair: Pair) -> Pair:
        moved = Pair(*(x.to(DEVICE, dtype) for x in pair))
        return lying(moved) if together else Pair(*(x.clone() for x in moved))

    point = placed(Pair(*(torch.cat([x, x.flip(0)]) for x in case.point())))
    held = placed(case.random(5, batch=4)) if how["momentum"] else None
    opts = options(geometry.retractions[0], 0.05, **how)
    found = []
    for k in range(2):
        grad = placed(case.random(8 + k, batch=4))
        grad.right[2, 0, 0, 0] = torch.nan
        outcome = geometry.step(point, grad, held, opts)
        assert outcome.events["skipped"].tolist() == [False, False, True, False]
        point, held = placed(outcome.point), outcome.momentum
        held = None if held is None else placed(held)
        found += [*point, *(held or [])]
    return found


@plain
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_steps(name: str, grid: tuple[int, int], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "decay" and name.startswith("isometry"):
        pytest.skip("isometries do not decay")
    apart = step(name, grid, OPTIONS[how], together=False)
    calls: list[bool] = []
    original = together._whole

    def watched(left: Tensor, right: Tensor) -> Tensor | None:
        found = original(left, right)
        calls.append(found is not None and left.dim() > 2 and left.shape[-2] >= M)
        return found

    monkeypatch.setattr(together, "_whole", watched)
    joined = step(name, grid, OPTIONS[how], together=True)
    assert any(calls) == (grid[0] == grid[1])
    for ours, theirs in zip(joined, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@plain
@pytest.mark.parametrize("joined", [True, False])
def test_what_both_sides_share(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number a member, whether both sides go in one call or in two."""
    calls, scale = [], torch.tensor([1.0, -2.0])
    monkeypatch.setattr(together, "kernels", Served())
    sides = lying((torch.ones(2, M, R), torch.full((2, M, R), 3.0)))
    if not joined:
        sides = Pair(*(x.clone() for x in sides))

    def scaled(x: Tensor, number: Tensor) -> Tensor:
        calls.append((len(x), len(number)))
        return tall.per_member(number, x) * x

    left, right = both(scaled, sides, shared=(scale,))
    assert calls == ([(4, 2)] if joined else [(2, 2), (2, 2)])
    for found, first in ((left, 1), (right, 3)):
        assert found[0].unique().tolist() == [first]
        assert found[1].unique().tolist() == [-2 * first]


@plain
@pytest.mark.skipif(CUDA, reason="counts what plain forms do, in float64")
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["fixed-embedded", "fixed-quotient"])
def test_recommended_steps(
    name: str, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is told by member or side; roots and products over rows are in one call."""
    how = {
        **{key: RECOMMENDED[key] for key in set(RECOMMENDED) - {"lr", "geometry"}},
        "tilted": torch.tensor([True, False, True, True]),
        "sides": Sides(torch.tensor([1.0, 0.5, 1.0, 1.0]), torch.tensor([0.5, 1.0, 1.0, 0.25])),
    }
    calls: dict[str, int] = {}

    def counted(module: ModuleType, function: str) -> None:
        original = getattr(module, function)

        def counting(*args: Any, **more: Any) -> Any:
            calls[function] = calls.get(function, 0) + 1
            return original(*args, **more)

        monkeypatch.setattr(module, function, counting)

    counted(whitening, "inverse_root")
    for function in ("gram", "turned_gram", "turned_square", "overlap", "turn", "step"):
        counted(tall, function)
    results, seen = [], []
    for together_in_memory in (False, True):
        calls.clear()
        results.append(step(name, grid, how, together_in_memory))
        seen.append(dict(calls))
    apart, joined = seen
    assert joined["inverse_root"] == 2 * 4  # in each of two steps
    assert apart == {function: 2 * count for function, count in joined.items()}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@in_kernels
@quiet
@pytest.mark.parametrize("how", ["metric", "momentum", "unit"])
@pytest.mark.parametrize("grid", [(1, 1), *([(2, 2)] if CUDA else [])])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_steps_in_kernels(
    name: str, grid: tuple[int, int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    assert kernels._importable()
    if not CUDA:
        for name_of in ("serve", "serve_small"):
            monkeypatch.setattr(kernels, name_of, lambda *x: x[0].dtype == torch.float32)
        monkeypatch.setattr(tall, "can_ask", lambda x: False)
    apart, joined = (step(name, grid, OPTIONS[how], together=x) for x in (False, True))
    for ours, theirs in zip(joined, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
