"""`rankfold compare`: a few optimizers side by side, or the contest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..defaults import RECOMMENDED_NAME
from ..devices import device_named
from ..geometries import GEOMETRIES
from . import records
from .config import COMPARED_AT, RunConfig, preset
from .options import (
    Data,
    Device,
    Output,
    Preset,
    Ranks,
    Sets,
    Tokenizer,
    Validation,
    configured,
    data_options,
    leave,
    pairs,
    plainly,
    tokenize,
)

if TYPE_CHECKING:
    from .contest import Contest
    from .sweep import More, Outcome

_ONLY = ("tune", "final", "report")


def compare(
    preset_name: Preset = "tiny",
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable. Default: adamw, muon, the five geometries, recommended."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many, from 0 on. Default: 1, of a contest 3 or 8."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Of training; several in a contest, like 1000,10000.")
    ] = None,
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
    contest: Annotated[
        bool, typer.Option("--contest", help="Tune every method alike, then compare.")
    ] = False,
    models: Annotated[
        str | None, typer.Option(help="Of the contest: some of mha,gqa,rope.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Of the contest, with commas in between.")
    ] = None,
    annealing: Annotated[str | None, typer.Option(help="Of the contest: none,linear.")] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(help="Of the contest: compare on --seeds from this one on, not from 0."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help=f"A part of the contest: {', '.join(_ONLY)}.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the contest has to run.")
    ] = False,
) -> None:
    """Train with AdamW, Muon and all of ours, or hold the contest, and write a report page."""
    from .report import write_report

    named = data_options(data, validation, tokenizer, ranks)
    of_the_contest = {"models": models, "methods": methods, "annealing": annealing, "only": only}
    with plainly():
        if contest:
            if optimizer:
                raise ValueError("a contest has --methods and no --optimizer")
            given = {name: value for name, value in named.items() if value is not None}
            held = _contest(
                preset_name, steps, seeds, first_seed or 0, of_the_contest, given | pairs(sets)
            )
            if dry_run:
                from .contest_report import standing

                typer.echo(standing(held, output / "runs"))
            else:
                _hold(held, output, device, workers, only)
            return
        others = ("first-seed", first_seed), ("dry-run", dry_run or None)
        for name, value in (*of_the_contest.items(), *others):
            if value is not None:
                raise ValueError(f"--{name} is an option of --contest")
        if "training.seed" in pairs(sets):
            raise ValueError("seeds are those from 0 on, as many as --seeds says")
        configs = [
            configured(
                preset(preset_name),
                {**_compared(preset_name, name), **named, "training.steps": steps},
                sets,
            )
            for name in optimizer or ("adamw", "muon", *GEOMETRIES, RECOMMENDED_NAME)
        ]
        seeded = (c.with_options({"training.seed": s}) for c in configs for s in range(seeds or 1))
        # A run that is named twice is one run: two would wait for each other's folder.
        configs = list({config.key: config for config in seeded}.values())
        outcomes = _make(configs, output / "runs", device, workers)
        found = records.read_runs_of(configs, output / "runs")
        write_report(found, output, f"rankfold compare: {preset_name}")
    typer.echo(f"report: {output / 'index.html'}")
    leave({outcome.status for outcome in outcomes})


def _make(
    configs: list[RunConfig],
    root: Path,
    device: str | None,
    workers: int | None,
    more: More = list,
) -> list[Outcome]:
    from .display import sweep_bar
    from .sweep import run_sweep

    where = str(device_named(device))
    tokenize(configs)
    count = workers or (1 if where.startswith("cuda") else min(os.cpu_count() or 1, 4))
    with sweep_bar(len(configs)) as done:
        return run_sweep(configs, root, device=where, workers=count, done=done, more=more)


def _compared(preset_name: str, optimizer: str) -> dict[str, Any]:
    """The optimizer, at the options it is compared at."""
    told = {"name": optimizer, **COMPARED_AT[preset_name].get(optimizer, {})}
    return {f"optimizer.{name}": value for name, value in told.items()}


def _contest(
    preset_name: str,
    steps: str | None,
    seeds: int | None,
    first_seed: int,
    chosen: dict[str, str | None],
    extra: dict[str, Any],
) -> Contest:
    """What the options ask for, the preset's set-up where they ask for nothing."""
    from .contest import SETUPS, Contest

    if chosen["only"] not in (None, *_ONLY):
        raise ValueError(f"--only is one of {', '.join(_ONLY)}, not {chosen['only']!r}")
    if preset_name not in SETUPS:
        raise ValueError(f"a contest has preset {' or '.join(SETUPS)}, not {preset_name!r}")
    usual = SETUPS[preset_name]

    def words(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
        return default if given is None else tuple(dict.fromkeys(given.split(",")))

    try:
        horizons = tuple(int(each) for each in words(steps, ())) or usual.steps
    except ValueError:
        raise ValueError(f"--steps is like 1000,10000, not {steps!r}") from None
    return Contest(
        preset_name,
        methods=words(chosen["methods"], usual.methods),
        models=words(chosen["models"], usual.models),
        steps=horizons,
        seeds=seeds or usual.seeds,
        annealings=words(chosen["annealing"], usual.annealings),
        extra=extra,
        first_seed=first_seed,
    )


def _hold(
    contest: Contest, output: Path, device: str | None, workers: int | None, only: str | None
) -> None:
    from .contest import run_contest
    from .contest_report import write_contest

    root = output / "runs"
    outcomes = []
    if only != "report":
        outcomes = run_contest(
            contest, root, lambda runs, more: _make(runs, root, device, workers, more), only
        )
    results = write_contest(contest, root, output)
    for result in results:
        typer.echo(f"{result.cell.label}: {result.verdict}")
    typer.echo(f"report: {output / 'index.html'}, tuning: {output / 'tuning' / 'index.html'}")
    # A rate that diverges is a finding of tuning; in the comparison the report shows it.
    leave({outcome.status for outcome in outcomes} - {"diverged"})
