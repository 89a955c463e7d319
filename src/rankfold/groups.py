"""Parameter groups as users write them, the names grids go by, and groups that step together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .eager import uncompiled
from .factors import Grid
from .geometries import Geometry, Sides, StepOptions
from .stacks import Plan, Stack

Group = dict[str, Any]


def as_groups(grids: Grid | Iterable[Grid] | Iterable[Group]) -> list[Group]:
    """Parameter groups from all that stands for them: a grid, grids, or dicts with grids."""
    items: list[Any] = listed(grids)
    if not items:
        raise ValueError("there are no grids to optimize")
    return items if isinstance(items[0], dict) else [{"grids": items}]


def listed(grids: Any) -> list[Any]:
    """What a user gives as grids; raise for a model, which is no grid and holds none."""
    if isinstance(grids, nn.Module | Optimizer):
        raise TypeError(
            f"expected grids, got {type(grids).__name__}; rankfold.attention_grids(model) has "
            "those of a model, and rankfold.lora_grids(model) those of its adapters"
        )
    return [grids] if isinstance(grids, Grid) else list(grids)


def as_grid_list(group: Group) -> list[Grid]:
    """The grids of a parameter group as a user wrote it."""
    if not isinstance(group, dict):
        raise TypeError(f"expected a dict with the key 'grids', got {type(group).__name__}")
    if "grids" not in group:
        raise ValueError("a parameter group is a dict with the key 'grids', a list of Grid")
    grids = listed(group["grids"])
    if not grids:
        raise ValueError("a parameter group has no grids")
    for grid in grids:
        if not isinstance(grid, Grid):
            raise TypeError(
                f"expected a rankfold.Grid, got {type(grid).__name__}; a product of two parameters "
                "is rankfold.Grid(left, right)"
            )
    return grids


def name_grids(grids: Sequence[Grid], taken: Sequence[str]) -> list[str]:
    """Names as given, or the next free ``grid<k>``; no name twice."""
    used = set(taken)
    given = {grid.name for grid in grids}
    free = (new for new in map("grid{}".format, count()) if new not in used and new not in given)
    names: list[str] = []
    for grid in grids:
        name = grid.name
        if name is None:
            name = next(free)
        elif name in used:
            raise ValueError(
                f"two grids are named {name!r}: either one is given twice, or they need names that "
                "tell their members apart"
            )
        used.add(name)
        names.append(name)
    return names


@uncompiled
def alike(groups: Sequence[Group], options: Sequence[str]) -> list[list[int]]:
    """Positions of the groups that step together: alike in ``options``, not in learning rates.

    These are all numbers or all tensors. Tensors among the options are alike if they are one: to
    compare values would stop the device. Dtypes of parameters are alike too, so that no group
    bounds what another one's steps may store, or changes the way its tensors go.
    """
    if len(groups) == 1:
        return [[0]]
    found: dict[tuple[object, ...], list[int]] = {}
    for index, group in enumerate(groups):
        values = (group[option] for option in options)
        key = (
            isinstance(group["lr"], Tensor),
            frozenset(p.dtype for p in group["params"]),
            *((Tensor, id(value)) if isinstance(value, Tensor) else value for value in values),
        )
        found.setdefault(key, []).append(index)
    return list(found.values())


class Rate(NamedTuple):
    """The learning rate of a stack's members: a float or 0-dim tensor for all, or (batch,).

    ``longest`` is the largest of numbers that differ, which the host knows. ``sides`` is what each
    side's part of a step is of that rate, None for all of it. ``tilted`` says for whom the group's
    tilt and row balance are: all, none, or some (batch,).
    """

    lr: float | Tensor
    longest: float | None = None
    sides: Sides | None = None
    tilted: bool | Tensor = True

    def of(self, members: slice) -> Rate:
        """That of some members."""
        lr, sides, tilted = self.lr, self.sides, self.tilted
        if isinstance(lr, Tensor) and lr.dim():
            lr = lr[members]
        if sides is not None:
            sides = Sides(*(side[members] for side in sides))
        if isinstance(tilted, Tensor):
            tilted = tilted[members]
        return self._replace(lr=lr, sides=sides, tilted=tilted)


class Owner(NamedTuple):
    """What sets a member's learning rate: its group, by position, and its grid.

    ``share`` of the group's rate is that of the grid's faster side, and ``sides`` are both sides'
    shares of this one, so that no part of a step is longer than the rate of its member. ``tilted``
    is the grid's own.
    """

    group: int
    share: float
    sides: tuple[float, float]
    tilted: bool

    @classmethod
    def of(cls, group: int, grid: Grid) -> Owner:
        """Of the members of a grid."""
        left, right = grid.sides
        faster = max(left, right)
        return cls(group, faster * grid.rate, (left / faster, right / faster), grid.tilted)

    @property
    def uneven(self) -> bool:
        """Whether its sides differ."""
        return self.sides != (1, 1)

    def rate(self, groups: Sequence[Group]) -> Any:
        """As it is now; 0-dim, so that a float64 tensor does not widen float32 steps."""
        lr = groups[self.group]["lr"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        return lr if self.share == 1 else self.share * lr

    def is_like(self, other: Owner, groups: Sequence[Group]) -> bool:
        """Whether both have one learning rate now, as far as can be told without a look at it."""
        mine, theirs = (groups[owner.group]["lr"] for owner in (self, other))
        same = mine is theirs if isinstance(mine, Tensor) else mine == theirs
        return same and self.share == other.share


class Owners:
    """Whose the members of a stack are."""

    def __init__(self, stack: Stack, owner_of: Mapping[str, Owner]) -> None:
        owners = [owner_of[member.rpartition("[")[0]] for member in stack.members]
        self.distinct = sorted(set(owners))
        self._dtype = stack.dtype
        device = stack.sources[0].left[0].params[0].device
        # Made with the plan: a copy to the device waits for it, and no graph could record it.
        places = [self.distinct.index(owner) for owner in owners]
        self._places = torch.tensor(places, device=device) if len(self.distinct) > 1 else None
        self._sides = None
        if any(owner.uneven for owner in owners):
            both = torch.tensor([owner.sides for owner in owners], dtype=stack.dtype, device=device)
            self._sides = Sides(*both.unbind(1))
        tilted = [owner.tilted for owner in owners]
        self._tilted: bool | Tensor = all(tilted)
        if any(tilted) and not all(tilted):
            self._tilted = torch.tensor(tilted, device=device)

    def rate(self, groups: Sequence[Group]) -> Rate:
        """The members' learning rates as they are now, without a look at tensors."""
        first = self.distinct[0]
        if self._places is None or all(owner.is_like(first, groups) for owner in self.distinct):
            return Rate(first.rate(groups), None, self._sides, self._tilted)
        rates = [owner.rate(groups) for owner in self.distinct]
        # Filled one by one: a list of numbers would be copied from the host, and a graph is to read
        # tensors where they are.
        table = torch.empty(len(rates), dtype=self._dtype, device=self._places.device)
        for entry, lr in zip(table.unbind(), rates, strict=True):
            entry.fill_(lr)
        longest = None if isinstance(rates[0], Tensor) else max(rates)
        return Rate(table.index_select(0, self._places), longest, self._sides, self._tilted)


