"""Steps with kernels are compiled in one piece: traced as for a GPU where there is none.

A step that falls into pieces still ends where it should, but each piece is compiled for every
parameter anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from rankfold import Factor, Grid, RiemannianSGD, kernels, orthonormalize_, recommended, tall

from .interpreted import INTERPRETED
from .reference import GEOMETRIES, ISOMETRIES

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter launches nothing")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that were traced; none is run."""
    graphs: list[Any] = []
    device, available = torch.device("cuda", 0), kernels.available
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_has_room", lambda device: True)
    monkeypatch.setattr(kernels, "available", lambda _: available(device))
    monkeypatch.setattr(
        kernels, "serve", lambda *x: x[0].dtype == torch.float32 and kernels.available(device)
    )
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def layers(count: int, width: int) -> list[Grid]:
    """Query·key and value·output products of some layers, two heads each, with gradients."""
    torch.manual_seed(0)
    grids: list[Grid] = []
    for _ in range(count):
        q, k, v, o = (torch.nn.Parameter(torch.randn(width, width) / 8) for _ in range(4))
        for kind, left, right, axis in (("qk", q, k, 0), ("vo", o, v, 1)):
            one, other = Factor(left, axis=axis, blocks=2), Factor(right, axis=0, blocks=2)
            grids.append(Grid(one, other, groups=2, name=f"layer{len(grids) // 2}.{kind}"))
    for grid in grids:
        for param in grid.params():
            param.grad = torch.randn_like(param)
    return grids


@pytest.mark.filterwarnings("ignore:the factor gradients of", "ignore:orthonormalize_ set all")
@pytest.mark.parametrize(("momentum", "rank"), [(0.0, 64), (0.9, 64), (0.9, 128)])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_step_is_one_graph(
    geometry: str, momentum: float, rank: int, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "enabled", False)
    grids = layers(3, 2 * rank)
    if geometry in ISOMETRIES:
        orthonormalize_(grids)
    optimizer = RiemannianSGD(
        grids, torch.tensor(0.01), geometry=geometry, momentum=momentum, capturable=True
    )
    trace_step(optimizer, traced, monkeypatch)


@pytest.mark.filterwarnings("ignore:the factor gradients of")
@pytest.mark.parametrize("rank", [64, 128])
def test_so_is_what_is_recommended(
    rank: int, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query·key products go without the tilt of the others."""
    monkeypatch.setattr(kernels, "enabled", False)
    optimizer = recommended(layers(3, 2 * rank), torch.tensor(0.01), capturable=True)
    assert len({grid.tilted for grid in optimizer.param_groups[0]["grids"]}) == 2
    trace_step(optimizer, traced, monkeypatch)


def _is_truth_value(index: ast.expr) -> bool:
    negated = isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Not)
    return negated or isinstance(index, ast.Compare | ast.BoolOp)


def test_no_index_is_a_truth_value() -> None:
    """The compiler of torch 2.11 takes none, and a step would fall into pieces there."""
    root = Path(kernels.__file__).parent.parent
    files = [x for x in root.rglob("*.py") if x.relative_to(root).parts[0] not in ("lab", "bench")]
    indices = [
        (path.name, node.lineno)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Subscript) and _is_truth_value(node.slice)
    ]
    assert len(files) > 40
    assert not indices


def trace_step(
    optimizer: RiemannianSGD, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trace a step with kernels, after one without; it must be one graph."""
    optimizer.step()  # a first step checks what a compiled one does not
    monkeypatch.setattr(kernels, "enabled", True)
    (joint,) = optimizer._plans_of([0])
    group, rates = optimizer.param_groups[0], joint.rates(optimizer.param_groups)

    def take(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        traced.append(graph)
        raise RuntimeError("there is no GPU to run this")

    @torch.no_grad()
    def update() -> None:
        optimizer._update(group, joint.plan, rates, {})

    with pytest.raises(BackendCompilerFailed, match="there is no GPU"):
        torch.compile(update, fullgraph=True, backend=take)()
    (graph,) = traced
    launched = [node for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    assert len(launched) >= 10
