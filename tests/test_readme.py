"""The README's example runs as shown, and its commands are the ones there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def test_the_example_runs_and_learns() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(blocks[0], "README.md", "exec"), scope)
    x, model = scope["x"], scope["model"]
    fresh = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    assert loss_of(model, x) < 0.9 * loss_of(fresh, x)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> float:
    return (model(x) - x.flip(1)).square().mean().item()


def test_ci_calls_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make" in line]
    assert commands == ["make test"]
    for command in ("make test", "make demo"):
        assert command in readme
