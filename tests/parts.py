"""Several groups of grids, alike in shape, in one optimizer and in one optimizer each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankfold import Factor, Grid, RiemannianSGD

from .reference import FIXED, GEOMETRIES, ISOMETRIES
from .toys import WIDE, orthonormal

RATES = (0.02, 0.3, 0.08)


class Part(nn.Module):
    """The grids of one group: a pair, a transposed pair of its shape, and a ragged 2×2 grid.

    A stack has members of one layout after those of another, so that those of several groups
    take turns in it.
    """

    def __init__(self, seed: int, dtype: torch.dtype = WIDE) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int) -> Tensor:
            return orthonormal(rows, 2, generator).to(dtype)

        self.pair = nn.ParameterList([draw(7), draw(5)])
        self.turned = nn.ParameterList([draw(7).mT.contiguous(), draw(5)])
        self.grid = nn.ParameterList([draw(6), draw(4), draw(5), draw(5)])
        shapes = [(7, 5), (7, 5), (6, 5), (6, 5), (4, 5), (4, 5)]
        self.targets = [torch.randn(s, generator=generator, dtype=WIDE) for s in shapes]
        self.seed = seed

    def grids(self) -> list[Grid]:
        turned = Factor(self.turned[0], axis=0, blocks=1)
        return [
            Grid(self.pair[0], self.pair[1], name=f"pair{self.seed}"),
            Grid(turned, self.turned[1], name=f"turned{self.seed}"),
            Grid(list(self.grid[:2]), list(self.grid[2:]), name=f"grid{self.seed}"),
        ]

    def backward(self, step: int) -> None:
        """The gradients of a loss that is another one at each step."""
        self.zero_grad()
        (a, b), (c, d) = self.pair, self.turned
        lefts, rights = self.grid[:2], self.grid[2:]
        products = [a @ b.mT, c.mT @ d.mT, *(x @ y.mT for x in lefts for y in rights)]
        loss = sum(
            (w.to(WIDE) - (1 + 0.3 * step) * t).square().sum()
            for w, t in zip(products, self.targets, strict=True)
        )
        assert isinstance(loss, Tensor)
        loss.backward()


class Parts(list[Part]):
    """One part a group."""

    def __init__(self, number: int, dtype: torch.dtype = WIDE) -> None:
        super().__init__(Part(seed, dtype) for seed in range(number))

    def params(self) -> list[Tensor]:
        return [p for part in self for p in part.parameters()]

    def backward(self, step: int) -> None:
        for part in self:
            part.backward(step)

    def together(self, rates: Sequence[Any], **options: Any) -> RiemannianSGD:
        """One optimizer, one group a part."""
        groups = zip(self, rates, strict=True)
        return RiemannianSGD(
            [{"grids": part.grids(), "lr": lr} for part, lr in groups], 0.1, **options
        )

    def apart(self, rates: Sequence[Any], **options: Any) -> list[RiemannianSGD]:
        """One optimizer a part."""
        groups = zip(self, rates, strict=True)
        return [RiemannianSGD(part.grids(), lr, **options) for part, lr in groups]


def state_of(optimizers: Sequence[RiemannianSGD]) -> list[Tensor]:
    """All that is kept, group by group and name by name."""
    params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    states = {p: s for o in optimizers for p, s in o.state.items()}
    return [value for p in params for _, value in sorted(states.get(p, {}).items())]


class Race:
    """The same parts twice: with one optimizer, and with one optimizer a part."""

    def __init__(self, rates: Sequence[Any], **options: Any) -> None:
        self.ours, self.theirs = Parts(len(rates)), Parts(len(rates))
        own = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]
        self.one = self.ours.together(rates, **options)
        self.several = self.theirs.apart(own, **options)
        self.start = [p.detach().clone() for p in self.ours.params()]

    def step(self, step: int) -> None:
        self.ours.backward(step)
        self.theirs.backward(step)
        self.one.step()
        for optimizer in self.several:
            optimizer.step()

    def check(self) -> None:
        """Both are at the same place, to rounding in terms of the way there."""
        pairs = zip(self.ours.params(), self.theirs.params(), self.start, strict=True)
        for ours, theirs, start in pairs:
            way = (theirs - start).abs().max()
            assert way > 1e-3
            assert (ours - theirs).abs().max() <= 1e-12 * way
        kept = zip(state_of([self.one]), state_of(self.several), strict=True)
        for mine, other in kept:
            assert (mine - other).abs().max() <= 1e-12 * other.abs().max().clamp_min(1)
        counts: dict[str, dict[str, int]] = {}
        for optimizer in self.several:
            counts.update(optimizer.counts())
        assert self.one.counts() == counts


# Geometry, name and options: all that a learning rate of members enters, or could.
COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "none": {"momentum": 0.5, "normalize": None},
    "spectral": {"normalize": "spectral"},
    "whitened": {"momentum": 0.9, "normalize": "whitened"},
    "schatten-inf": {"normalize": "schatten-inf"},
    "second-moment": {"momentum": 0.9, "second_moment": 0.9, "bias_correction": True},
    "heavy-ball": {"momentum": 0.6, "momentum_form": "heavy-ball", "nesterov": True},
    "unit": {"momentum": 0.6, "momentum_form": "unit-smoothing", "nesterov": True},
    "maximize": {"momentum": 0.9, "maximize": True},
    "trust-region": {"normalize": None, "trust_region": 0.05},
}
DECAY: dict[str, dict[str, Any]] = {
    "decay": {"momentum": 0.9, "weight_decay": 0.5},
    "decay-to": {"momentum": 0.9, "weight_decay": 0.5, "decay_to": 2.0},
    "growth": {"momentum": 0.9, "growth": 0.5},
    "tilt": {"momentum": 0.9, "normalize": "whitened", "tilt": 0.25, "row_balance": 0.5},
    "decay-in-trust": {"weight_decay": 0.5, "trust_region": 0.05, "momentum": 0.5},
}
CASES = [
    *((geometry, name, options) for geometry in GEOMETRIES for name, options in COMMON.items()),
    *((geometry, name, options) for geometry in FIXED for name, options in DECAY.items()),
    *((geometry, "scale", {"momentum": 0.9, "scale_lr": 0.1}) for geometry in ISOMETRIES),
    ("fixed-embedded", "orthographic", {"retraction": "orthographic", "weight_decay": 0.5}),
    ("fixed-embedded", "rank-floor", {"rank_floor": 0.3, "weight_decay": 0.5}),
]
