"""Looks at changed steps: single runs beside the contest, with code that is quick to change.

    python benchmarks/contest/looks.py mha tilted unit
    python benchmarks/contest/looks.py gqa tilted --steps 10000 --set v=2     # values twice as fast

`Look` says what can be changed, `LOOKS` has names for what docs/lab.md has tables of. A step here
is the whitened one of fixed-quotient in a plain form: momentum is of the factors' own gradients,
and nothing is transported. Losses are printed and kept below ``--output``; the texts are those of
restore.py, and the models those of the contest, in CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankfold import tall
from rankfold.defaults import is_value_output
from rankfold.factors import Grid
from rankfold.geometries import Pair
from rankfold.lab import optimizers
from rankfold.lab.config import RunConfig, preset
from rankfold.lab.contest import MODELS, SETUPS, TUNING_SEED, Losses
from rankfold.lab.muon import Whitened
from rankfold.lab.sweep import run_sweep
from rankfold.linalg import Cholesky, cholesky_pair
from rankfold.schatten import inverse_root
from rankfold.stacks import Buffers, itself
from rankfold.whitening import Manner, whiten

sys.path.insert(0, str(Path(__file__).parent))
from restore import TEXTS

# Of query·key products, values and outputs.
RATES = {
    ("mha", 1000): (2**-7, 2**-5, 2**-3),
    ("mha", 10000): (2**-8, 2**-6, 2**-4),
    ("gqa", 1000): (2**-6.5, 2**-5.5, 2**-4.5),
    ("gqa", 10000): (2**-7, 2**-6, 2**-5),
}
_FLOOR = 1e-7
_SMALLEST_ROOT = 2.0**-12


@dataclass(frozen=True)
class Look:
    """What a step does differently.

    ``tilt`` and ``balance`` are of ``products`` ("all", "qk" or "vo") and ``side`` ("both", "left",
    "right"), and with ``fade`` go as the learning rate does. ``running`` divides rows by a running
    mean of their squares with this weight of the old, to the power ``power``. ``unit`` divides
    gradients by their norms before they go into the momentum, by "factor" or "product". In place of
    nesterov, ``newest`` of the newest gradient is mixed in; the momentum can go in a line to
    ``last_momentum``, and directions can be smoothed ``after`` they are made. ``cautious`` leaves
    out rows that go against their gradient. ``spectral`` lets each singular direction grow by its
    own size. The rest multiplies learning rates.
    """

    tilt: float = 0.25
    balance: float = 0.5
    products: str = "all"
    side: str = "both"
    fade: bool = False
    growth: float = 0.5
    spectral: bool = False
    unit: str = ""
    momentum: float = 0.8
    last_momentum: float = 0.0
    newest: float = 0.0
    running: float = 0.0
    power: float = 0.5
    after: float = 0.0
    cautious: bool = False
    rate: float = 1.0
    qk: float = 1.0
    v: float = 1.0
    o: float = 1.0


LOOKS = {
    "plain": Look(tilt=0, balance=0),
    "tilted": Look(),
    "unit": Look(unit="factor"),
    "unit-product": Look(unit="product"),
    "query-key": Look(products="qk"),
    "value-output": Look(products="vo"),
    "value-output-unit": Look(products="vo", unit="factor"),
    "left": Look(side="left"),
    "right": Look(side="right"),
    "tilt-eighth": Look(tilt=0.125),
    "balance-one": Look(balance=1),
    "no-growth": Look(growth=0),
    "running": Look(balance=0, running=0.95),
    "running-root": Look(balance=0, running=0.95, power=0.25),
    "cautious": Look(cautious=True),
    "slow-with-newest": Look(momentum=0.9, newest=0.3),
    "rising-momentum": Look(momentum=0.6, last_momentum=0.9),
    "falling-momentum": Look(momentum=0.9, last_momentum=0.6),
    "after": Look(momentum=0.6, after=0.5, rate=1.4),
    "spectral": Look(products="vo", unit="product", spectral=True),
    "fading": Look(unit="product", fade=True),
}


class Looked(Whitened):
    """The step of a `Look`, recorded in a graph like any other."""

    def __init__(self, look: Look, grids: Sequence[Grid], *args: Any, **options: Any) -> None:
        super().__init__(grids, *args, **options)
        self.look, self.full_rate = look, float(self.lr)
        here = look.products in ("all", "vo" if is_value_output(grids[0]) else "qk")
        there = (here and look.side != "right", here and look.side != "left")
        self.manners = [Manner(_FLOOR, look.tilt * on, look.balance * on) for on in there]
        sides = [side for stack in self.plan.stacks for side in stack.read(self.momenta)]
        self.smoothed = [torch.zeros_like(x) for x in sides if look.after]
        self.squares = [torch.zeros_like(x[..., :1]) for x in sides if look.running]
        self.weight = torch.zeros_like(sides[0][0, 0, 0, 0])
        self.gradients: Buffers = {}

    @property
    def left_of_rate(self) -> Any:
        """From 1 to 0 in the course of a run with linear annealing."""
        return self.lr / self.full_rate

    def _take_in(self, moved: Buffers) -> None:
        look = self.look
        self.gradients = {k: x.clone() for k, x in moved.items()} if look.cautious else {}
        if look.unit:
            self._divide_by_norms(moved)
        nu = look.momentum
        if look.last_momentum:
            nu = look.last_momentum + (nu - look.last_momentum) * self.left_of_rate
        for k, x in moved.items():
            self.momenta[k].add_((1 - nu) * (x - self.momenta[k]))
            x.add_(((1 - look.newest) if look.newest else nu) * (self.momenta[k] - x))

    def _divide_by_norms(self, moved: Buffers) -> None:
        weights = self.masters or self.plan.gather(itself)
        for stack in self.plan.stacks:
            sides = list(stack.read(moved))
            if self.look.unit == "factor":
                norms = [torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True) for x in sides]
            else:
                of_a, of_b = _factored(stack.read(weights))
                roots = (of_b.inverse.mT, of_a.inverse.mT)
                parts = [x @ root[:, None] for x, root in zip(sides, roots, strict=True)]
                squares = sum(x.square().sum((1, 2, 3), keepdim=True) for x in parts)
                norms = [torch.as_tensor(squares).sqrt()] * 2
            left, right = (x / n.clamp_min(1e-12) for x, n in zip(sides, norms, strict=True))
            stack.write(moved, Pair(left, right))

    def _directions(self, moved: Buffers, weights: Buffers) -> list[Tensor]:
        found: list[Tensor] = []
        if self.look.running:
            self.weight.lerp_(torch.ones_like(self.weight), 1 - self.look.running)
        for stack in self.plan.stacks:
            a, b = stack.read(weights)
            of_a, of_b = _factored(Pair(a, b))
            core = of_a.lower.mT @ of_b.lower / (a.shape[1] * b.shape[1]) ** 0.5
            sides = list(stack.read(moved))
            own = list(stack.read(self.gradients)) if self.gradients else None
            for k, (cholesky, square) in enumerate(
                ((of_b, core.mT @ core), (of_a, core @ core.mT))
            ):
                root, size = self._weighed(cholesky.inverse, square)
                x = sides[k] @ root.mT[:, None]
                gradient = None if own is None else own[k] @ root.mT[:, None]
                direction = self._direction(x, k, sides[1 - k].shape[1], len(found), gradient)
                found.append((size * direction @ root[:, None]).flatten(0, 1))
        return found

    def _weighed(self, root: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """The root with what singular directions grow by, and what all grow by; σ² = ``square``."""
        mean = square.diagonal(dim1=-2, dim2=-1).mean(-1)
        if self.look.spectral:
            total = square.diagonal(dim1=-2, dim2=-1).sum(-1)
            power = square / total[:, None, None]
            for _ in range(2):  # to the power ¼, which is σ^½
                power = power @ inverse_root(power, torch.ones_like(total), _SMALLEST_ROOT)
            return total[:, None, None] ** 0.25 * power @ root, torch.ones_like(mean[0])
        return root, mean[:, None, None, None] ** (self.look.growth / 2)

    def _direction(
        self, x: Tensor, side: int, partners: int, place: int, gradient: Tensor | None
    ) -> Tensor:
        """Of X (batch, I, m, r), for one side of a stack; ``place`` is where its state is."""
        look = self.look
        direction = _whitened(x, partners, self.manners[side])
        length = _norm(direction)
        if look.fade:
            even, left = _whitened(x, partners, Manner(_FLOOR)), self.left_of_rate
            direction = even + (direction - even) * torch.as_tensor(left).clamp(max=1)
        if look.running:
            mean = self.squares[place]
            mean.lerp_(direction.square().mean(-1, keepdim=True), 1 - look.running)
            direction = direction * (mean / self.weight + 1e-12) ** -look.power
        if gradient is not None:
            direction = direction * ((gradient * direction).sum(-1, keepdim=True) > 0)
        direction = direction * (length / _norm(direction).clamp_min(_FLOOR))
        if look.after:
            direction = self.smoothed[place].lerp_(direction, 1 - look.after).clone()
        return direction


def _factored(point: Pair) -> tuple[Cholesky, Cholesky]:
    """Of the Gram matrices of both sides, their blocks below each other."""
    a, b = (tall.gram(x.flatten(1, 2)) for x in point)
    return cholesky_pair(a, b, damping=0.0)


def _whitened(x: Tensor, partners: int, manner: Manner) -> Tensor:
    rows, turn, _ = whiten(x, None, partners, manner)
    return tall.turn(rows, turn)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm


def use(look: Look) -> None:
    """Runs of the laboratory's "whitened" go by this look from here on."""
    kind = partial(Looked, look)
    optimizers._RIVALS["whitened"] = partial(optimizers._muon_kind, kind)


