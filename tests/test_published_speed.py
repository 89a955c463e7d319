"""What README and docs say a step takes on a GPU is what the recorded runs say."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from .reference import GEOMETRIES

ROOT = Path(__file__).parents[1]
H200 = ROOT / "benchmarks/results/h200"
# Where the docs' table of kernels counts them; what is not here is a number a member, or a copy.
ROWS = {
    "reading and writing parameters": ("_gather", "_scatter", "_restore"),
    "products and sums over rows": ("_sums", "_combine", "_square", "_step", "_balanced"),
    "Cholesky factorizations, inverse roots": ("_cholesky", "_inverse_root", "_even"),
    "other r×r work": (
        *("_finish", "_coordinates", "_fixed_core", "_fixed_roots", "_fixed_share"),
        *("_fixed_moves", "_turns", "_shifts", "_bounded", "library product", "torch norm"),
    ),
}
_TALL_MICROSECONDS = 10  # an operation of torch that takes longer runs over rows


def recorded(name: str) -> list[dict[str, str]]:
    with (H200 / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def milliseconds(case: str, contender: str, momentum: str) -> float:
    (found,) = [
        row
        for row in recorded(f"{case}-graph")
        if (row["contender"], row["mode"], row["momentum"]) == (contender, "graph", momentum)
    ]
    return float(found["ms"])


def table_row(text: str, name: str) -> list[str]:
    """The cells after a name, of the first row that begins with it and a number."""
    found = re.search(rf"^\| {re.escape(name)} \| (\d.*) \|$", text, re.MULTILINE)
    assert found is not None
    return [cell.strip() for cell in found[1].split("|")]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_step(name: str) -> None:
    found = [
        milliseconds(case, name, momentum)
        for case in ("paper-mha", "paper-gqa")
        for momentum in ("0.0", "0.9")
    ]
    section = _h200((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    cells = table_row(section, name)
    assert [cells[k] for k in (0, 1, 3, 4)] == [f"{ms:.3f}" for ms in found]
    readme = table_row((ROOT / "README.md").read_text(encoding="utf-8"), name)
    assert readme[:2] == [f"{ms:.2f} ms" for ms in found[:2]]


def test_what_is_recommended() -> None:
    found = [milliseconds(case, "recommended", "") for case in ("paper-mha", "paper-gqa")]
    section = _h200((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    assert f"| recommended (0.8) | | {found[0]:.3f} | | | {found[1]:.3f} | |" in section
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| `recommended`, momentum 0.8 | | {found[0]:.2f} ms | |" in readme


def test_where_the_time_goes() -> None:
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in recorded("paper-mha-kernels"):
        kernel, us = row["kernel"], float(row["us"])
        kinds = [kind for kind, names in ROWS.items() if kernel.startswith(names)]
        if kernel == "torch elementwise" and us > _TALL_MICROSECONDS:
            kinds = ["products and sums over rows"]
        kind = kinds[0] if kinds else "numbers a member, copies"
        spent[kind][row["contender"]] += us
        spent["between kernels"][row["contender"]] += float(row["us_before_it"])
    section = _h200((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    assert len(spent) == len(ROWS) + 2
    for kind, by_contender in spent.items():
        wanted = [by_contender[x] for x in ("fixed-embedded", "fixed-quotient", "recommended")]
        assert table_row(section, kind) == [f"{us:.0f}" for us in wanted]


def _h200(text: str) -> str:
    return text[text.index("On an H200 (torch 2.11") :]
