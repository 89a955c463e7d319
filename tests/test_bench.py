"""The command on its smallest preset: tables, files, refusals, and that it times what it says."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rankfold.bench import PRESETS, check_modes, report, run, stacked_case
from rankfold.bench import __main__ as bench_main
from rankfold.bench.cases import Case, orthonormalize_quickly
from rankfold.bench.contenders import ADAMW, LR, LiteralSGD, enlist, riemannian
from rankfold.bench.timing import measure, peak_bytes
from rankfold.cli import app
from rankfold.defaults import RECOMMENDED_NAME
from rankfold.geometries import GEOMETRIES, is_isometry

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
COLUMNS = [
    "case",
    "contender",
    "mode",
    "momentum",
    "normalization",
    "retraction",
    "ms",
    "ms_low",
    "ms_high",
    "repeats",
    "steps",
    "ratio",
    "graph_ratio",
    "peak_bytes",
    "state_bytes",
    "floor_bytes",
    "bytes_per_second",
    "copy_share",
]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--repeats", "2", *arguments])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# The command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("bench") / "made" / "here"
    result = invoke("--preset", "tiny", "--output", str(folder), "--whole-step")
    assert result.exit_code == 0, result.output
    return result.output, folder


def test_the_table_names_everyone(tiny: tuple[str, Path]) -> None:
    output, _ = tiny
    assert "tiny: 16 pairs, factors 32×8" in output
    for geometry in GEOMETRIES:
        assert f"literal {geometry}" in output
    for word in (ADAMW, "Muon", "PEFT Riemannian AdamW", "metric, svd", "× AdamW", "of copy"):
        assert word in output
    assert re.search(r"recommended +eager +(its own)? +whitened, additive", output)
    assert "geoopt" in output  # in the table or, where it is not installed, in a note
    assert "AdamW everywhere" in output


def test_what_is_recommended_can_be_timed_alone(tmp_path: Path) -> None:
    """Every momentum is then its optimizer's own, and the plot has one panel."""
    alone = ("--geometry", "recommended", "--no-literal", "--output", str(tmp_path))
    result = invoke("--preset", "tiny", *alone)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tiny.png").stat().st_size > 1000


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfold.bench.command.run", lambda *_, **__: pytest.fail("timed"))
    (tmp_path / "file").touch()
    result = invoke("--preset", "tiny", "--output", str(tmp_path / "file" / "made"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.strip().endswith("file/made: Not a directory")


def test_a_narrow_terminal_gets_whole_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    header = ["optimizer", "mode", "momentum", "normalization, retraction", "ms", "× AdamW"]
    header += ["peak MiB", "state MiB", "floor MiB", "GB/s", "of copy"]
    line = ["fixed-quotient", "eager", "0", "metric, additive", "12.3", "4.56"]
    line += ["1234.5", "123.4", "567.8", "9.87", "65.4%"]
    report._print_table("title", header, [line], "caption", left=4)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    (row,) = (each for each in lines if "fixed-quotient" in each)
    assert row.split()[:5] == ["fixed-quotient", "eager", "0", "12.3", "4.56"]
    assert not any("…" in each or len(each) > 80 for each in lines)
    told = " ".join(lines)
    assert "Left out for want of room: normalization, retraction, floor MiB, of copy" in told


def test_the_csv_has_a_row_for_each_contender(tiny: tuple[str, Path]) -> None:
    rows = read(tiny[1] / "tiny.csv")
    assert list(rows[0]) == COLUMNS
    ours = [r for r in rows if r["contender"] in GEOMETRIES]
    literal = [r for r in rows if r["contender"].startswith("literal ")]
    assert len(ours) == len(literal) == 10
    assert {r["momentum"] for r in ours} == {"0.0", "0.9"}
    assert all(r["mode"] == "eager" and r["normalization"] == "metric" for r in ours)
    assert {r["retraction"] for r in ours} == {"svd", "additive", "polar"}
    assert all(float(r["ms"]) > 0 and int(r["peak_bytes"]) > 0 for r in ours)
    assert len({(r["contender"], r["momentum"]) for r in rows}) == len(rows)
    (chosen,) = (r for r in rows if r["contender"] == RECOMMENDED_NAME)
    assert (chosen["momentum"], chosen["normalization"]) == ("", "whitened")
    assert int(chosen["state_bytes"]) == 2 * 4 * 32 * 32 * 4  # one momentum


def test_ratios_and_floors_are_what_they_are_called(tiny: tuple[str, Path]) -> None:
    rows = read(tiny[1] / "tiny.csv")
    adamw = rows[0]
    assert adamw["contender"] == ADAMW
    weights = 2 * 4 * 32 * 32 * 4
    buffers = {ADAMW: 2, "Muon": 1, "PEFT Riemannian AdamW": 2, RECOMMENDED_NAME: 1}
    bandwidth = json.loads((tiny[1] / "machine.json").read_text(encoding="utf-8"))
    bandwidth = bandwidth["cases"]["tiny"]["copy_bytes_per_second"]
    for row in rows:
        seconds = float(row["ms"]) / 1000
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(adamw["ms"]))
        kept = buffers.get(row["contender"], int(row["momentum"] == "0.9"))
        floor = (3 + 2 * kept) * weights
        assert int(row["floor_bytes"]) == floor
        assert float(row["bytes_per_second"]) == pytest.approx(floor / seconds)
        assert float(row["copy_share"]) == pytest.approx(floor / seconds / bandwidth)
        if row["contender"] in GEOMETRIES:
            assert int(row["state_bytes"]) == kept * weights


def test_the_other_files(tiny: tuple[str, Path]) -> None:
    folder = tiny[1]
    about = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    assert about["versions"]["torch"] == torch.__version__
    assert about["device"] == "cpu"
    assert about["options"]["modes"] == ["eager"]
    assert about["cases"]["tiny"]["description"] == TINY.describe()
    assert (folder / "tiny.png").read_bytes()[:4] == b"\x89PNG"
    steps = read(folder / "tiny-whole-step.csv")
    assert [r["optimizer"] for r in steps] == [
        "AdamW everywhere",
        *(g for g in GEOMETRIES for _ in range(2)),
        RECOMMENDED_NAME,
    ]
    base = float(steps[0]["ms"])
    for row in steps:
        assert float(row["percent"]) == pytest.approx(100 * (float(row["ms"]) / base - 1))


def test_sizes_by_hand(tmp_path: Path) -> None:
    sizes = [
        "--pairs",
        "3",
        "--rows",
        "9",
        "--columns",
        "7",
        "--rank",
        "2",
        "--lefts",
        "2",
        "--rights",
        "3",
    ]
    chosen = ["--geometry", "isometry-embedded", "--momentum", "0.5", "--no-rivals", "--no-literal"]
    result = invoke(*sizes, *chosen, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "3 grids 2×3, factors 9×2 and 7×2" in result.output
    rows = read(tmp_path / "by-hand.csv")
    assert [r["contender"] for r in rows] == [ADAMW, "isometry-embedded"]
    assert rows[1]["retraction"] == "polar"  # that of a grid
    assert int(rows[1]["floor_bytes"]) == 5 * 4 * 3 * (2 * 9 + 3 * 7) * 2


def test_grids_leave_peft_out(tmp_path: Path) -> None:
    sizes = [
        "--pairs",
        "2",
        "--rows",
        "9",
        "--rank",
        "2",
        "--lefts",
        "2",
        "--geometry",
        "fixed-quotient",
    ]
    result = invoke(*sizes, "--no-literal")
    assert result.exit_code == 0, result.output
    assert "PEFT" not in result.output
    assert "no grids of shared factors" in result.output or "not installed" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset huge", "'huge'; there are paper-mha"),
        ("--preset tiny --rows 8", "sizes are given by hand too: --rows"),
        ("--rows 8", "need --pairs, --rank as well"),
        ("--pairs 2 --rows 4 --rank 8", "rank 8 is above the smaller of 4 rows"),
        ("--pairs 0 --rows 4 --rank 2", "pairs must be at least 1, got 0"),
        ("--pairs 2 --rows 4 --rank 2 --whole-step", "a whole step needs a --preset"),
        ("--preset tiny --mode graph", "mode graph needs a CUDA device"),
        ("--preset tiny --mode fast", "unknown mode 'fast'"),
        ("--preset tiny --geometry flat", "'flat'; there are fixed-embedded"),
        ("--preset tiny --momentum 1", "1.0 is not in [0, 1)"),
        ("--preset tiny --device tpu9", "is no device"),
        ("--preset tiny --device meta", "neither cpu nor cuda"),
        ("--preset tiny --repeats 0", "'--repeats'"),
    ],
)
def test_wrong_options_say_what_is_wrong(arguments: str, message: str) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_without_its_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import rankfold.cli"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "pip install 'rankfold[bench]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_any_extra_there_is_a_plain_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in ("typer", "rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(bench_main, "OURS", ("fixed-embedded",))
    arguments = ["--preset", "tiny", "--device", "cpu", "--momentum", "0"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--output", str(tmp_path)])
    bench_main.main()
    output = capsys.readouterr().out
    assert re.search(r"^fixed-embedded  +eager  0  +metric, svd  +[0-9.]+  ", output, re.M)
    assert "no plot: matplotlib is not installed" in output
    assert (tmp_path / "tiny.csv").exists()


def test_the_core_imports_neither_bench_nor_cli() -> None:
    code = "import sys, rankfold; print([m for m in sys.modules if m.startswith('rankfold.')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rankfold.optimizer" in ran.stdout
    assert "rankfold.bench" not in ran.stdout
    assert "rankfold.cli" not in ran.stdout


# What is timed -----------------------------------------------------------------------------------

SHAPES: list[Case] = [TINY, stacked_case(3, 9, 7, 2, 2, 3)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("case", SHAPES, ids=["heads", "grids"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_literal_form_takes_the_librarys_steps(
    geometry: str, case: Case, momentum: float
) -> None:
    problems = [case.problem(CPU, is_isometry(geometry)) for _ in range(2)]
    for problem in problems:
        for param in problem.params:
            assert param.grad is not None
            param.data, param.grad = param.data.double(), param.grad.double()
        if is_isometry(geometry):
            # The paper's steps take orthonormality for granted, the library's restore it: a start
            # that has it to float32 alone would show as a difference.
            orthonormalize_quickly(problem.grids)
    fast = riemannian(problems[0], geometry, momentum)
    slow = LiteralSGD(case, problems[1], geometry, momentum)
    before = _product(*problems[0].weights())
    fast.step()
    slow.step()
    moved = _product(*problems[0].weights()) - before
    error = _product(*slow.point) - before - moved
    assert moved.norm() > 0.9 * LR * case.members**0.5 * (0.1 if momentum else 1)
    assert error.norm() < 1e-6 * moved.norm()  # the gradients fit together to float32


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left[:, :, None] @ right[:, None].mT


def test_every_contender_starts_from_the_same_tensors() -> None:
    first, second = (TINY.problem(CPU) for _ in range(2))
    for p, q in zip(first.params, second.params, strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_presets_have_the_shapes_they_are_named_for() -> None:
    found = {
        name: (case.members, case.lefts, case.rights, case.rows, case.columns, case.rank)
        for name, case in PRESETS.items()
    }
    assert found["paper-mha"] == (96, 1, 1, 512, 512, 64)
    assert found["paper-gqa"] == (12, 8, 1, 512, 512, 64)
    assert found["large"] == (512, 1, 1, 4096, 4096, 128)
    assert PRESETS["paper-gqa"].shapes()[:4] == [(512, 512), (64, 512), (64, 512), (512, 512)]
    for grid in TINY.problem(CPU).grids:
        assert (grid.lefts, grid.rights, grid.rank) == (1, 1, 8)


def test_the_peak_is_what_is_held_at_once() -> None:
    x = torch.ones(2**18)

    def work() -> None:
        for _ in range(3):
            y = x + 1  # 1 MiB
            z = y + 1  # and another
            del y, z

    assert 2 * 2**20 <= peak_bytes(work, CPU) < 2 * 2**20 + 100  # the ones are tensors too


def test_repeats_begin_where_the_weights_were() -> None:
    weight, resets = torch.zeros(1), []

    def reset() -> None:
        resets.append(weight.item())
        weight.zero_()

    timing = measure(lambda: weight.add_(1), "eager", CPU, reset=reset, repeats=4, budget=60)
    assert timing.repeats == 4
    assert timing.steps == 100  # as many as there may be: an addition is quick
    assert resets[1:] == [100.0] * 3
    assert timing.low <= timing.ms <= timing.high


def test_no_repeat_begins_when_the_budget_is_spent() -> None:
    timing = measure(lambda: None, "eager", CPU, reset=lambda: None, repeats=50, budget=0.0)
    assert timing.repeats == 1


def test_compiled_and_graph_modes_are_entered_where_they_can_run() -> None:
    entered = enlist(TINY, geometries=["fixed-quotient"], momenta=[0.9], modes=["graph"]).contenders
    names = [(c.name, c.mode) for c in entered]
    assert names[:2] == [(ADAMW, "eager"), (ADAMW, "graph")]
    assert ("fixed-quotient", "graph") in names
    assert not any(name.startswith(("literal", "geoopt", "PEFT")) for name, _ in names)
    with pytest.raises(ValueError, match="CUDA"):
        check_modes(["graph"], CPU)


@pytest.mark.slow
def test_compiled_mode_runs() -> None:
    results = run(
        TINY,
        CPU,
        geometries=["isometry-quotient"],
        momenta=[0.9],
        modes=["compiled"],
        literal=False,
        rivals=False,
        repeats=2,
    )
    assert [(r.contender, r.mode) for r in results.rows] == [
        (ADAMW, "eager"),
        ("AdamW", "compiled"),
        ("isometry-quotient", "compiled"),
    ]
