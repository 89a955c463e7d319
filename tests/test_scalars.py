"""Numbers a member: plain forms against their definitions, and kernels against plain forms."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rankfold import kernels, linalg, scalars

from .interpreted import DEVICE, INTERPRETED, in_kernels, on_the_host, quiet, run_in_interpreter

pytest.importorskip("triton")
pytestmark = quiet

INF, NAN = float("inf"), float("nan")
# More than one program of a kernel takes, and one alone.
batches = pytest.mark.parametrize("members", [1, 5, 300])


@on_the_host
def test_in_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for float32 numbers wherever they are."""
    assert kernels._importable()
    if INTERPRETED:
        monkeypatch.setattr(kernels, "serve", lambda *x: x[0].dtype == torch.float32)
        monkeypatch.setattr(kernels, "available", lambda device: True)


def draw(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5))


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda *x: False)
    monkeypatch.setattr(kernels, "available", lambda device: False)


@pytest.mark.skipif(INTERPRETED, reason="has no kernels to interpret")
def test_over_root_is_what_it_says() -> None:
    square = torch.tensor([4.0, 0.0, 1e-30, INF, NAN], dtype=torch.float64)
    scale = torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = scalars.over_root(square, 0.25, -2.0, scale)
    expected = torch.tensor([-3.0, -8.0, -8.0, NAN, NAN], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scalars.over_root(square[:1], 0.25, 5.0), expected[:1] * 0 + 2.5)


@in_kernels
@batches
@pytest.mark.parametrize("scaled", ["each", "one for all", "no"])
def test_over_root(
    members: int, scaled: str, served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    square = draw(members).to(DEVICE)
    square[:4] = torch.tensor([0.0, INF, NAN, 1e-40])[:members]
    scale = None if scaled == "no" else (draw(members) - 0.5).to(DEVICE)
    if scaled == "one for all":
        scale = torch.tensor(0.3, device=DEVICE).expand(members)
    ours = scalars.over_root(square, linalg.least_norm(torch.float32), -1.5, scale)
    plainly(monkeypatch)
    theirs = scalars.over_root(square, linalg.least_norm(torch.float32), -1.5, scale)
    assert ours.stride() == (1,)
    torch.testing.assert_close(ours, theirs, rtol=4e-7, atol=0, equal_nan=True)
    assert members == 1 or ours[1:3].isnan().tolist() == [True, True]


@in_kernels
@batches
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("one_for_all", [False, True])
def test_grown(
    members: int,
    power: float,
    one_for_all: bool,
    served: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    square = (draw(members) * 10 ** (8 * draw(members) - 4)).to(DEVICE)
    square[:2] = torch.tensor([0.0, NAN])[:members]
    scale = -draw(members).to(DEVICE)
    if one_for_all:
        scale = scale[:1].expand(members)
    ours = scalars.grown(scale, square, 1 / 48, power)
    plainly(monkeypatch)
    theirs = scalars.grown(scale.double(), square.double(), 1 / 48, power)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=0, equal_nan=True)
    assert ours[0] == 0


@in_kernels
@batches
@pytest.mark.parametrize("blocks", [(1, 1), (4, 1), (2, 3)])
def test_total(members: int, blocks: tuple[int, int], served: None) -> None:
    left, right = (draw(members, count).to(DEVICE) for count in blocks)
    left[0, -1] = NAN
    found = scalars.total(left, right)
    expected = left.double().sum(1) + right.double().sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=4e-7, atol=0, equal_nan=True)


@in_kernels
@batches
@pytest.mark.parametrize("blocks", [(1, 1), (4, 1), (2, 3)])
def test_within(
    members: int, blocks: tuple[int, int], served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = (draw(members, count).to(DEVICE) for count in blocks)
    ours = scalars.within((left, right), 1.2)
    rows = zip(left.tolist(), right.tolist(), strict=True)
    largest = torch.tensor([max(x) + max(y) for x, y in rows])
    plainly(monkeypatch)
    assert ours.tolist() == scalars.within((left, right), 1.2).tolist()
    assert ours.tolist() == (largest <= 1.2).tolist()
    assert members < 100 or 0 < int(ours.sum()) < members


@in_kernels
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_within_nothing(bad: float, side: int, served: None) -> None:
    """Wherever among a member's norms it is, which are far below the bound without it."""
    norms = [torch.full((3, 3), 0.1, device=DEVICE) for _ in range(2)]
    norms[side].fill_diagonal_(bad)
    assert not scalars.within(norms, torch.finfo(torch.float32).max).any()


@in_kernels
@batches
@pytest.mark.parametrize("there", list(itertools.product([False, True], repeat=3)))
def test_count(members: int, there: tuple[bool, bool, bool], served: None) -> None:
    """Some members of a stack, whose rows then lie apart, twice."""
    whole = torch.zeros(4, members + 7, dtype=torch.long, device=DEVICE)
    alive, *drawn = (draw(4, members) > 0.4).to(DEVICE)
    drawn[1] = torch.cat((drawn[1], draw(members + 1)[1:].to(DEVICE) > 0.7))  # of both sides
    drawn[2] = drawn[2][:1].expand(members)  # one for all
    marks = [mark if here else None for mark, here in zip(drawn, there, strict=True)]
    for _ in range(2):
        scalars.count(whole[:, 3:-4], alive, marks)
    drawn[1] = drawn[1][:members] | drawn[1][members:]
    happened = [~alive]
    happened += [alive & x & here for x, here in zip(drawn, there, strict=True)]
    assert torch.equal(whole[:, 3:-4], 2 * torch.stack(happened).long())
    assert not whole[:, :3].any()
    assert not whole[:, -4:].any()


@pytest.mark.skipif(INTERPRETED, reason="has no kernels to interpret")
def test_what_is_summed_and_grown_plainly() -> None:
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [7.0]])
    assert scalars.total(left, right).tolist() == [8, 14]
    assert scalars.grown(torch.tensor([3.0]), torch.tensor([32.0]), 0.5, 0.5).tolist() == [6]


@pytest.mark.skipif(INTERPRETED, reason="has no kernels to interpret")
def test_count_plainly() -> None:
    counts = torch.zeros(3, 2, dtype=torch.long)
    alive = torch.tensor([True, False])
    for _ in range(3):
        scalars.count(counts, alive, [None, torch.tensor([False, True, True, True])])
    assert counts.tolist() == [[0, 3], [0, 0], [3, 0]]
