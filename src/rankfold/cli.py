"""The command line: the benchmark here, the laboratory in `rankfold.lab.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        "the rankfold command needs typer and rich: pip install 'rankfold[bench]'"
    ) from error

from . import __version__
from .bench import MOMENTA, OURS, PRESETS, Case, check_modes, default_modes, stacked_case
from .bench import command as bench_command
from .devices import device_named
from .lab.commands import COMMANDS
from .lab.options import plainly

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for _command, _examples in COMMANDS.items():
    # The backspace keeps click from filling the lines up.
    app.command(epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in _examples))(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankfold {__version__}")
        raise typer.Exit


@app.callback()
def _rankfold(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Riemannian optimization of rank-factored parameters W = A Bᵀ."""


@app.command()
def bench(
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PRESETS)}; repeatable. Default: paper-mha."),
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="By hand: how many pairs or grids.")] = None,
    rows: Annotated[int | None, typer.Option(help="By hand: rows of a left factor.")] = None,
    columns: Annotated[
        int | None, typer.Option(help="By hand: rows of a right factor. Default: --rows.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="By hand: columns of every factor.")] = None,
    lefts: Annotated[int | None, typer.Option(help="By hand: left factors of a grid.")] = None,
    rights: Annotated[int | None, typer.Option(help="By hand: right factors of a grid.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda if there is one.")] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable. Default: all five, and recommended."),
    ] = None,
    momentum: Annotated[
        list[float] | None, typer.Option(help="Repeatable. Default: 0 and 0.9.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="eager, compiled or graph; repeatable. Default: eager; on CUDA graph."),
    ] = None,
    rivals: Annotated[
        bool, typer.Option(help="Time Muon, geoopt and PEFT; AdamW is always there.")
    ] = True,
    literal: Annotated[
        bool, typer.Option(help="Time the paper's own steps, by QR and SVD.")
    ] = True,
    whole_step: Annotated[
        bool, typer.Option("--whole-step", help="Time the preset's whole training step as well.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats the median is over.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for CSV, PNG and JSON.")
    ] = None,
) -> None:
    """Time the ten algorithms, and what is recommended, against other optimizers."""
    where = _device(device)
    modes = mode or list(default_modes(where))
    try:
        check_modes(modes, where)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mode") from None
    for name in geometry or ():
        if name not in OURS:
            known = ", ".join(OURS)
            raise typer.BadParameter(f"{name!r}; there are {known}", param_hint="--geometry")
    for value in momentum or ():
        if not 0 <= value < 1:
            raise typer.BadParameter(f"{value} is not in [0, 1)", param_hint="--momentum")
    by_hand = {
        "--pairs": pairs,
        "--rows": rows,
        "--columns": columns,
        "--rank": rank,
        "--lefts": lefts,
        "--rights": rights,
    }
    cases = _cases(preset, {name: size for name, size in by_hand.items() if size is not None})
    if whole_step and not preset and any(size is not None for size in by_hand.values()):
        raise typer.BadParameter("a whole step needs a --preset", param_hint="--whole-step")
    if threads is not None:
        torch.set_num_threads(threads)
    with plainly():
        bench_command.bench(
            cases,
            where,
            geometries=geometry or OURS,
            momenta=MOMENTA if momentum is None else momentum,
            modes=modes,
            literal=literal,
            rivals=rivals,
            repeats=repeats,
            whole_step=whole_step,
            output=output,
        )


def _device(name: str | None) -> torch.device:
    try:
        return device_named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None


def _cases(presets: list[str] | None, sizes: dict[str, int]) -> list[Case]:
    """The presets, or the case whose sizes were given by hand."""
    if not sizes:
        for name in presets or ():
            if name not in PRESETS:
                known = ", ".join(PRESETS)
                raise typer.BadParameter(f"{name!r}; there are {known}", param_hint="--preset")
        return [PRESETS[name] for name in presets or ["paper-mha"]]
    if presets:
        given = " ".join(sizes)
        raise typer.BadParameter(f"sizes are given by hand too: {given}", param_hint="--preset")
    missing = [name for name in ("--pairs", "--rows", "--rank") if name not in sizes]
    if missing:
        raise typer.BadParameter(f"sizes by hand need {', '.join(missing)} as well")
    try:
        return [
            stacked_case(
                sizes["--pairs"],
                sizes["--rows"],
                sizes.get("--columns", sizes["--rows"]),
                sizes["--rank"],
                sizes.get("--lefts", 1),
                sizes.get("--rights", 1),
            )
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def main() -> None:
    """The entry point of the command."""
    try:
        app(prog_name="rankfold")
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            typer.echo("interrupted; the same command goes on with runs that were begun", err=True)
        raise
