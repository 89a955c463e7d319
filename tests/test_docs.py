"""The documentation site builds without a warning, and the code of its guides runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert "trust_region" in api
    for linked in ("benchmarks/reproduction/figures/mha_rates.png", "examples/plain_loop.py"):
        assert (tmp_path / linked).exists()


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.filterwarnings("ignore:orthonormalize_ set all singular values")
def test_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "quick-start.md", "exec"), scope)
    assert scope["loss"] < 1e-6 * scope["target"].square().sum()
    assert "members measured" in capsys.readouterr().out
