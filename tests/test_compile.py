"""torch.compile around a step: how often it compiles, and that nothing changes. And capturable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from rankfold import Factor, Grid, RiemannianSGD, recommended

from .heads import Heads
from .reference import GEOMETRIES, ISOMETRIES
from .toys import Toy

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
# Torch notes that it leaves its own profiler label out of the graph.
pytestmark = pytest.mark.filterwarnings("ignore:Profiler record function")


def set_lr(optimizer: RiemannianSGD, lr: float) -> None:
    """To this number, and in further groups to twice, three times as much."""
    for k, group in enumerate(optimizer.param_groups, 1):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(k * lr)
        else:
            group["lr"] = k * lr


@pytest.mark.parametrize("kind", ["number", "tensor"])
@every_geometry
@pytest.mark.usefixtures("as_on_a_device")
def test_no_compilation_after_the_second_step(geometry: str, kind: str) -> None:
    compile_once(geometry, kind, steps=50)


@pytest.mark.parametrize(
    ("geometry", "options"),
    [
        ("fixed-embedded", {"momentum_form": "heavy-ball", "weight_decay": 0.1}),
        ("fixed-quotient", {"second_moment": 0.9, "weight_decay": 0.1, "decay_to": 2.0}),
        ("isometry-quotient", {"second_moment": 0.9, "bias_correction": True}),
        ("isometry-canonical", {"scale_lr": 0.1}),
        ("fixed-quotient", {"normalize": "whitened", "nesterov": True}),
        ("fixed-embedded", {"normalize": "schatten-inf"}),
        ("fixed-quotient", {"momentum_form": "unit-smoothing", "normalize": "whitened"}),
    ],
)
@pytest.mark.usefixtures("as_on_a_device")
def test_nor_with_what_the_paper_leaves_out(geometry: str, options: dict[str, Any]) -> None:
    compile_once(geometry, "number", steps=8, **options)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@every_geometry
@pytest.mark.usefixtures("as_on_a_device")
def test_nor_with_a_rate_for_each_group(geometry: str, kind: str) -> None:
    decay = {} if geometry in ISOMETRIES else {"weight_decay": 0.1}
    compile_once(geometry, kind, steps=50, groups=2, **decay)


def compile_once(geometry: str, kind: str, steps: int, groups: int = 1, **more: Any) -> None:
    """A falling learning rate and new gradients compile nothing that the first two steps have not.

    And a compiled step ends where one that is not does.
    """
    torch._dynamo.reset()
    compiled, plain = ([Heads(seed=k) for k in range(groups)] for _ in range(2))
    counter = CompileCounter()
    runs: list[tuple[list[Heads], RiemannianSGD, Any]] = []
    for models in (compiled, plain):
        rates: list[Any] = [0.05 if kind == "number" else torch.tensor(0.05) for _ in models]
        options: dict[str, Any] = {"momentum": 0.9, "capturable": kind == "tensor", **more}
        grids = [Grid(model.a, model.b, groups=model.members) for model in models]
        optimizer = RiemannianSGD(
            [{"grids": [grid], "lr": lr} for grid, lr in zip(grids, rates, strict=True)],
            rates[0],
            geometry=geometry,
            **options,
        )
        runs.append((models, optimizer, optimizer.step))
    runs[0] = (compiled, runs[0][1], torch.compile(runs[0][2], backend=counter))
    frames = []
    for k in range(steps):
        for models, optimizer, step in runs:
            set_lr(optimizer, 0.05 * (1 - k / 60))
            for model in models:
                model.backward()
            step()
        frames.append(counter.frame_count)
    assert frames[0] > 0
    assert len(set(frames[1:])) == 1, frames
    # Compiled steps with a number may make more iterations than they need.
    allowed = 0.0 if kind == "tensor" else 1e-5
    for pair in zip(compiled, plain, strict=True):
        for one, other in zip(*(model.parameters() for model in pair), strict=True):
            assert (one - other).abs().max() <= allowed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_what_the_compiler_makes_of_the_recommended_step() -> None:
    """With the code it writes: query and key weights of one shape, in one or interleaved."""

    def trained(compiled: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        pair = [torch.nn.Parameter(torch.randn(12, 4, generator=generator)) for _ in range(2)]
        fused = torch.nn.Parameter(torch.randn(18, 12, generator=generator))
        query, key = (Factor(fused, axis=0, rank=2, blocks=3, stride=6, start=k) for k in (0, 2))
        grids = [Grid(*pair, name="one.vo"), Grid(query, key, groups=3, name="other.qk")]
        optimizer = recommended(grids, 0.1)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            products = torch.cat([(pair[0] @ pair[1].mT).flatten(), _interleaved(fused)])
            optimizer.zero_grad()
            (products - 1).square().sum().backward()
            step()
        return [*pair, fused]

    torch._dynamo.reset()
    torch.testing.assert_close(trained(True), trained(False), atol=1e-5, rtol=0)


def _interleaved(fused: torch.Tensor) -> torch.Tensor:
    """All entries of the products of queries and keys, of which each head has two rows in turn."""
    query, key, _ = fused.unflatten(0, (3, 3, 2)).unbind(1)
    return (query.mT @ key).flatten()


@every_geometry
def test_capturable_steps_are_the_steps(geometry: str) -> None:
    """A tensor for the learning rate takes other ways to the same point."""
    models = Heads(), Heads()
    rates: tuple[float | torch.Tensor, ...] = (0.05, torch.tensor(0.05))
    for model, lr in zip(models, rates, strict=True):
        capturable = isinstance(lr, torch.Tensor)
        optimizer = RiemannianSGD([model.grid()], lr, geometry=geometry, capturable=capturable)
        model.run(optimizer, 5)
        assert optimizer.counts() == {}
    assert (models[0].a - models[1].a).abs().max() < 1e-6


@pytest.mark.parametrize("geometry", ISOMETRIES)
def test_the_longest_captured_step_of_an_isometry(geometry: str) -> None:
    ends = []
    for lr in (0.5, 0.8):
        model = Heads()
        optimizer = RiemannianSGD(
            [model.grid()], torch.tensor(lr), geometry=geometry, capturable=True
        )
        model.run(optimizer, 3)
        assert model.survives(geometry)
        ends.append(model.a.detach().clone())
        counted = {"clipped": 3} if lr > 0.5 else None
        assert optimizer.counts().get("w[0]") == counted
    assert torch.equal(*ends)


def test_capturable_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="capturable=True needs lr as a 0-dim tensor"):
        RiemannianSGD(Toy().grids(), 0.1, geometry="fixed-quotient", capturable=True)
    with pytest.raises(ValueError, match="capturable=True cannot look at values"):
        RiemannianSGD(
            Toy().grids(),
            torch.tensor(0.1),
            geometry="fixed-quotient",
            capturable=True,
            on_nonfinite="raise",
        )
