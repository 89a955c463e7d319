"""The scaling study: what is measured stays so, and one cut off is drawn as far as it came."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from .contest_runs import benchmark_script


@pytest.fixture
def study() -> ModuleType:
    pytest.importorskip("matplotlib")
    return benchmark_script("scaling_study")


def test_it_goes_on_where_it_was_cut_off(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[object, str]] = []

    def measure(sizes: object, geometry: str, *rest: object) -> float:
        measured.append((sizes, geometry))
        if len(measured) == 23:
            raise KeyboardInterrupt
        return float(len(measured))

    monkeypatch.setattr(study, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["study", "--quick", "--device", "cpu", "--output", str(tmp_path)]
    )
    with pytest.raises(KeyboardInterrupt):
        study.main()
    table = study.Table(tmp_path / "scaling.csv", "eager")
    assert list(table.times.values()) == [float(k) for k in range(1, 23)]
    study.draw(study.panels(True), table.times, "two panels so far", tmp_path / "part.png")
    assert (tmp_path / "part.png").stat().st_size > 0
    study.main()
    # 60 in all, of which only the one that was cut off is measured twice.
    assert len(measured) == 61
    assert measured[22] == measured[23]
    assert len(study.Table(tmp_path / "scaling.csv", "eager").times) == 60
    assert (tmp_path / "scaling.png").exists()
