"""What the command does once its options are understood."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import AttentionCase, Case, WholeStep, report, run, time_whole_steps


def bench(
    cases: Sequence[Case],
    device: torch.device,
    *,
    geometries: Sequence[str],
    momenta: Sequence[float],
    modes: Sequence[str],
    literal: bool = True,
    rivals: bool = True,
    repeats: int = 20,
    whole_step: bool = False,
    output: Path | None = None,
) -> None:
    """Time each case, print its tables, and write the files if a folder is given."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where events and graphs are made
    if output is not None:
        report.make_folder(output)  # whether it can be is not found out after all has been timed
    finished = []
    for case in cases:
        whole_steps: list[WholeStep] = []
        with report.progress_bar() as progress:
            results = run(
                case,
                device,
                geometries=geometries,
                momenta=momenta,
                modes=modes,
                literal=literal,
                rivals=rivals,
                repeats=repeats,
                progress=progress,
            )
            if whole_step and isinstance(case, AttentionCase):
                whole_steps = time_whole_steps(
                    case,
                    device,
                    geometries=geometries,
                    momenta=momenta,
                    modes=modes,
                    repeats=repeats,
                    progress=progress,
                )
        report.show(results, whole_steps)
        finished.append((results, whole_steps))
    if output is not None:
        options = {
            "geometries": list(geometries),
            "momenta": list(momenta),
            "modes": list(modes),
            "repeats": repeats,
        }
        for line in report.write(output, finished, options):
            sys.stdout.write(line + "\n")
