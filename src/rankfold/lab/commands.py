"""The laboratory's part of the command line; what each command does is elsewhere."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..devices import device_named
from ..geometries import GEOMETRIES
from . import records
from .config import GEOMETRY_RATES, PRESETS, RunConfig, preset

_DIVERGED = 3  # exit codes: 0 all went well, 1 something failed, 2 wrong usage, 3 a run diverged

Preset = Annotated[str, typer.Option("--preset", help=f"What to start from: {', '.join(PRESETS)}.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any option, as group.name=value; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help='A file or folder, "python", "fineweb" or "hf:NAME". Default: the preset\'s.'
    ),
]
Validation = Annotated[str | None, typer.Option(help="Validation text. Default: split off.")]
Tokenizer = Annotated[str | None, typer.Option(help="bytes or gpt2.")]
Ranks = Annotated[str | None, typer.Option(help="A gpt2.tiktoken file, where nothing is cached.")]
Device = Annotated[str | None, typer.Option(help="Default: cuda if there is one.")]
Output = Annotated[Path, typer.Option(file_okay=False, help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs at a time on this machine.")]


@contextmanager
def _plainly() -> Iterator[None]:
    """Errors of use as one sentence, without a traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def _configured(start: RunConfig, named: dict[str, Any], sets: list[str] | None) -> RunConfig:
    options = {name: value for name, value in named.items() if value is not None}
    return start.with_options({**options, **_pairs(sets)})


def _pairs(sets: list[str] | None) -> dict[str, str]:
    found = {}
    for each in sets or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--set wants group.name=value, not {each!r}")
        found[name] = value
    return found


