"""Runs of a contest that have ended, finished or diverged, added to the published ones.

    python benchmarks/contest/publish.py comparison/runs

Rows that are there stay as they are, whatever the folder has of their runs. An option that a new
run has of its own and the table has no column for gets one, in which other rows have what all runs
of the contest are told. Texts get none: they are those of restore.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from rankfold.lab import records
from rankfold.lab.config import DEFAULTS
from rankfold.lab.statistics import final_loss, flat_options
from rankfold.lab.tables import write_csv

sys.path.insert(0, str(Path(__file__).parent))
from restore import RUNS, common, config_of, published

_OUTCOME = ("seed", "status", "steps", "training_loss", "loss")


def publish(root: Path, table: Path = RUNS) -> int:
    """Add the runs below ``root`` to the table; returns how many."""
    columns, rows = published(table)
    known = {row["run"] for row in rows}
    ended = [run for run in records.read_runs(root) if run.status in ("finished", "diverged")]
    new = [_row(run) for run in ended if run.key not in known]
    told = {name for row in new for name in _unlike_others(row)}.union(columns)
    names = (f"{group}.{name}" for group, options in DEFAULTS.items() for name in options)
    columns = ["run", *(name for name in names if name in told), *_OUTCOME]
    whole = [{**_usual(row), **row} for row in (*rows, *new)]
    shown = [{name: row[name] for name in columns} for row in whole]
    for row in shown:
        config_of(row)  # raises where the run could not be restored
    shown.sort(key=lambda row: row["run"])
    write_csv(table, [columns, *(list(row.values()) for row in shown)])
    return len(new)


def _row(run: records.Run) -> dict[str, str]:
    """All options of a run and what came out of it; steps are those it was to make."""
    training = run.config["training"]
    options = {name: str(value) for name, value in flat_options(run).items()}
    trained, loss = run.training.last_mean(1), final_loss(run)
    numbers = [str(x) if math.isfinite(x) else "" for x in (trained, loss)]
    outcome = [str(training["seed"]), run.status, options.pop("training.steps"), *numbers]
    return {"run": run.key, **options, **dict(zip(_OUTCOME, outcome, strict=True))}


def _usual(row: Mapping[str, str]) -> dict[str, str]:
    """What runs of its model are told where nothing else is said."""
    return {
        f"{group}.{name}": str(value)
        for group, options in common(row).as_dict().items()
        for name, value in options.items()
    }


def _unlike_others(row: Mapping[str, str]) -> list[str]:
    """The options it has of its own; raises where these are its texts."""
    unlike = [name for name, usual in _usual(row).items() if row.get(name, usual) != usual]
    texts = [name for name in unlike if name.startswith("data.") and name != "data.shuffle"]
    if texts:
        raise ValueError(
            f"{row['run']} has another {' and '.join(texts)} than the published runs: give a "
            "folder of runs that were made as restore.py says"
        )
    return unlike


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="folder of the runs, OUTPUT/runs of a contest")
    sys.stdout.write(f"{publish(parser.parse_args().root)} runs added\n")
