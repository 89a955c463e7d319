"""The script of looks: what it calls the step of the library is that, and all others are steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rankfold import RiemannianSGD
from rankfold.lab import optimizers
from rankfold.lab.config import preset
from rankfold.lab.sweep import run_sweep

from .contest_runs import contest_script
from .heads import Heads

looks = contest_script("looks")


def looked(model: Heads, look: Any) -> Any:
    return looks.Looked(
        look, [model.grid()], 0.01, momentum=look.momentum, weight_decay=0.0, masters=True
    )


@pytest.mark.parametrize("lefts", [1, 2])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain", {}),
        ("tilted", {"tilt": 0.25, "row_balance": 0.5}),
        ("unit-product", {"tilt": 0.25, "row_balance": 0.5, "momentum_form": "unit-smoothing"}),
    ],
)
def test_the_first_step_is_the_library_s(name: str, told: dict[str, Any], lefts: int) -> None:
    """Later ones have momenta of other vectors."""
    ours, theirs = (Heads(torch.float64, lefts=lefts) for _ in range(2))
    optimizer = RiemannianSGD(
        [theirs.grid()],
        0.01,
        geometry="fixed-quotient",
        normalize="whitened",
        momentum=0.8,
        nesterov=True,
        growth=0.5,
        **told,
    )
    for model, step in ((ours, looked(ours, looks.LOOKS[name])), (theirs, optimizer)):
        model.backward()
        step.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", looks.LOOKS)
def test_every_look_learns(name: str) -> None:
    model = Heads(torch.float64, lefts=2)
    optimizer = looked(model, looks.LOOKS[name])
    losses = model.run(optimizer, 8)
    assert losses == sorted(losses, reverse=True)


def test_what_can_be_set() -> None:
    look = looks.changed(looks.LOOKS["tilted"], ["v=2", "unit=factor", "fade=true"])
    assert (look.v, look.unit, look.fade, look.tilt) == (2, "factor", True, 0.25)
    with pytest.raises(SystemExit, match="a look has no 'lr'; there are after, balance"):
        looks.changed(look, ["lr=2"])
    config = looks.config_of("mha", look, 10000, 100)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.vo_rate, optimizer.output_rate) == (2**-8, 8, 2)


def test_runs_go_by_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizers._RIVALS, "whitened", optimizers._RIVALS["whitened"])
    given = {"training.steps": 2, "training.annealing": "linear", "optimizer.name": "whitened"}
    rates = {"optimizer.vo_rate": 4.0, "optimizer.output_rate": 2.0, "optimizer.weight_decay": 0.0}
    config = preset("tiny").with_options({**given, **rates})
    found = []
    for name in ("tilted", "value-output", "plain"):
        looks.use(looks.LOOKS[name])
        found += [outcome.loss for outcome in run_sweep([config], tmp_path / name, device="cpu")]
    assert len(set(found)) == 3
    assert all(0 < loss < 10 for loss in found)
