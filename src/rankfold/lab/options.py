"""What several commands have in common: their options, and how they fail."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import PRESETS, RunConfig

DIVERGED = 3  # exit codes: 0 all went well, 1 something failed, 2 wrong usage, 3 a run diverged

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
def plainly() -> Iterator[None]:
    """Errors of use, and of files and folders, as one sentence, without a traceback."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        message = str(error)
    except OSError as error:
        # The system's own have a number, and a message that begins with it.
        named = error.filename is not None and error.strerror
        message = f"{error.filename}: {error.strerror}" if named else str(error)
    else:
        return
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)


def counted(number: int, what: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def configured(start: RunConfig, named: dict[str, Any], sets: list[str] | None) -> RunConfig:
    """``start`` with the options that are given by name, and then those of ``--set``."""
    options = {name: value for name, value in named.items() if value is not None}
    return start.with_options({**options, **pairs(sets)})


def pairs(sets: list[str] | None) -> dict[str, str]:
    """The options of ``--set``."""
    found = {}
    for each in sets or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--set wants group.name=value, not {each!r}")
        found[name] = value
    return found


def data_options(
    data: str | None, validation: str | None, tokenizer: str | None, ranks: str | None
) -> dict[str, Any]:
    """Options of the data by their names, None where they are not given."""
    return {
        "data.source": data,
        "data.validation": validation,
        "data.tokenizer": tokenizer,
        "data.ranks": ranks,
    }


def say(value: object) -> None:
    """JSON for a script, which has no NaN or infinity: null stands for them."""
    sys.stdout.write(json.dumps(_with_null(value), indent=1, allow_nan=False) + "\n")


def _with_null(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _with_null(each) for name, each in value.items()}
    return list(map(_with_null, value)) if isinstance(value, list | tuple) else value


def tokenize(configs: list[RunConfig]) -> None:
    """Each text once, before several runs need it at the same time."""
    from .corpus import prepare
    from .display import tokenizing_bar

    with tokenizing_bar() as tokenizing:
        for data in dict.fromkeys(config.data for config in configs):
            # A text that is not there fails the runs that want it, and no other.
            with suppress(ValueError):
                prepare(data, progress=tokenizing)


def leave(statuses: set[str]) -> None:
    """With the exit code of what became of the runs."""
    if "failed" in statuses:
        raise typer.Exit(1)
    if "diverged" in statuses:
        raise typer.Exit(DIVERGED)
