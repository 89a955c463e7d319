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
ADAMW = "AdamW (fused)"
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


def said(name: str) -> str:
    """A page of the docs, or the README, with its lines joined."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def of_one_run(case: str, mode: str = "graph") -> tuple[float, dict[str, list[float]]]:
    """AdamW's time in a mode, and those of the geometries in graphs, by momentum."""
    rows = [row for row in recorded(f"{case}-graph") if row["contender"] in (*GEOMETRIES, ADAMW)]
    (adamw,) = [float(x["ms"]) for x in rows if (x["contender"], x["mode"]) == (ADAMW, mode)]
    found = defaultdict(list)
    for row in rows:
        if row["momentum"]:
            found[row["momentum"]].append(float(row["ms"]))
    return adamw, found


def spread(times: dict[str, list[float]], over: float) -> list[str]:
    """The least and the largest ratio, without and with momentum."""
    return [f"{pick(times[m]) / over:.1f}" for m in ("0.0", "0.9") for pick in (min, max)]


def test_how_often_adamws_time() -> None:
    docs = said("docs/benchmarks.md")
    eager, mha = of_one_run("paper-mha", "eager")
    low, high, with_low, with_high = spread(mha, eager)
    assert f"{low} to {high} without momentum here ({with_low} to {with_high} with it)" in docs
    low, high, with_low, with_high = spread(mha, 0.139)
    assert f"{low} to {high} ({with_low} to {with_high}) if it took the 0.139 ms" in docs
    eager, gqa = of_one_run("paper-gqa", "eager")
    low, high, with_low, with_high = spread(gqa, eager)
    assert f"For GQA it is {low} to {high} ({with_low} to {with_high})" in docs
    ratios = [spread(t, a) for a, t in (of_one_run("paper-mha"), of_one_run("paper-gqa"))]
    least, most = (
        [f"{pick(float(x[k]) for x in ratios):.1f}" for k in (first, first + 2)]
        for pick, first in ((min, 0), (max, 1))
    )
    told = f"{least[0]} to {most[0]} times as long (with momentum {least[1]} to {most[1]})"
    assert told in docs


def test_whole_steps_with_embedded_geometries() -> None:
    of = {(x["optimizer"], x["momentum"]): x for x in recorded("paper-mha-whole-step-embedded")}
    percent = {key: f"+{float(x['percent']):.1f}%" for key, x in of.items()}
    fixed, isometry = (
        [percent[name, m] for m in ("0.0", "0.9")]
        for name in ("fixed-embedded", "isometry-embedded")
    )
    docs = said("docs/benchmarks.md")
    assert f"`fixed-embedded` {fixed[0]} and, with momentum, {fixed[1]}, " in docs
    assert f"`isometry-embedded` {isometry[0]} and {isometry[1]} (" in docs


def test_whole_steps_in_the_readme() -> None:
    """Each by its last run."""
    latest = {
        (row["optimizer"], row["momentum"]): float(row["percent"])
        for name in ("", "-again", "-embedded")
        for row in recorded(f"paper-mha-whole-step{name}")
        if row["optimizer"] in GEOMETRIES and row["mode"] == "graph"
    }
    without, kept = ([x for (_, m), x in latest.items() if m == held] for held in ("0.0", "0.9"))
    assert len(without) == len(kept) == len(GEOMETRIES)
    told = (
        f"then takes {min(without):.1f}% to {max(without):.1f}% longer than with AdamW everywhere"
    )
    assert f"{told} ({min(kept):.1f}% to {max(kept):.1f}% with momentum)" in said("README.md")


def test_what_is_recommended_at_rank_128() -> None:
    (row,) = [x for x in recorded("large-recommended") if x["contender"] == "recommended"]
    told = f"takes {float(row['ms']):.0f} ms there, {float(row['ratio']):.0f} times AdamW"
    assert told in said("docs/benchmarks.md")


