from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import rankfold
from rankfold.cli import app, main
from rankfold.lab import records
from rankfold.lab.commands import COMMANDS, _sweep_file
from rankfold.lab.config import RunConfig
from rankfold.lab.sweep import Outcome, read_sweep, run_sweep, statuses

from .lab_runs import run, small, write_corpus

Command = Callable[..., Any]
STAGES = {
    "paper-1-adamw": 2 * 5 * 5 * 3,
    "paper-2-learning-rates": 2 * 5 * 7 * 2 * 3,
    "paper-3-momentum": 2 * 5 * 3 * 3 * 3,
    "paper-4-long-runs": 2 * 6 * 3,
}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def sizes(corpus: Path) -> list[str]:
    """The options of a small run, for a command."""
    tiny, wanted = small(corpus).as_dict(), []
    for group, options in tiny.items():
        wanted += [f"--set={group}.{name}={value}" for name, value in options.items() if value]
    return wanted


def sweep_file(folder: Path, corpus: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    config = small(corpus, training__steps=10).as_dict()
    lines = ["[options]"]
    for group in ("data", "model", "training"):
        for name, value in config[group].items():
            if value is not None and name != "seed":
                lines.append(f"{group}.{name} = {json.dumps(value)}")
    path.write_text(text.replace("[options]", "\n".join(lines)), encoding="utf-8")
    return path


GRID = """
preset = "tiny"
seeds = [0, 1]
[options]
[[grid]]
optimizer.name = "adamw"
optimizer.lr = ["2^-7", 0.01]
[[grid]]
optimizer.name = ["isometry-quotient", "frozen"]
"""


# Sweeps ------------------------------------------------------------------------------------------


def test_grids_multiply_and_add_up(tmp_path: Path, corpus: Path) -> None:
    configs = read_sweep(sweep_file(tmp_path, corpus, GRID))
    found = [(c.optimizer.name, c.optimizer.lr, c.training.seed) for c in configs]
    rates = [("adamw", 2**-7), ("adamw", 0.01), ("isometry-quotient", 2**-8), ("frozen", 2**-8)]
    assert found == [(*rate, seed) for rate in rates for seed in (0, 1)]
    assert all(c.training.steps == 10 for c in configs)
    extra = read_sweep(tmp_path / "sweep.toml", {"training.steps": "7"})
    assert {c.training.steps for c in extra} == {7}


@pytest.mark.parametrize("name", STAGES)
def test_the_papers_stages_ship(name: str) -> None:
    configs = read_sweep(_sweep_file(name))
    assert len({c.key for c in configs}) == len(configs) == STAGES[name]
    assert {c.model.kv_heads for c in configs} == {1, 8}
    assert all(c.optimizer.other_lr == 2**-10 for c in configs) == (name != "paper-1-adamw")
    long = 10000 if name.startswith("paper-4") else 1000
    assert {c.training.steps for c in configs} == {long}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("preset = ", "is not TOML"),
        ("gird = 1", "'gird' is none of grid, options, preset, seeds"),
        ("[options]\noptimizer.rate = 1", "there is no option"),
        ("seeds = 3", "seeds is a list"),
        ("options = 3", "options is a table"),
        ("[grid]\noptimizer.lr = [1, 2]", "with two brackets"),
        ("[[grid]]\ntraining.seed = [1, 2]", "not as training.seed"),
        ("seeds = []", "has no runs"),
        ("[[grid]]\noptimizer.lr = []", "has no runs"),
    ],
)
def test_wrong_sweep_files(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_sweep(path)


def test_sweeps_skip_resume_and_survive_failures(tmp_path: Path, corpus: Path) -> None:
    configs = [
        small(corpus, training__steps=10),
        small(corpus, training__steps=10, data__source=str(tmp_path / "nowhere")),
        small(corpus, training__steps=10, training__seed=1),
    ]
    root = tmp_path / "runs"
    told: list[tuple[str, int]] = []

    def done(outcome: Outcome, count: int, total: int) -> None:
        assert total == 3
        told.append((outcome.status, count))

    run_sweep(configs, root, device="cpu", done=done)
    assert told == [("finished", 1), ("failed", 2), ("finished", 3)]
    metrics = root / configs[0].key / records.METRICS
    before = metrics.stat().st_mtime_ns
    again = run_sweep(configs, root, device="cpu")
    assert [outcome.status for outcome in again] == ["finished", "failed", "finished"]
    assert "nowhere" in again[1].message
    assert metrics.stat().st_mtime_ns == before
    assert list(statuses(configs, root).values()) == ["finished", "failed", "finished"]
    new = small(corpus, training__seed=9)
    assert statuses([new], root) == {new.key: "new"}


def test_workers_make_the_same_runs(tmp_path: Path, corpus: Path) -> None:
    configs = [small(corpus, training__steps=10, training__seed=s) for s in range(3)]
    one = run_sweep(configs, tmp_path / "one", device="cpu")
    two = run_sweep(configs, tmp_path / "two", device="cpu", workers=2)
    assert sorted(one, key=lambda o: o.key) == sorted(two, key=lambda o: o.key)
    for folder, workers in (("one", 1), ("two", 2)):
        assert {run.workers for run in records.read_runs(tmp_path / folder)} == {workers}


def test_ray_gets_one_task_a_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in with Ray's calls: remote, wait and get."""
    asked: list[dict[str, Any]] = []

    def remote(**resources: Any) -> Callable[[Any], Any]:
        asked.append(resources)
        return lambda function: SimpleNamespace(
            remote=lambda *arguments: lambda: function(*arguments)
        )

    ray = SimpleNamespace(
        init=lambda **_: None,
        remote=remote,
        wait=lambda tasks, num_returns: (tasks[:num_returns], tasks[num_returns:]),
        get=lambda task: task(),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    configs = [small(corpus, training__steps=10, training__seed=s) for s in range(2)]
    later = configs[1:]  # that are asked for when the first has ended

    def more() -> list[RunConfig]:
        return [later.pop()] if later else []

    found = run_sweep(configs[:1], tmp_path / "runs", device="cpu", engine="ray", more=more)
    assert [outcome.status for outcome in found] == ["finished"] * 2
    assert asked == [{"num_cpus": 1}]


def test_engines_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there are processes, ray"):
        run_sweep([], tmp_path, device="cpu", engine="slurm")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'rankfold\[ray\]'"):
        run_sweep([], tmp_path, device="cpu", engine="ray")


# Commands ----------------------------------------------------------------------------------------


def test_every_command_has_help_with_examples(command: Command) -> None:
    for function, examples in COMMANDS.items():
        shown = command(function.__name__, "--help")
        assert shown.exit_code == 0
        for example in examples:
            assert example in shown.output
    assert "--install-completion" in command("--help").output


def test_the_version_is_told(command: Command) -> None:
    assert command("--version").output == f"rankfold {rankfold.__version__}\n"


def test_train_inspect_report(command: Command, corpus: Path, tmp_path: Path) -> None:
    made = command("train", *sizes(corpus), "--device", "cpu", "--json")
    assert made.exit_code == 0, made.output
    summary = json.loads(made.stdout)
    assert (summary["status"], summary["steps"]) == ("finished", 30)
    shown = command("inspect", summary["folder"])
    assert shown.exit_code == 0
    assert "lr=0.00390625" in shown.stdout
    assert json.loads(command("inspect", summary["folder"], "--json").stdout) == summary
    page = command("report", "runs", "--output", "page")
    assert page.exit_code == 0, page.output
    assert (tmp_path / "page" / "index.html").exists()
    assert json.loads(command("report", "runs", "--output", "page", "--json").stdout)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_files_are_written(command: Command, corpus: Path, tmp_path: Path) -> None:
    made = command("train", *sizes(corpus), "--device", "cpu", "--tensorboard", "--json")
    assert made.exit_code == 0, made.output
    events = list(Path(json.loads(made.stdout)["folder"], "tensorboard").iterdir())
    assert len(events) == 1
    assert events[0].stat().st_size > 1000


def test_a_diverged_run_has_an_exit_code_of_its_own(command: Command, corpus: Path) -> None:
    made = command("train", *sizes(corpus), "--other-lr", "1e30", "--set=optimizer.other_lr=1e30")
    assert made.exit_code == 3
    assert "try a smaller" in made.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--preset", "huge"], "there are tiny"),
        (["train", "--optimizer", "sgd"], "one of adamw"),
        (["train", "--set", "steps"], "group.name=value"),
        (["train", "--data", "nowhere.txt"], "nowhere.txt"),
        (["train", "--device", "abacus"], "'abacus' is no device"),
        (["sweep", "nothing.toml"], "these ship: paper-1-adamw"),
        (["sweep", "."], "no file '.'"),
        (["report", "nowhere"], "no folder 'nowhere'"),
        (["report", "."], "there are no runs"),
        (["inspect", "nowhere"], "there is no 'nowhere'"),
        (["check", "flat"], "flat"),
        (["check", "--grid", "0", "1"], "at least one"),
    ],
)
def test_errors_are_one_sentence(command: Command, words: list[str], message: str) -> None:
    failed = command(*words)
    assert failed.exit_code == 2
    assert message in failed.stderr
    assert failed.stderr.strip().count("\n") == 0
    assert "Traceback" not in failed.output


