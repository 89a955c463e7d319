"""Contests of small models, run to their end: docs have what their tables say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rankfold.lab.contest import TUNING_SEED
from rankfold.lab.statistics import paired

ROOT = Path(__file__).parents[1]
OURS = "fixed-quotient-tilted-vo"

# Of the small model with RoPE and QK-norm, by first seed: means of Muon and ours, and p.
SMALL = {0: (8, 1.9698, 1.9574, 0.024), 8: (12, 1.9690, 1.9659, 0.35)}


def test_the_small_model_with_rope_is_what_docs_say() -> None:
    table = ROOT / "benchmarks/results/small-models/rope.csv"
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["seed"]) != TUNING_SEED]
    told = ("lr", "vo_rate", "output_rate", "momentum")
    assert len({(row["method"], *(row[name] for name in told)) for row in rows}) == 3
    losses = {(row["method"], int(row["seed"])): float(row["loss"]) for row in rows}
    text = (ROOT / "docs/contest.md").read_text(encoding="utf-8")
    for first, (count, muon, ours, p) in SMALL.items():
        seeds = range(first, first + count)
        theirs, mine = ([losses[method, seed] for seed in seeds] for method in ("muon", OURS))
        assert (round(sum(theirs) / count, 4), round(sum(mine) / count, 4)) == (muon, ours)
        found = paired([a - b for a, b in zip(mine, theirs, strict=True)])
        assert found.p == pytest.approx(p, abs=0.005)
        assert f"−{abs(found.mean):.4f}" in text
        assert f"| {muon:.4f} | {ours:.4f} |" in text


def test_the_small_model_on_samples_is_what_docs_say() -> None:
    table = ROOT / "benchmarks/results/small-models/gqa-samples.csv"
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = (ROOT / "docs/contest.md").read_text(encoding="utf-8")
    assert f"[all {len(rows)} runs](../{table.relative_to(ROOT)})" in text
    tuning = [row for row in rows if int(row["seed"]) == TUNING_SEED]
    of = {name: [row for row in rows if row["method"] == name] for name in ("muon", OURS)}
    lines = []
    for steps, decayed in ((1000, False), (4000, False), (4000, True)):
        best = []
        for name in of:
            kind = [row for row in tuning if (row["method"], row["steps"]) == (name, str(steps))]
            kind = [row for row in kind if (float(row["product_decay"]) > 0) is decayed]
            best.append(f"{min(float(row['loss']) for row in kind):.4f}")
        lines.append(best)
    assert f"| 1,000 steps, tuned | {lines[0][0]} (2⁻⁷, 2⁻⁶, 2⁻⁶, 0.8) | {lines[0][1]} (" in text
    assert f"| 4,000 steps, tuned but for decay | {lines[1][0]} (" in text
    assert f"| {lines[1][1]} (2⁻⁶, 2⁻⁶, 2⁻⁴, 0.8) |" in text
    assert all(f"**{loss}**" in text for loss in lines[2])
    finals = [
        {int(row["seed"]): float(row["loss"]) for row in each if int(row["seed"]) != TUNING_SEED}
        for each in of.values()
    ]
    theirs, ours = ([each[seed] for seed in sorted(each)] for each in finals)
    assert sorted(finals[0]) == sorted(finals[1]) == list(range(len(ours)))
    count = len(ours)
    assert f"| {sum(theirs) / count:.4f} | {sum(ours) / count:.4f} |" in text
    found = paired([a - b for a, b in zip(ours, theirs, strict=True)])
    sizes = (f"{'+' if x > 0 else '−'}{abs(x):.4f}" for x in (found.mean, found.low, found.high))
    assert "{}, 95% interval {} to {}, ".format(*sizes) + f"p = {found.p:.2g} |" in text


def test_the_overview_says_what_the_rest_says() -> None:
    """Each difference with its interval stands below again, where other tests hold it."""
    text = (ROOT / "docs/contest.md").read_text(encoding="utf-8")
    start = text.index("What has been run to its end")
    table, rest = text[start:].split("Not run to their end", 1)
    rows = [[cell.strip() for cell in line.split("|")[3:6]] for line in table.splitlines()[4:]]
    rows = [row for row in rows if len(row) == 3]
    assert len(rows) == 8
    for difference, interval, p in rows:
        said = [x for x in rest.splitlines() if difference in x and f"p = {p}" in x]
        assert said or f"{difference}**, p = {p}" in rest, difference
        assert interval in rest