def test_kernels_of_fixed_embedded() -> None:
    now = {
        (row["case"], row["warps"], row["kernel"]): float(row["us"])
        for row in recorded("paper-embedded-kernels")
    }
    before = {
        row["kernel"]: float(row["us"])
        for row in recorded("paper-mha-kernels")
        if (row["contender"], row["momentum"]) == ("fixed-embedded", "0.0")
    }
    docs = said("docs/benchmarks.md")
    for words, kernel in (
        ("its coordinates take {} µs for {}", "_coordinates_kernel"),
        ("the shares of its core's change {} for {}", "_fixed_share_kernel"),
        ("roots near the identity {} for {}", "_fixed_roots_kernel"),
    ):
        found = f"{now['paper-mha', '4', kernel]:.0f}", f"{before[kernel]:.0f}"
        assert words.format(*found) in docs
    four, eight = (now["paper-mha", warps, "whole step"] / 1000 for warps in ("4", "8"))
    assert f"{eight:.3f} ms a step for {four:.3f}" in docs
    made = {kernel for case, _, kernel in now if kernel.startswith(("_fixed", "_coord", "_finish"))}
    slower = [now[c, "8", k] - now[c, "4", k] for c in ("paper-mha", "paper-gqa") for k in made]
    assert min(slower) >= 0  # as long or longer


def test_what_fewer_launches_have_spared() -> None:
    shares = []
    for case in ("paper-mha", "paper-gqa"):
        of = [
            {
                (x["contender"], x["momentum"]): float(x["ms"])
                for x in recorded(f"{case}-{name}")
                if x["contender"] in GEOMETRIES
            }
            for name in ("graph-before", "graph")
        ]
        assert of[0].keys() == of[1].keys()
        shares += [1 - of[1][key] / of[0][key] for key in of[0]]
    told = f"steps take {100 * min(shares):.0f}% to {100 * max(shares):.0f}% less than with those"
    assert told in said("docs/speed.md")


def test_memory_of_a_step() -> None:
    peaks = defaultdict(list)
    for row in recorded("paper-mha-graph"):
        if row["contender"] in (*GEOMETRIES, "recommended"):
            peaks[row["momentum"]].append(round(int(row["peak_bytes"]) / 2**20))
    docs = said("docs/speed.md")
    without, kept, (recommended,) = peaks["0.0"], peaks["0.9"], peaks[""]
    assert f"{min(without)} to {max(without)} MiB without momentum" in docs
    assert f"{min(kept)} to {max(kept)} with it" in docs
    assert f"What is recommended takes {recommended}." in docs


def test_how_cost_grows_on_a_gpu() -> None:
    with (ROOT / "docs/figures/scaling-h200.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ms: dict[tuple[str, ...], float] = {
        (x["panel"], x["geometry"], x["pairs"], x["rank"], x["lefts"], x["rights"]): float(x["ms"])
        for x in rows
        if x["rows"] == "512"
    }

    def ratios(one: tuple[str, ...], other: tuple[str, ...]) -> dict[str, float]:
        return {
            name: ms[one[0], name, *one[1:]] / ms[other[0], name, *other[1:]] for name in GEOMETRIES
        }

    docs = said("docs/speed.md")
    wider = ratios(("r", "96", "128", "1", "1"), ("r", "96", "64", "1", "1"))
    embedded = [wider[name] for name in GEOMETRIES if name.endswith("-embedded")]
    assert [round(min(embedded)), round(max(embedded))] == [4, 5]
    assert "embedded geometries take four to five times as long" in docs
    assert {round(x) for name, x in wider.items() if not name.endswith("-embedded")} == {2}
    fewer = ratios(("pairs", "12", "64", "1", "1"), ("pairs", "96", "64", "1", "1")).values()
    assert f"An eighth of 96 pairs takes {min(fewer):.2f} to {max(fewer):.2f} of the time" in docs
    grids = ratios(("I×J", "12", "64", "8", "1"), ("I×J", "12", "64", "1", "1")).values()
    assert f"{min(grids):.1f} to {max(grids):.1f} times as long as pairs" in docs
    for panel, words in (("r", "took {} to {} ms then"), ("pairs", "and {} to {} where")):
        found = [ms[panel, name, "96", "64", "1", "1"] for name in GEOMETRIES]
        assert words.format(f"{min(found):.2f}", f"{max(found):.2f}") in docs
