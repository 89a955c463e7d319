"""The study of safeguards: its patches still take out of the library what they are to take out."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .contest_runs import benchmark_script


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    # It imports its kit, which lies beside it.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return benchmark_script("safeguards_study")


def test_every_experiment_runs(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", "--steps", "20", "--output", str(tmp_path)])
    study.main()
    with (tmp_path / "safeguards.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(list(tmp_path.glob("*.png"))) == len({row["experiment"] for row in rows}) == 7
    # Momentum stays tangent with the safeguard, and does not without.
    for row in rows:
        if row["experiment"] == "momentum":
            (share,) = re.findall(r"incoherent ([\d.e-]+)", row["also"])
            assert (float(share) > 0.05) == (", off," in row["setting"])
            assert float(share) < 1e-6 or ", off," in row["setting"]
