"""The laboratory's part of the command line; what each command does is elsewhere."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..devices import device_named
from ..geometries import GEOMETRIES
from . import records
from .comparing import compare
from .config import in_effect, preset
from .options import (
    DIVERGED,
    AsJson,
    Data,
    Device,
    Output,
    Preset,
    Ranks,
    Sets,
    Tokenizer,
    Validation,
    Workers,
    configured,
    counted,
    data_options,
    leave,
    pairs,
    plainly,
    say,
    tokenize,
)
from .statistics import final_loss


def train(
    preset_name: Preset = "tiny",
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Of the attention weights: adamw, muon, whitened, dion, frozen, recommended or a "
            "geometry."
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

    with plainly():
        named = {
            "optimizer.name": optimizer,
            "optimizer.lr": lr,
            "optimizer.other_lr": other_lr,
            "optimizer.momentum": momentum,
            "training.steps": steps,
            "training.seed": seed,
            "training.deterministic": deterministic or None,
            "training.keep_weights": save_weights or None,
            **data_options(data, validation, tokenizer, ranks),
        }
        config = configured(preset(preset_name), named, sets)
        folder = output / config.key
        where = device_named(device)
        with tokenizing_bar() as tokenizing:
            corpus = prepare(config.data, progress=tokenizing)
        with _summary_writer(folder, tensorboard) as scalars, training_bar(config) as show:
            run = training.train(
                config, folder, device=where, corpus=corpus, show=show, scalars=scalars
            )
    if as_json:
        say(_summary(run))
    else:
        advice = f"; {run.message}" if run.message else ""
        typer.echo(f"{run.status}: {_loss(run)}, record in {folder}{advice}")
    if run.status == "diverged":
        raise typer.Exit(DIVERGED)


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
    return f"validation loss {final_loss(run):.4f} (last five)"


def _summary(run: records.Run) -> dict[str, Any]:
    return {
        "key": run.key,
        "folder": str(run.folder),
        "status": run.status,
        "message": run.message,
        "steps": run.training.steps[-1] if run.training.steps else 0,
        "validation_loss": final_loss(run),
        "config": _in_effect(run),
    }


def _in_effect(run: records.Run) -> dict[str, dict[str, Any]]:
    """The run's options as they come to, where its optimizer has values of its own."""
    optimizer = run.config["optimizer"]["name"]
    return {
        group: {name: in_effect(f"{group}.{name}", x, optimizer) for name, x in options.items()}
        for group, options in run.config.items()
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

    with plainly():
        extra = data_options(data, validation, tokenizer, ranks)
        extra = {name: value for name, value in extra.items() if value is not None}
        extra |= pairs(sets)
        configs = sweeping.read_sweep(_sweep_file(file), extra)
        if dry_run:
            found = sweeping.statuses(configs, output)
            if as_json:
                say(found)
            else:
                typer.echo(_listing(found))
            return
        tokenize(configs)
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
        say([dataclasses.asdict(outcome) for outcome in outcomes])
    leave({outcome.status for outcome in outcomes})


def _listing(found: dict[str, str]) -> str:
    lines = [f"{status:>9}  {key}" for key, status in found.items()]
    return "\n".join([*lines, counted(len(found), "run")])


def _sweep_file(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    shipped = {
        entry.name.removesuffix(".toml"): Path(str(entry))
        for entry in importlib.resources.files("rankfold.lab").joinpath("sweeps").iterdir()
    }
    if name in shipped:
        return shipped[name]
    raise FileNotFoundError(f"there is no file {name!r}; these ship: {', '.join(sorted(shipped))}")


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

    with plainly():
        if not runs.is_dir():
            raise FileNotFoundError(f"there is no folder {str(runs)!r}")
        unreadable: list[Path] = []
        found = [records.as_it_stands(run) for run in records.read_runs(runs, unreadable.append)]
        for folder in unreadable:
            typer.echo(f"left out, as its record cannot be read: {folder}", err=True)
        if not found:
            raise ValueError(f"there are no runs in {runs}; make some with rankfold train or sweep")
        written = write_report(found, output, title)
    if as_json:
        say([str(path) for path in written])
    else:
        typer.echo(f"{counted(len(found), 'run')}, report: {output / 'index.html'}")


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with a transformers config.json, module:factory, or a run's folder."
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Measure gradients on this many sequences of random tokens."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the products of a model, what is left out and why; or how a run went."""
    from .. import inspection
    from .inspecting import model_named, token_loss

    with plainly():
        if records.is_run(Path(model)):
            if batch is not None:
                raise ValueError("--batch is for models, and this is the folder of a run")
            _show_run(Path(model), as_json)
            return
        built = model_named(model, real=batch is not None)
        seen = inspection.inspect(built, None if batch is None else token_loss(built, batch))
    if as_json:
        say(seen.as_dict())
    else:
        typer.echo(str(seen))


def _show_run(folder: Path, as_json: bool) -> None:
    found = records.read_run(folder)
    found = dataclasses.replace(found, status=records.standing(folder))
    if as_json:
        say(_summary(found))
        return
    lines = [f"{found.key}: {found.status} {found.message}".rstrip(), f"  {_loss(found)}"]
    for group, options in _in_effect(found).items():
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

    with plainly():
        reports = [
            check_geometry(name, lefts=grid[0], rights=grid[1]) for name in geometry or GEOMETRIES
        ]
    if as_json:
        say([{**dataclasses.asdict(each), "ok": each.ok} for each in reports])
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
        "rankfold compare --contest",
        "rankfold compare --contest --preset paper --models mha,gqa --steps 1000 --data texts/",
    ),
    report: ("rankfold report runs --output report",),
    inspect: (
        "rankfold inspect models/llama --batch 4",
        "rankfold inspect my_package.models:build --json",
        "rankfold inspect runs/mha-adamw-s0-0123456789",
    ),
    check: ("rankfold check isometry-quotient --grid 2 3",),
}