def test_sweep_command(command: Command, corpus: Path, tmp_path: Path) -> None:
    path = sweep_file(tmp_path, corpus, GRID)
    listed = command("sweep", path, "--dry-run")
    assert listed.exit_code == 0
    assert listed.stdout.count("new") == 8
    made = command("sweep", path, "--json", "--device", "cpu")
    assert made.exit_code == 0, made.output
    assert [each["status"] for each in json.loads(made.stdout)] == ["finished"] * 8
    assert set(json.loads(command("sweep", path, "--dry-run", "--json").stdout).values()) == {
        "finished"
    }
    failing = command("sweep", path, "--set", "data.source=nowhere.txt", "--device", "cpu")
    assert failing.exit_code == 1
    # What JSON has no word for would be written as NaN, which not every reader takes.
    elsewhere = ("--set", "data.source=nowhere.txt", "--device", "cpu", "--json")
    outcomes = json.loads(command("sweep", path, *elsewhere).stdout, parse_constant=pytest.fail)
    assert {each["loss"] for each in outcomes} == {None}


def test_compare_makes_a_page(command: Command, corpus: Path, tmp_path: Path) -> None:
    names = ("--optimizer", "adamw", "--optimizer", "isometry-quotient")
    small_sizes = [each for each in sizes(corpus) if "optimizer." not in each]
    made = command("compare", *names, *small_sizes, "--seeds", 2, "--workers", 1, "--device", "cpu")
    assert made.exit_code == 0, made.output
    assert len(records.read_runs(tmp_path / "comparison" / "runs")) == 4
    assert "isometry-quotient" in (tmp_path / "comparison" / "index.html").read_text("utf-8")