class JointPlan:
    """A plan for grids of groups that step together, and whose its members are."""

    def __init__(self, plan: Plan, owner_of: Mapping[str, Owner]) -> None:
        self.plan = plan
        self._owners = {id(stack): Owners(stack, owner_of) for stack in plan.stacks}
        self.owners = sorted({x for owners in self._owners.values() for x in owners.distinct})

    @uncompiled
    def rates(self, groups: Sequence[Group]) -> dict[int, Rate]:
        """By stack, of the members' groups as they are now."""
        return {key: owners.rate(groups) for key, owners in self._owners.items()}


def step_options(group: Group, rate: Rate, geometry: Geometry, largest: float) -> StepOptions:
    """A group's options as a step of ``geometry`` wants them; ``largest`` is what can be stored."""
    tilted = rate.tilted
    return StepOptions(
        lr=rate.lr,
        longest=rate.longest,
        sides=rate.sides,
        momentum=float(group["momentum"]),
        normalize=group["normalize"],
        norm_floor=float(group["norm_floor"]),
        retraction=group["retraction"] or geometry.retractions[0],
        maximize=group["maximize"],
        gradient_repair=group["gradient_repair"],
        damping=group["damping"],
        trust_region=group["trust_region"],
        rank_floor=group["rank_floor"],
        capturable=group["capturable"],
        nesterov=group["nesterov"],
        momentum_form=group["momentum_form"],
        second_moment=group["second_moment"],
        bias_correction=group["bias_correction"],
        growth=float(group["growth"]),
        tilt=0.0 if tilted is False else float(group["tilt"]),
        row_balance=0.0 if tilted is False else float(group["row_balance"]),
        tilted=tilted if isinstance(tilted, Tensor) else None,
        weight_decay=group["weight_decay"],
        decay_to=group["decay_to"],
        largest=largest,
    )
