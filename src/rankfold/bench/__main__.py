"""``python -m rankfold.bench``: the command ``rankfold bench``, or a part of it without typer."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

from . import MODES, MOMENTA, OURS, PRESETS, check_modes, default_modes
from .command import bench


def main() -> None:
    """Hand over to the full command where typer is installed."""
    if importlib.util.find_spec("typer") is not None:
        from ..cli import app

        app(["bench", *sys.argv[1:]], prog_name="rankfold")
        return
    parser = argparse.ArgumentParser(
        prog="rankfold.bench", epilog="All options: pip install 'rankfold[bench]'"
    )
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--momentum", action="append", type=float)
    parser.add_argument("--no-literal", action="store_true")
    parser.add_argument("--whole-step", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    modes = given.mode or default_modes(device)
    try:
        check_modes(modes, device)
    except ValueError as error:
        parser.error(str(error))
    bench(
        [PRESETS[name] for name in given.preset or ["paper-mha"]],
        device,
        geometries=OURS,
        momenta=given.momentum or MOMENTA,
        modes=modes,
        literal=not given.no_literal,
        whole_step=given.whole_step,
        output=given.output,
    )


if __name__ == "__main__":
    main()