def _data_options(
    data: str | None, validation: str | None, tokenizer: str | None, ranks: str | None
) -> dict[str, Any]:
    return {
        "data.source": data,
        "data.validation": validation,
        "data.tokenizer": tokenizer,
        "data.ranks": ranks,
    }


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def train(
    preset_name: Preset = "tiny",
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Of the attention weights: adamw, muon, whitened, dion, frozen or a geometry."
        ),
    ] = None,
    lr: Annotated[str | None, typer.Option(help="Its learning rate, like 0.01 or 2^-8.")] = None,
    other_lr: Annotated[str | None, typer.Option(help="AdamW's, on all other weights.")] = None,
    momentum: Annotated[str | None, typer.Option(help="In [0, 1).")] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    data: Data = None,
    validation: Validation = None,
    tokenizer: Tokenizer = None,
    ranks: Ranks = None,
    sets: Sets = None,
    device: Device = None,
    output: Output = Path("runs"),
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard logs into the run's folder.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-identical reruns on a GPU, slower.")
    ] = False,
    save_weights: Annotated[
        bool, typer.Option("--save-weights", help="Leave weights.pt in the run's folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train one model; started again, an interrupted run goes on where it was."""
    from . import training
    from .corpus import prepare
    from .display import tokenizing_bar, training_bar

    with _plainly():
        named = {
            "optimizer.name": optimizer,
            "optimizer.lr": lr,
            "optimizer.other_lr": other_lr,
            "optimizer.momentum": momentum,
            "training.steps": steps,
            "training.seed": seed,
            "training.deterministic": deterministic or None,
            "training.keep_weights": save_weights or None,
            **_data_options(data, validation, tokenizer, ranks),
        }
        config = _configured(preset(preset_name), named, sets)
        folder = output / config.key
        where = device_named(device)
        with tokenizing_bar() as tokenizing:
            corpus = prepare(config.data, progress=tokenizing)
        with _summary_writer(folder, tensorboard) as scalars, training_bar(config) as show:
            run = training.train(
                config, folder, device=where, corpus=corpus, show=show, scalars=scalars
            )
    if as_json:
        _say(_summary(run))
    else:
        typer.echo(f"{run.status}: {_loss(run)}, record in {folder} {run.message}".rstrip())
    if run.status == "diverged":
        raise typer.Exit(_DIVERGED)


@contextmanager
def _summary_writer(folder: Path, wanted: bool) -> Iterator[Any]:
    """TensorBoard's writer, closed at the end, or None."""
    if not wanted:
        yield None
        return
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ModuleNotFoundError:
        raise ValueError("--tensorboard needs it: pip install 'rankfold[lab]'") from None
    with module.SummaryWriter(folder / "tensorboard") as writer:
        yield writer


def _loss(run: records.Run) -> str:
    return f"validation loss {run.validation.last_mean(5):.4f} (last five)"


def _summary(run: records.Run) -> dict[str, Any]:
    loss = run.validation.last_mean(5)
    return {
        "key": run.key,
        "folder": str(run.folder),
        "status": run.status,
        "message": run.message,
        "steps": run.training.steps[-1] if run.training.steps else 0,
        "validation_loss": loss if math.isfinite(loss) else None,
        "config": run.config,
    }


def sweep(
    file: Annotated[str, typer.Argument(help="A TOML file, or the name of one that ships.")],
    sets: Sets = None,
    data: Data = None,
    validation: Validation = None,
    tokenizer: Tokenizer = None,
    ranks: Ranks = None,
    device: Device = None,
    workers: Workers = 1,
    engine: Annotated[
        str, typer.Option(help="processes, or ray for many machines with one shared folder.")
    ] = "processes",
    output: Output = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make all runs of a file: finished ones are skipped, interrupted ones go on."""
    from . import sweep as sweeping
    from .display import sweep_bar

    with _plainly():
        extra = _data_options(data, validation, tokenizer, ranks)
        extra = {name: value for name, value in extra.items() if value is not None}
        extra |= _pairs(sets)
        configs = sweeping.read_sweep(_sweep_file(file), extra)
        if dry_run:
            found = sweeping.statuses(configs, output)
            if as_json:
                _say(found)
            else:
                typer.echo(_listing(found))
            return
        _tokenize(configs)
        with sweep_bar(len(configs), quiet=as_json) as done:
            outcomes = sweeping.run_sweep(
                configs,
                output,
                device=str(device_named(device)),
                workers=workers,
                engine=engine,
                done=done,
            )
    if as_json:
        _say([dataclasses.asdict(outcome) for outcome in outcomes])
    _leave({outcome.status for outcome in outcomes})


def _tokenize(configs: list[RunConfig]) -> None:
    """Each text once, before several runs need it at the same time."""
    from .corpus import prepare
    from .display import tokenizing_bar

    with tokenizing_bar() as tokenizing:
        for data in dict.fromkeys(config.data for config in configs):
            # A text that is not there fails the runs that want it, and no other.
            with suppress(ValueError):
                prepare(data, progress=tokenizing)


def _listing(found: dict[str, str]) -> str:
    lines = [f"{status:>9}  {key}" for key, status in found.items()]
    return "\n".join([*lines, f"{len(found)} runs"])


def _leave(statuses: set[str]) -> None:
    if "failed" in statuses:
        raise typer.Exit(1)
    if "diverged" in statuses:
        raise typer.Exit(_DIVERGED)


def _sweep_file(name: str) -> Path:
    if Path(name).exists():
        return Path(name)
    shipped = {
        entry.name.removesuffix(".toml"): Path(str(entry))
        for entry in importlib.resources.files("rankfold.lab").joinpath("sweeps").iterdir()
    }
    if name in shipped:
        return shipped[name]
    raise FileNotFoundError(f"there is no file {name!r}; these ship: {', '.join(sorted(shipped))}")


def compare(
    preset_name: Preset = "tiny",
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: adamw and the five geometries.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    data: Data = None,
    validation: Validation = None,
    tokenizer: Tokenizer = None,
    ranks: Ranks = None,
    sets: Sets = None,
    device: Device = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: the cores, or 1 on a GPU.")
    ] = None,
    output: Output = Path("comparison"),
) -> None:
    """Train with AdamW and with the geometries, and write a report page."""
    from . import sweep as sweeping
    from .display import sweep_bar
    from .report import write_report

    with _plainly():
        named = {"training.steps": steps, **_data_options(data, validation, tokenizer, ranks)}
        configs = [
            _configured(preset(preset_name), {**_rates(preset_name, name), **named}, sets)
            for name in optimizer or ("adamw", *GEOMETRIES)
        ]
        configs = [c.with_options({"training.seed": s}) for c in configs for s in range(seeds)]
        where = str(device_named(device))
        _tokenize(configs)
        count = workers or (1 if where.startswith("cuda") else min(os.cpu_count() or 1, 4))
        runs = output / "runs"
        with sweep_bar(len(configs)) as done:
            outcomes = sweeping.run_sweep(configs, runs, device=where, workers=count, done=done)
        found = [records.read_run(runs / c.key) for c in configs if (runs / c.key).exists()]
        write_report(found, output, f"rankfold compare: {preset_name}")
    typer.echo(f"report: {output / 'index.html'}")
    _leave({outcome.status for outcome in outcomes})


def _rates(preset_name: str, optimizer: str) -> dict[str, Any]:
    """The optimizer at the learning rate it is compared at."""
    chosen: dict[str, Any] = {"optimizer.name": optimizer}
    if optimizer in GEOMETRIES:
        chosen["optimizer.lr"] = GEOMETRY_RATES[preset_name]
    return chosen


def report(
    runs: Annotated[Path, typer.Argument(help="A folder with runs in it, at any depth.")],
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the page.")] = Path(
        "report"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "rankfold report",
    as_json: AsJson = False,
) -> None:
    """Write one page that opens offline, its figures as SVG and PNG, and tables as CSV."""
    from .report import write_report

    with _plainly():
        if not runs.is_dir():
            raise FileNotFoundError(f"there is no folder {str(runs)!r}")
        found = records.read_runs(runs)
        if not found:
            raise ValueError(f"there are no runs in {runs}; make some with rankfold train or sweep")
        written = write_report(found, output, title)
    if as_json:
        _say([str(path) for path in written])
    else:
        typer.echo(f"{len(found)} runs, report: {output / 'index.html'}")


def inspect(
    run: Annotated[Path, typer.Argument(help="The folder of one run.")],
    as_json: AsJson = False,
) -> None:
    """Show what one run was told and how it went."""
    with _plainly():
        if not (run / records.CONFIG).exists():
            raise FileNotFoundError(f"there is no run in {str(run)!r}")
        found = records.read_run(run)
    if as_json:
        _say(_summary(found))
        return
    lines = [f"{found.key}: {found.status} {found.message}".rstrip(), f"  {_loss(found)}"]
    for group, options in found.config.items():
        lines.append(f"{group}: " + ", ".join(f"{k}={v}" for k, v in options.items()))
    for name, curve in found.diagnostics.items():
        lines.append(f"  {name}: {curve.values[-1]:.4g} at step {curve.steps[-1]}")
    typer.echo("\n".join(lines))


def check(
    geometry: Annotated[list[str] | None, typer.Argument(help="Default: all five.")] = None,
    grid: Annotated[tuple[int, int], typer.Option(help="Left and right factors.")] = (1, 1),
    as_json: AsJson = False,
) -> None:
    """Measure the properties that define a geometry: slopes, projections, gauge, dimension."""
    from ..diagnostics import check_geometry

    with _plainly():
        reports = [
            check_geometry(name, lefts=grid[0], rights=grid[1]) for name in geometry or GEOMETRIES
        ]
    if as_json:
        _say([{**dataclasses.asdict(each), "ok": each.ok} for each in reports])
    else:
        typer.echo("\n\n".join(map(str, reports)))
    if not all(each.ok for each in reports):
        raise typer.Exit(1)


# Each with examples for its help.
COMMANDS: dict[Callable[..., None], tuple[str, ...]] = {
    train: (
        "rankfold train --optimizer isometry-quotient --lr 2^-3",
        "rankfold train --preset paper --data texts/ --tokenizer gpt2 --set training.steps=200",
    ),
    sweep: (
        "rankfold sweep grid.toml --workers 2",
        "rankfold sweep paper-1-adamw --data texts/ --dry-run",
    ),
    compare: (
        "rankfold compare",
        "rankfold compare --preset paper-gqa --seeds 3 --data texts/ --steps 1000",
    ),
    report: ("rankfold report runs --output report",),
    inspect: ("rankfold inspect runs/mha-adamw-s0-0123456789",),
    check: ("rankfold check isometry-quotient --grid 2 3",),
}