def test_what_is_named_twice_is_compared_once(
    command: Command, corpus: Path, tmp_path: Path
) -> None:
    small_sizes = [each for each in sizes(corpus) if "optimizer." not in each]
    names = ("--optimizer", "adamw", "--optimizer", "adamw", "--set", "training.steps=10")
    made = command("compare", *names, *small_sizes, "--workers", 2, "--device", "cpu")
    assert made.exit_code == 0, made.output
    assert made.stderr.count("finished  mha-adamw") == 1
    assert len(records.read_runs(tmp_path / "comparison" / "runs")) == 1


def test_options_are_shown_as_they_come_to(command: Command, corpus: Path) -> None:
    few = ("--optimizer", "recommended", "--steps", 3, "--set=training.steps=3")
    small_sizes = [each for each in sizes(corpus) if "optimizer." not in each]
    made = command("train", *small_sizes, *few, "--device", "cpu", "--json")
    assert made.exit_code == 0, made.output
    summary = json.loads(made.stdout)
    told = summary["config"]["optimizer"]
    assert (told["momentum"], told["normalize"], told["vo_rate"]) == (0.8, "whitened", 4.0)
    assert "momentum=0.8, " in command("inspect", summary["folder"]).stdout


def test_interrupted_runs_and_broken_ones_are_told_apart(
    command: Command, corpus: Path, tmp_path: Path
) -> None:
    """A report shows the first kind, and names folders of the second."""
    config = small(corpus, training__steps=3)
    for name in ("interrupted", "broken"):
        run(config, tmp_path / "runs" / name)
        records.write_json(tmp_path / "runs" / name / records.STATUS, {"workers": 1})
    (tmp_path / "runs" / "broken" / records.CONFIG).write_text("", encoding="utf-8")
    assert f"{config.key}: interrupted" in command("inspect", "runs/interrupted").stdout
    page = command("report", "runs", "--output", "page")
    assert page.exit_code == 0, page.output
    assert page.stdout.startswith("1 run, report: ")
    assert "cannot be read: runs/broken" in page.stderr
    assert "no process is at it" in (tmp_path / "page" / "index.html").read_text("utf-8")
    with records.held(tmp_path / "runs" / "interrupted"):
        assert f"{config.key}: running" in command("inspect", "runs/interrupted").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--output", "file/x"),
        ("compare", "--output", "file/x"),
        ("sweep", "sweep.toml", "--output", "file/x"),
        ("report", "runs", "--output", "file/x"),
        ("bench", "--preset", "tiny", "--output", "file/x"),
    ],
)
def test_folders_that_cannot_be_made_are_one_sentence(
    words: tuple[str, ...], command: Command, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    sweep_file(tmp_path, corpus, GRID)
    run(small(corpus, training__steps=3), tmp_path / "runs" / "run")
    given = sizes(corpus) if words[0] in ("train", "compare") else []
    given = [each for each in given if "optimizer." not in each]
    one = ["--optimizer", "adamw"] if words[0] == "compare" else []
    failed = command(*words, *given, *one)
    assert failed.exit_code == 2, failed.output
    assert re.search(r"^Error: file/x.*: Not a directory$", failed.stderr, re.M)
    assert "Traceback" not in failed.output


def test_a_cache_that_cannot_be_made_is_one_sentence(
    command: Command, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "file" / "cache"))
    failed = command("train", *sizes(corpus))
    assert failed.exit_code == 2
    assert "cannot keep tokens in" in failed.stderr
    assert "RANKFOLD_CACHE names another folder" in failed.stderr


def test_a_file_without_a_terminal_hears_of_every_tenth(command: Command, corpus: Path) -> None:
    made = command("train", *sizes(corpus), "--set=training.validate_every=2", "--device", "cpu")
    assert made.exit_code == 0, made.output
    told = [line.split(" ")[0] for line in made.stderr.splitlines() if " loss " in line]
    assert told == [f"{step}/30" for step in (4, 6, 10, 12, 16, 18, 22, 24, 28, 30)]


def test_check_measures_a_geometry(command: Command) -> None:
    found = command("check", "isometry-quotient", "--grid", 2, 1, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)[0]["ok"]
    assert "retraction_slope" in command("check", "fixed-quotient").stdout


def test_python_has_the_command_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rankfold", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("rankfold ")


def test_an_interruption_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankfold.bench.command.bench", interrupted)
    monkeypatch.setattr(sys, "argv", ["rankfold", "bench", "--preset", "tiny"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
