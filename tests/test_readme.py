"""Examples of README and docs run as shown, and the README's commands are the ones there are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rankfold
from rankfold.adapters import families

ROOT = Path(__file__).parent.parent


def python_blocks(file: str = "README.md") -> list[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_example_runs_and_learns() -> None:
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(python_blocks()[0], "README.md", "exec"), scope)
    x, model = scope["x"], scope["model"]
    fresh = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    assert loss_of(model, x) < 0.9 * loss_of(fresh, x)


def test_the_parts_apart_take_the_place_of_the_optimizer() -> None:
    """In the example's own loop, from the first line after its optimizer on."""
    torch.manual_seed(0)
    example, parts = python_blocks()
    head, loop = example.split("\nx = ")
    for method in ("step", "zero_grad"):
        loop = loop.replace(f"optimizer.{method}()", f"optimizer.{method}(), others.{method}()")
    scope: dict[str, Any] = {}
    exec(compile(f"{head}\n{parts}\nx = {loop}", "README.md", "exec"), scope)
    x, model, optimizers = scope["x"], scope["model"], (scope["optimizer"], scope["others"])
    assert isinstance(optimizers[0], rankfold.RiemannianSGD)
    assert optimizers[0].param_groups[0]["normalize"] == "whitened"
    updated = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in model.parameters())
    fresh = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    assert loss_of(model, x) < 0.9 * loss_of(fresh, x)


def test_the_examples_about_models_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_BY_CLASS", dict(families._BY_CLASS))
    scope: dict[str, Any] = {"__name__": "docs"}
    for block in python_blocks("docs/models.md"):
        exec(compile(block, "docs/models.md", "exec"), scope)
    assert "TransformerEncoder: 4 grids found, 0 left out" in capsys.readouterr().out
    assert [(grid.name, grid.groups, grid.lefts) for grid in scope["grids"]] == [
        ("qk", 2, 4),
        ("vo", 2, 4),
    ]
    layer, x = scope["Attention"](), torch.randn(2, 5, 64)
    seen = rankfold.inspect(layer, lambda: layer(x).sin().sum())
    assert all(each.inconsistency < 1e-4 for each in seen.found if each.inconsistency is not None)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> float:
    return (model(x) - x.flip(1)).square().mean().item()


def test_the_table_has_every_option() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| option | what it does |") : readme.index("## When things")]
    named = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")
    }
    options = inspect.signature(rankfold.RiemannianSGD).parameters.keys()
    assert named == options - {"grids", "lr", "geometry"}


def test_ci_calls_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make" in line]
    assert commands == ["make test"]
    for command in ("make test", "make demo"):
        assert command in readme
