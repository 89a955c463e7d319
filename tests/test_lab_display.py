"""What is shown while a run is made."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from rankfold.lab.display import training_bar
from rankfold.lab.training import Progress

from .lab_runs import small


def test_a_narrow_terminal_shows_how_far_a_run_is(tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=60, color_system=None)
    with training_bar(small(tmp_path), console) as show:
        show(Progress("key", 7, 30, 2.5, 2.5, 1e5, 0.5))
    (*_, line) = (each for each in re.split(r"[\r\n]+", shown.getvalue()) if "/30" in each)
    line = re.sub(r"\x1b\[[\d?;]*[a-zA-Z]", "", line)
    assert re.match(r" 7/30 --:-- [━╸╺ ]+ adamw · loss 2\.5", line)
    assert len(line) <= 60
    assert line.rstrip().endswith("…")
