"""Folders of the published runs, so that a contest goes on from them and makes none again.

    python benchmarks/contest/restore.py comparison/runs
    rankfold compare --contest --preset paper --output comparison --data data/enwiki-train.txt.xz \
        --validation data/enwiki-val.txt.xz --tokenizer gpt2 --ranks data/gpt2.tiktoken

A run is known by its configuration, and that has the paths of its texts, which are those above.
What is restored of a run is its setting and its last losses: all that a contest goes by.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from rankfold.lab import records
from rankfold.lab.config import RunConfig, preset
from rankfold.lab.contest import MODELS, SETUPS

RUNS = Path(__file__).with_name("runs.csv")
TEXTS = {
    "data.source": "data/enwiki-train.txt.xz",
    "data.validation": "data/enwiki-val.txt.xz",
    "data.tokenizer": "gpt2",
    "data.ranks": "data/gpt2.tiktoken",
}


def common(row: Mapping[str, str]) -> RunConfig:
    """What a row's run is told where the row has no column for it."""
    suffix, _ = MODELS["gqa" if row["model.kv_heads"] == "1" else "mha"]
    return preset(f"paper{suffix}").with_options({**SETUPS["paper"].options, **TEXTS})


def config_of(row: Mapping[str, str]) -> RunConfig:
    """The configuration of a row; raises if its key is not the row's."""
    given = {name: value for name, value in row.items() if "." in name}
    given |= {"training.steps": row["steps"], "training.seed": row["seed"]}
    config = common(row).with_options(given)
    if config.key != row["run"]:
        raise ValueError(f"{row['run']} is not the run of its options, which is {config.key}")
    return config


def published(table: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns of the table, and its rows."""
    with table.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def restore(root: Path, table: Path = RUNS) -> int:
    """Write the folders of all published runs below ``root``; returns how many."""
    _, rows = published(table)
    for row in rows:
        config = config_of(row)
        folder, step = root / config.key, int(row["steps"])
        folder.mkdir(parents=True, exist_ok=True)
        records.write_json(folder / records.CONFIG, {"key": config.key, "config": config.as_dict()})
        recorder = records.Recorder(folder, 0)
        for kind, column in (("train", "training_loss"), ("validation", "loss")):
            if row[column]:  # a run that diverged may have none
                recorder.add(kind, step, loss=float(row[column]))
        recorder.close()
        status = {"status": row["status"], "message": "", "machine": {"device": "NVIDIA H200"}}
        records.write_json(folder / records.STATUS, status)
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="folder of the runs, OUTPUT/runs of a contest")
    sys.stdout.write(f"{restore(parser.parse_args().root)} runs restored\n")
