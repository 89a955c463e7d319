"""Examples and notebooks run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own making
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path: Path) -> None:
    nbclient: Any = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient.NotebookClient(nbformat.read(path, 4), timeout=300).execute()


@pytest.mark.slow
def test_fine_tuning(tmp_path: Path) -> None:
    script = ROOT / "examples" / "lora_finetuning.py"
    sizes = ["--steps", "10", "--pretraining", "10", "--seeds", "2", "--rates", "1"]
    command = [sys.executable, str(script), *sizes, "--output", str(tmp_path)]
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = (tmp_path / "lora.csv").read_text().splitlines()
    before, after = zip(*(map(float, row.rsplit(",", 3)[1:3]) for row in rows[1:]), strict=True)
    assert max(before) - min(before) < 1e-4  # all methods begin at the same model
    assert all(end < start for start, end in zip(before, after, strict=True))
