"""Reports of made-up runs: settings, pages, tables and figures."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUP

from rankfold.geometries import GEOMETRIES
from rankfold.lab import statistics as st
from rankfold.lab.config import OPTIMIZERS, OPTIONS_OF, OptimizerConfig
from rankfold.lab.figures import diagnostic_figures, loss_figures, rate
from rankfold.lab.rate_figures import rate_figures, rate_ticks
from rankfold.lab.records import CONFIG, METRICS, STATUS, Recorder, Run, read_runs, write_json
from rankfold.lab.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
MACHINE = {"device": "NVIDIA H200", "platform": "Linux x86_64", "torch": "2.13.0"}


def fake_run(
    root: Path,
    name: str = "adamw",
    seed: int = 0,
    final: float = 4.0,
    *,
    gqa: bool = False,
    status: str = "finished",
    message: str = "",
    steps: int = 100,
    diagnostics: bool = False,
    annealing: str = "none",
    workers: int | None = None,
    **options: Any,
) -> None:
    """A run on disk whose last five validations have the mean ``final``."""
    optimizer = {"name": name, "lr": 2.0**-8, "other_lr": 2.0**-10, "momentum": 0.0}
    optimizer |= {"normalize": "metric", "masters": True} | options
    model = {"layers": 4, "heads": 8, "kv_heads": 2 if gqa else 8, "width": 512, "head_width": 64}
    data = {"source": "wikipedia", "tokenizer": "gpt2", "context": 256, "batch": 8}
    training = {"steps": steps, "warmup": 10, "annealing": annealing, "accumulate": 1}
    training |= {"validate_every": 10, "seed": seed}
    config = {"model": model, "data": data, "optimizer": optimizer, "training": training}
    key = f"{'gqa' if gqa else 'mha'}-{name}-s{seed}-{len(list(root.glob('*'))):03d}"
    folder = root / key
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, {"key": key, "config": config})
    told = {"status": status, "message": message, "machine": MACHINE}
    write_json(folder / STATUS, told if workers is None else {**told, "workers": workers})
    record(Recorder(folder, 0), key, steps, final, name == "adamw", diagnostics)


def record(
    recorder: Recorder, key: str, steps: int, final: float, adamw: bool, watch: bool
) -> None:
    noise = random.Random(key)
    flat = max(1, steps - 49)
    for step in range(1, steps + 1):
        loss = final + 6 * math.exp(-4 * step / flat) if step < flat else final
        seconds = 0.02 + noise.random() / 1000
        spent = 0.001 if adamw else 0.004
        wave = loss + noise.gauss(0, 0.05)
        recorder.add("train", step, loss=wave, seconds=seconds, optimizer_seconds=spent)
        if step % 10 == 0:
            recorder.add("validation", step, loss=loss)
        if watch and step % 20 == 0:
            values = {
                n: math.exp(noise.gauss(0, 0.2)) * step for n in ("condition", "drift", "norm")
            }
            recorder.add("diagnostics", step, values=values)
    recorder.close()


def full_study(root: Path, seeds: int = 3, steps: int = 200) -> list[Run]:
    """Both models, all optimizers, sweeps and every status."""
    noise = random.Random(0)
    for seed in range(seeds):
        shift = noise.gauss(0, 0.02)
        for gqa in (False, True):
            common: dict[str, Any] = {"seed": seed, "gqa": gqa, "steps": steps}
            for k, other in ((0, -12), (1, -10), (2, -8)):
                for j, lr in ((0, -14), (1, -12), (2, -10)):
                    final = 4 + shift + 0.1 * abs(k - 1) + 0.03 * abs(j - 1)
                    rates: dict[str, Any] = {"lr": 2.0**lr, "other_lr": 2.0**other}
                    fake_run(root, "adamw", final=final, **common, **rates)
            for name in GEOMETRIES:
                for j, lr in enumerate((-10, -8, -6)):
                    for normalize in ("metric", "none"):
                        final = 3.99 + shift + 0.05 * abs(j - 1) + noise.gauss(0, 0.01)
                        final += 0.02 * (normalize == "none")
                        choice: dict[str, Any] = {"lr": 2.0**lr, "normalize": normalize}
                        fake_run(root, name, final=final, diagnostics=True, **common, **choice)
        fake_run(root, "frozen", seed, 4.6 + shift, steps=steps)
    fake_run(root, "fixed-embedded", 0, 9.0, status="diverged", message="loss is NaN", lr=1.0)
    fake_run(root, "fixed-quotient", 7, 5.0, status="running", steps=steps)
    fake_run(root, "adamw", 8, 5.0, status="failed", message="out of memory: tried 2 GiB")
    return read_runs(root)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def text_of(folder: Path) -> str:
    return (folder / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("full")
    return root / "report", write_report(
        full_study(root / "runs", seeds=2, steps=100), root / "report"
    )


# Figures ----------------------------------------------------------------------------------------


def test_one_bad_rate_does_not_flatten_the_others(tmp_path: Path) -> None:
    for lr, loss in ((-12, 6.2), (-10, 6.1), (-8, 6.3), (-6, 4000.0)):
        fake_run(tmp_path / "runs", "adamw", 0, loss, lr=2.0**lr)
    (study,) = st.studies_of(read_runs(tmp_path / "runs"))
    ((_, caption, figure),) = rate_figures(study)
    assert "beyond it" in caption
    low, high = figure.axes[0].get_ylim()
    assert 6.0 < low < 6.1
    assert 6.3 < high < 6.7


def test_what_is_off_the_scale_is_no_momentum(tmp_path: Path) -> None:
    for k, momentum in enumerate((0.0, 0.5, 0.6, 0.7, 0.8, 0.95)):
        fake_run(tmp_path, "fixed-embedded", 0, 6.0 + k / 100, lr=2.0**-4, momentum=momentum)
        fake_run(tmp_path, "fixed-embedded", 0, 6.1 + k / 100, lr=2.0**-3, momentum=momentum)
    fake_run(tmp_path, "fixed-embedded", 0, 900.0, lr=2.0**-2)
    (study,) = st.studies_of(read_runs(tmp_path))
    ((_, _, figure),) = rate_figures(study)
    off = [line for line in figure.axes[0].get_lines() if line.get_marker() == CARETUP]
    assert sum(np.size(line.get_xdata()) for line in off) == 1
    assert not any(line.get_clip_on() for line in off)
    handles = [h for h in figure.legends[0].legend_handles if isinstance(h, Line2D)]
    keys = {str(handle.get_marker()) for handle in handles}
    assert len(keys & set("osDP*X")) == 6
    assert not keys & {"^", "v"}


def test_a_rate_of_zero_is_not_drawn(tmp_path: Path) -> None:
    for lr in (0.0, 2.0**-9, 2.0**-8):
        fake_run(tmp_path, "adamw", lr=lr)
    (study,) = st.studies_of(read_runs(tmp_path))
    ((_, caption, figure),) = rate_figures(study)
    assert caption.endswith("A rate of 0 has no place on the axis.")
    drawn = [np.asarray(line.get_xdata(), float) for line in figure.axes[0].get_lines()]
    assert set(np.concatenate(drawn)) == {2**-9, 2**-8}


def test_the_key_of_rates_tells_what_took_effect(tmp_path: Path) -> None:
    for name in ("adamw", "muon", "recommended", "fixed-embedded"):
        for lr in (2.0**-9, 2.0**-8):
            fake_run(tmp_path, name, lr=lr)
    (study,) = st.studies_of(read_runs(tmp_path))
    ((_, _, figure),) = rate_figures(study)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[4:] == [
        *("normalize metric", "normalize whitened"),
        *("momentum 0", "momentum 0.8", "momentum 0.9"),
    ]
    fake_run(tmp_path, "muon", lr=2.0**-7)
    rivals = [run for run in read_runs(tmp_path) if run.option("optimizer.name") != "recommended"]
    (study,) = st.studies_of(rivals)
    ((_, _, figure),) = rate_figures(study)
    assert "normalize metric" not in [t.get_text() for t in figure.legends[0].get_texts()]


def panel_of_differences(root: Path) -> tuple[str, tuple[float, float]]:
    (study,) = st.studies_of(read_runs(root))
    _, caption, figure = list(loss_figures(study))[-1]
    return caption, figure.axes[-1].get_ylim()


def test_small_differences_are_seen(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", steps=1000)
    fake_run(tmp_path, "muon", final=3.97, steps=1000)
    caption, (low, high) = panel_of_differences(tmp_path)
    assert -0.05 < low < -0.03 < 0 < high < 0.01
    assert "beyond" not in caption
    fake_run(tmp_path, "dion", final=5.0, steps=1000)
    fake_run(tmp_path, "fixed-embedded", final=3.96, steps=1000)
    fake_run(tmp_path, "frozen", final=6.0, steps=1000)
    caption, (low, high) = panel_of_differences(tmp_path)
    assert low < -0.04
    assert high < 0.2
    assert caption.endswith("; parts of frozen, Dion lie beyond the panel.")


def test_a_bad_start_and_a_spike_leave_the_panel(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", steps=1000)
    fake_run(tmp_path, "muon", final=3.97, steps=1000)
    (folder,) = tmp_path.glob("*muon*")
    lines = [json.loads(line) for line in (folder / METRICS).read_text("utf-8").splitlines()]
    for line in lines:
        if line["kind"] == "validation" and line["step"] in (*range(101), 500):
            line["loss"] += 2
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    caption, (low, high) = panel_of_differences(tmp_path)
    assert -0.05 < low < high < 0.01
    assert caption.endswith("; parts of Muon lie beyond the panel.")


def test_without_a_common_seed_there_is_no_difference(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", 0)
    fake_run(tmp_path, "muon", 1)
    (study,) = st.studies_of(read_runs(tmp_path))
    for _, caption, figure in loss_figures(study):
        assert len(figure.axes) == 1
        assert "Below" not in caption


def test_diagnostics_are_named_in_full_and_counted_from_zero(tmp_path: Path) -> None:
    fake_run(tmp_path, "fixed-embedded")
    (folder,) = tmp_path.iterdir()
    names = ("total/skipped", "worst/momentum_decoherence", "worst/smallest_singular_value")
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        for step in (10, 20):
            values = {name: (1e-4 - 1e-6 * step) * (k > 0) for k, name in enumerate(names)}
            file.write(json.dumps({"kind": "diagnostics", "step": step, "values": values}) + "\n")
    (study,) = st.studies_of(read_runs(tmp_path))
    ((_, _, figure),) = diagnostic_figures(study)
    figure.draw_without_rendering()
    assert [axis.title.get_text().replace("\n", "") for axis in figure.axes] == list(names)
    for axis in figure.axes:
        wide = axis.get_window_extent().width  # which longer numbers beside it make smaller
        assert axis.title.get_window_extent().width < 0.9 * wide
    low, high = figure.axes[0].get_ylim()
    assert -0.1 < low < 0
    assert high == 1


def test_a_curve_of_one_point_is_seen(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", steps=10)
    (study,) = st.studies_of(read_runs(tmp_path))
    for _, _, figure in loss_figures(study):
        (line,) = figure.axes[0].get_lines()
        assert np.size(line.get_xdata()) == 1
        assert line.get_marker() == "o"


def test_ticks_of_rates_have_room() -> None:
    chosen = [2.0**k for k in range(-14, 2)]
    assert rate_ticks(chosen[::-1]) == chosen
    assert rate_ticks([0.0, 0.001, 0.003, 0.01]) == [0.001, 0.003, 0.01]
    random_search = [2.0 ** (-9 + 6 * random.Random(k).random()) for k in range(40)]
    assert rate_ticks(random_search) == [2.0**k for k in range(-9, -2)]
    assert len(rate_ticks([2.0**-8, 2.0**-7, 2.0**60])) <= 13
    assert rate_ticks([0.25]) == [0.25]


def test_a_random_search_is_no_heat_map(tmp_path: Path) -> None:
    for k in range(16):
        fake_run(tmp_path, "adamw", lr=0.01 + k / 999, other_lr=0.02 + k / 777)
    (study,) = st.studies_of(read_runs(tmp_path))
    assert [name for name, _, _ in rate_figures(study)] == ["mha_rates"]


def test_learning_rates_are_powers_of_two_where_they_are() -> None:
    assert [rate(v) for v in (2.0**-12, 1.0, 8, 0.003, 0.0)] == ["2⁻¹²", "2⁰", "2³", "0.003", "0"]


# Settings ----------------------------------------------------------------------------------------


def test_seeds_are_put_together(tmp_path: Path) -> None:
    for seed, final in enumerate((4.0, 4.1, 4.4)):
        fake_run(tmp_path, "adamw", seed, final)
    (setting,) = st.settings_of(read_runs(tmp_path))
    assert setting.loss == pytest.approx(12.5 / 3)
    assert setting.spread == pytest.approx(st.deviation([4.0, 4.1, 4.4]))
    assert setting.tokens_per_second == pytest.approx(8 * 256 / setting.step_seconds)
    assert setting.optimizer_share == pytest.approx(0.001 / setting.step_seconds)


def test_an_option_that_came_later_does_not_part_seeds(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", 0, 4.0)
    fake_run(tmp_path, "adamw", 1, 4.0, vo_rate=1.0)
    fake_run(tmp_path, "adamw", 2, 4.0, vo_rate=2.0)
    assert sorted(len(s.runs) for s in st.settings_of(read_runs(tmp_path))) == [1, 2]


def test_options_are_those_in_effect(tmp_path: Path) -> None:
    for name in ("adamw", "muon", "dion", "frozen", "fixed-embedded", "recommended"):
        fake_run(tmp_path / "runs", name, 0, 4.0)
    write_report(read_runs(tmp_path / "runs"), tmp_path / "report")
    rows = {row["optimizer"]: row for row in read(tmp_path / "report/tables/summary.csv")}
    shown = {
        name: tuple(row[f"optimizer.{o}"] for o in ("momentum", "normalize", "nesterov", "tilt"))
        for name, row in rows.items()
    }
    assert shown == {
        "adamw": ("0.9", "", "", ""),
        "muon": ("0.0", "", "", "0.0"),
        "dion": ("0.0", "", "", ""),
        "frozen": ("", "", "", ""),
        "fixed-embedded": ("0.0", "metric", "False", "0.0"),
        "recommended": ("0.8", "whitened", "True", "0.25"),
    }
    cells = re.findall(r'<th scope="row">Muon.*?</tr>', text_of(tmp_path / "report"), re.DOTALL)
    assert [re.findall(r'"option">(.*?)<', cell).count("–") for cell in cells] == [5]
    assert "optimizer.lr" not in rows["muon"]  # the same wherever there is one
    for cell in cells:  # results first: a table with many options scrolls
        assert max(at.start() for at in re.finditer('"number"', cell)) < cell.index('"option"')


def test_every_optimizer_has_its_options() -> None:
    options = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert OPTIONS_OF.keys() == set(OPTIMIZERS)
    assert set().union(*OPTIONS_OF.values()) <= options


def test_the_best_is_among_those_with_most_seeds(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        fake_run(tmp_path / "runs", "adamw", seed, 4.0 + seed / 10)
        fake_run(tmp_path / "runs", "muon", seed, 3.9 + seed / 9)
    fake_run(tmp_path / "runs", "adamw", 0, 3.0, lr=2.0**-9)
    fake_run(tmp_path / "runs", "muon", 0, 3.0, lr=2.0**-9)
    (study,) = st.studies_of(read_runs(tmp_path / "runs"))
    assert study.baseline is study.best["adamw"]
    assert [len(study.best[name].losses) for name in ("adamw", "muon")] == [3, 3]
    result = study.against_baseline(study.best["muon"])
    assert result is not None
    assert math.isfinite(result.p)
    write_report(read_runs(tmp_path / "runs"), tmp_path / "report")
    page = text_of(tmp_path / "report")
    assert "the lowest mean loss of those with the most seeds" in page
    assert page.count('class="tag baseline"') == 1


def test_a_seed_run_twice_counts_once(tmp_path: Path) -> None:
    fake_run(tmp_path, "adamw", 0, 4.0)
    fake_run(tmp_path, "adamw", 0, 5.0, status="failed")
    (setting,) = st.settings_of(read_runs(tmp_path))
    assert setting.losses == pytest.approx({0: 4.0})


def test_pairs_are_of_common_seeds_and_the_baseline_is_the_best_adamw(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        fake_run(tmp_path, "adamw", seed, 4.0 + seed, lr=2.0**-9)
        fake_run(tmp_path, "adamw", seed, 3.0 + seed, lr=2.0**-12)
        fake_run(tmp_path, "adamw", seed, 1.0, gqa=True)
        fake_run(tmp_path, "adamw", seed, 1.0, steps=150)
    for seed in (1, 2, 3):
        fake_run(tmp_path, "fixed-embedded", seed, 2.5 + seed + seed / 100)
    studies = st.studies_of(read_runs(tmp_path))
    assert [s.label for s in studies] == ["MHA, steps 150", "MHA, steps 100", "GQA"]
    assert [s.name for s in studies] == ["mha", "mha_steps_100", "gqa"]
    study = studies[1]
    assert study.baseline is not None
    assert study.baseline.options["optimizer.lr"] == 2.0**-12
    result = study.against_baseline(study.best["fixed-embedded"])
    assert result is not None
    assert result.count == 2
    assert result.mean == pytest.approx(-0.485)
    runs = [run for setting in study.settings for run in setting.runs.values()]
    write_report(runs, tmp_path / "report")
    assert "(2 common)" in text_of(tmp_path / "report")


def test_runs_that_did_not_finish_are_shown_and_not_averaged(tmp_path: Path) -> None:
    fake_run(tmp_path / "runs", "adamw", 0, 4.0)
    fake_run(tmp_path / "runs", "adamw", 1, 40.0, status="running")
    fake_run(tmp_path / "runs", "fixed-embedded", 0, 3.0)
    fake_run(tmp_path / "runs", "fixed-embedded", 1, 90.0, status="diverged", message="went off")
    fake_run(tmp_path / "runs", "frozen", 0, math.nan)
    fake_run(tmp_path / "runs", "fixed-quotient", 0, 7.0, status="failed", message="<b>no & such")
    write_report(read_runs(tmp_path / "runs"), tmp_path / "report")
    rows = {row["optimizer"]: row for row in read(tmp_path / "report/tables/summary.csv")}
    assert float(rows["adamw"]["loss"]) == pytest.approx(4.0)
    assert (rows["adamw"]["runs"], rows["adamw"]["seeds"]) == ("2", "1")
    for name, status in (("fixed-embedded", "diverged"), ("frozen", "diverged")):
        assert (rows[name]["status"], rows[name]["loss"], rows[name]["best"]) == (status, "", "0")
    assert list(read(tmp_path / "report/tables/mha_valid.csv")[0]) == ["step", "adamw"]
    each = {(r["optimizer.name"], r["seed"]): r for r in read(tmp_path / "report/tables/runs.csv")}
    assert len(each) == 6
    assert float(each["adamw", "1"]["loss"]) == pytest.approx(40.0)
    assert each["fixed-embedded", "1"]["status"] == "diverged"
    page = text_of(tmp_path / "report")
    for words in ("diverged (1 of 2 seeds)", "went off", "1 running", "&lt;b&gt;no &amp; such"):
        assert words in page
    assert "<b>" not in page


# The page ----------------------------------------------------------------------------------------


def test_all_files_are_there_and_named(full: tuple[Path, list[Path]]) -> None:
    folder, paths = full
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == sorted(paths)
    names = {p.stem for p in (folder / "figures").glob("*.svg")}
    assert names == {p.stem for p in (folder / "figures").glob("*.png")}
    kinds = ("train", "valid", "rates", "adamw_grid", "time", "diagnostics")
    assert names == {f"{model}_{kind}" for model in ("mha", "gqa") for kind in kinds}
    assert text_of(folder).count("<svg") == len(names)


def test_curves_have_the_papers_columns(full: tuple[Path, list[Path]]) -> None:
    columns = ["step", "adamw", "fixed_embedded", "fixed_quotient"]
    columns += ["partial_embedded", "partial_quotient", "partial_canonical"]
    for name in ("gqa_train", "gqa_valid"):
        assert list(read(full[0] / f"tables/{name}.csv")[0]) == columns
    assert list(read(full[0] / "tables/mha_valid.csv")[0]) == [*columns, "frozen"]
    steps = [int(row["step"]) for row in read(full[0] / "tables/mha_train.csv")]
    assert steps == [1, 20, 40, 60, 80, 100]


def test_times_of_a_shared_device_are_said_to_be_so(tmp_path: Path) -> None:
    words = "runs were made up to 3 at a time: their times are those of a shared device"
    for seed, workers in enumerate((None, 1, 2, 3)):  # None: of a version that did not say
        fake_run(tmp_path / "runs", "adamw", seed, 4.0, workers=workers)
    write_report(read_runs(tmp_path / "runs")[:2], tmp_path / "alone")
    assert "shared device" not in text_of(tmp_path / "alone")
    write_report(read_runs(tmp_path / "runs"), tmp_path / "report")
    assert text_of(tmp_path / "report").count(f"2 of 4 {words}") == 2  # summary and times


def test_annealed_runs_are_a_study_of_their_own(tmp_path: Path) -> None:
    for annealing, final in (("none", 4.0), ("linear", 3.5)):
        fake_run(tmp_path, "adamw", 0, final, annealing=annealing)
        fake_run(tmp_path, "muon", 0, final - 0.1, annealing=annealing)
    studies = st.studies_of(read_runs(tmp_path))
    assert [s.label for s in studies] == ["MHA, annealing linear", "MHA, annealing none"]
    assert [s.best["adamw"].loss for s in studies] == pytest.approx([3.5, 4.0])


def test_other_optimizers_stand_behind_the_papers(tmp_path: Path) -> None:
    for name in ("whitened", "muon", "frozen", "isometry-canonical", "adamw"):
        fake_run(tmp_path / "runs", name, 0, 4.0)
    write_report(read_runs(tmp_path / "runs"), tmp_path / "report")
    columns = ["step", "adamw", "partial_canonical", "frozen", "muon", "whitened"]
    assert list(read(tmp_path / "report/tables/mha_valid.csv")[0]) == columns
    assert ">Muon<" in text_of(tmp_path / "report")


def test_the_page_is_in_order_and_asks_for_nothing(full: tuple[Path, list[Path]]) -> None:
    page = text_of(full[0])
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Summary", "Loss", "Learning rates", "Time", "Diagnostics"]
    assert set(re.findall(r"https?://[^\s\"'<>]*", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"<script|<link|<img|@import|src=", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', page)) <= set(ids)
    assert "2⁻¹²" in page
    assert page.count("<details>") == 2
    assert page.count("parts of frozen lie beyond the panel.</figcaption>") == 2  # of one model
    assert page.count('class="tag baseline"') == 4  # in both tables of both models


def test_nothing_of_an_earlier_report_is_left(tmp_path: Path) -> None:
    for name in ("adamw", "fixed-embedded"):
        for lr in (2.0**-9, 2.0**-8):
            fake_run(tmp_path / "runs", name, lr=lr, diagnostics=True)
            fake_run(tmp_path / "runs", name, lr=lr, gqa=True)
    runs, page = read_runs(tmp_path / "runs"), tmp_path / "page"
    write_report(runs, page)
    theirs = [page / "figures/mha_talk.png", page / "tables/notes.csv", page / "gqa_time.svg"]
    for path in theirs:
        path.write_text("a user's", encoding="utf-8")
    written = write_report([run for run in runs if run.key.startswith("mha-adamw")], page)
    left = sorted(path for path in page.rglob("*") if path.is_file())
    assert left == sorted([*written, *theirs])
    assert not list(page.rglob("gqa_*.csv"))


def test_a_list_of_files_leads_nowhere_else(tmp_path: Path) -> None:
    fake_run(tmp_path / "runs", "adamw")
    outside = tmp_path / "mine.txt"
    outside.write_text("mine", encoding="utf-8")
    (tmp_path / "page").mkdir()
    listed = ["../mine.txt", "figures/../../mine.txt", str(outside), "mine.txt", "figures/", ""]
    write_json(tmp_path / "page/.report.json", {"files": listed})
    write_report(read_runs(tmp_path / "runs"), tmp_path / "page")
    assert outside.exists()


def test_the_same_runs_make_the_same_report(tmp_path: Path) -> None:
    for seed in (0, 1):
        fake_run(tmp_path / "runs", "adamw", seed, 4.0 + seed)
        fake_run(tmp_path / "runs", "fixed-embedded", seed, 3.9 + seed, diagnostics=True)
    runs = read_runs(tmp_path / "runs")
    first = write_report(runs, tmp_path / "a")
    second = write_report(runs[::-1], tmp_path / "b")
    assert [p.name for p in first] == [p.name for p in second]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


@pytest.mark.parametrize("case", ["nothing", "one run", "no AdamW", "one seed", "only diverged"])
def test_little_to_report(tmp_path: Path, case: str) -> None:
    root = tmp_path / "runs"
    if case in ("one run", "one seed"):
        fake_run(root, "adamw")
    if case in ("no AdamW", "one seed"):
        fake_run(root, "fixed-embedded", 0, 3.0)
        fake_run(root, "fixed-embedded", 0, 3.1, lr=0.5, momentum=0.5)
        fake_run(root, "some-new-one", 0, 3.1, normalize="other")
    if case == "no AdamW":
        fake_run(root, "fixed-embedded", 1, 3.2)
    if case == "only diverged":
        fake_run(root, "adamw", status="diverged", lr=0.5, other_lr=0.5)
        fake_run(root, "adamw", status="diverged", lr=0.5, other_lr=0.25)
    paths = write_report(read_runs(root), tmp_path / "report", title="<little>")
    assert all(path.exists() for path in paths)
    page = text_of(tmp_path / "report")
    assert "<h1>&lt;little&gt;</h1>" in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL).lower()
    assert ("There are no runs" in page) == (case == "nothing")


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_does_not_overflow(
    full: tuple[Path, list[Path]], tmp_path: Path, width: int
) -> None:
    """In a frame, as windows have a least width."""
    page = text_of(full[0]).replace("<details>", "<details open>")
    wrapper = (
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{_quoted(page)}" '
        'onload="const e = this.contentDocument.documentElement;'
        'document.title = JSON.stringify([e.clientWidth, e.scrollWidth])"></iframe>'
    )
    (tmp_path / "wrapper.html").write_text(wrapper, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,1000"]
    command += ["--virtual-time-budget=2000", (tmp_path / "wrapper.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None
    shown, needed = json.loads(found[1])
    assert width - 20 <= shown <= width  # but for a scroll bar
    assert needed <= shown


def _quoted(page: str) -> str:
    return page.replace("&", "&amp;").replace('"', "&quot;")