def config_of(model: str, look: Look, steps: int, seed: int) -> RunConfig:
    """One run of the contest's model."""
    qk, v, o = (look.rate * rate for rate in RATES[model, steps])
    qk, v, o = look.qk * qk, look.v * v, look.o * o
    return preset(f"paper{MODELS[model][0]}").with_options(
        {
            **SETUPS["paper"].options,
            **TEXTS,
            "optimizer.name": "whitened",
            "optimizer.momentum": look.momentum,
            "optimizer.lr": qk,
            "optimizer.vo_rate": v / qk,
            "optimizer.output_rate": o / v,
            "training.steps": steps,
            "training.seed": seed,
            "training.annealing": "linear",
        }
    )


def changed(look: Look, settings: Sequence[str]) -> Look:
    """With ``NAME=VALUE`` for some of its fields; values are JSON, or words."""
    known = {field.name for field in fields(Look)}
    given = dict(each.split("=", 1) for each in settings)
    for name in given.keys() - known:
        raise SystemExit(f"a look has no {name!r}; there are {', '.join(sorted(known))}")
    words = {"unit", "products", "side"}
    read: dict[str, Any] = {n: x if n in words else json.loads(x) for n, x in given.items()}
    return replace(look, **read)


def main() -> None:
    """Make the runs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted({model for model, _ in RATES}))
    parser.add_argument("looks", nargs="+", choices=list(LOOKS), metavar="LOOK")
    parser.add_argument("--steps", type=int, default=1000, choices=(1000, 10000))
    parser.add_argument("--seeds", default=str(TUNING_SEED), help="separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path, default=Path("looks"))
    parser.add_argument("--device", default="cuda")
    told = parser.parse_args()
    for seed in map(int, told.seeds.split(",")):  # the model of a seed is compiled once
        for name in told.looks:
            look = changed(LOOKS[name], told.set)
            config = config_of(told.model, look, told.steps, seed)
            root = told.output / "-".join([told.model, name, *told.set])
            root.mkdir(parents=True, exist_ok=True)
            (root / "look.json").write_text(json.dumps(asdict(look)), encoding="utf-8")
            use(look)
            run_sweep([config], root, device=told.device)
            loss = Losses(root).of(config)
            line = [told.model, name, *told.set, f"{told.steps:,} steps", f"seed {seed}:", loss]
            sys.stdout.write(" ".join(map(str, line)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
