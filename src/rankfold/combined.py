"""CombinedOptimizer: several optimizers, each on parameters of its own, as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .factors import Grid
from .groups import as_grid_list
from .optimizer import RiemannianSGD

Group = dict[str, Any]

_SHARED = "some parameters appear in more than one parameter group"


class CombinedOptimizer(Optimizer):
    """Several optimizers, each on parameters of its own, that are saved and scheduled as one.

    Args:
        optimizers: they step in this order. Their parameter groups become the groups of this one,
            in this order: the same dicts, so that what a scheduler writes into ``lr`` is what the
            optimizers read. Groups are told apart by ``group["optimizer"]``, the name of a class.

    State stays with the optimizer it belongs to; ``state`` shows all of it. Hooks that are common
    to all optimizers (`torch.optim.optimizer.register_optimizer_step_post_hook`) are called for
    this one and for each of its own.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise ValueError("there are no optimizers to combine")
        self._owners: list[int] = []  # which of the optimizers each parameter group belongs to
        for k, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                group["optimizer"] = type(optimizer).__name__
                self._owners.append(k)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        # What all have: a scheduler that finds an option here sets it in every group.
        first, *others = (optimizer.defaults for optimizer in self.optimizers)
        super().__init__(groups, {k: v for k, v in first.items() if all(k in d for d in others)})
        self._join()

    @property
    def products(self) -> RiemannianSGD:
        """The optimizer of the products, for its counts, diagnostics and momentum."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, RiemannianSGD):
                return optimizer
        raise AttributeError("none of these optimizers is a RiemannianSGD")

    def _join(self) -> None:
        """Show the groups and the state the optimizers have now."""
        remaining = [iter(optimizer.param_groups) for optimizer in self.optimizers]
        self.param_groups = [next(remaining[owner]) for owner in self._owners]
        self.state = _JointState(self.optimizers)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with every optimizer; returns the loss of the closure, which runs once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            if optimizer.param_groups:
                optimizer.step()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to one of the optimizers.

        ``{"grids": [...], **options}`` goes to the `RiemannianSGD`, ``{"params": [...],
        **options}`` to the last optimizer, or to that whose class is named by ``"optimizer"``.
        """
        if any(param_group is g for optimizer in self.optimizers for g in optimizer.param_groups):
            super().add_param_group(param_group)  # from the constructor: it is there already
            return
        group = dict(param_group)
        owner = self._owner_for(group)
        optimizer = self.optimizers[owner]
        params = _params_of(group)
        taken = {id(p) for other in self.param_groups for p in other["params"]}
        if any(id(p) in taken for p in params):
            raise ValueError(_SHARED)
        named = any("param_names" in other for other in self.param_groups)
        if named and "param_names" not in group and not _has_names(group):
            group["param_names"] = [f"added.{len(taken) + k}" for k in range(len(params))]
        group["optimizer"] = type(optimizer).__name__
        optimizer.add_param_group(group)
        self._owners.append(owner)
        self._join()

    def _owner_for(self, group: Group) -> int:
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        wanted = group.get("optimizer")
        if wanted is None:
            return self.optimizers.index(self.products) if "grids" in group else len(kinds) - 1
        if wanted not in kinds:
            raise ValueError(f"there is no optimizer {wanted!r} here; there are {', '.join(kinds)}")
        return kinds.index(wanted)

    def __getstate__(self) -> dict[str, Any]:
        return {k: vars(self)[k] for k in ("defaults", "optimizers", "_owners")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    def state_dict(self) -> dict[str, Any]:
        """The state of all, parameters numbered through in the order of the groups.

        Tensors and plain values only, if the optimizers keep no others.
        """
        hook = self.register_state_dict_post_hook(lambda _, __: self._merged(), prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def _merged(self) -> dict[str, Any]:
        saved = [optimizer.state_dict() for optimizer in self.optimizers]
        remaining = [iter(part["param_groups"]) for part in saved]
        groups: list[Group] = []
        state: dict[int, Any] = {}
        start = 0
        for owner in self._owners:
            group = next(remaining[owner])
            numbers = list(range(start, start + len(group["params"])))
            for old, new in zip(group["params"], numbers, strict=True):
                if old in saved[owner]["state"]:
                    state[new] = saved[owner]["state"][old]
            groups.append({**group, "params": numbers})
            start += len(numbers)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state, each optimizer its own part and in its own way.

        Grids and the names of parameters stay this optimizer's own.
        """
        loaded: dict[str, Any] = {}

        def set_aside(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            self._require_same_optimizers(saved["param_groups"])
            loaded.update(saved)
            return {**saved, "state": {}}  # for torch to check the groups and copy no state

        def hand_out(_: Optimizer) -> None:
            try:
                for optimizer, part in zip(self.optimizers, self._parts(loaded), strict=True):
                    optimizer.load_state_dict(part)
            finally:
                self._join()

        before = self.register_load_state_dict_pre_hook(set_aside)
        after = self.register_load_state_dict_post_hook(hand_out, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _require_same_optimizers(self, groups: Sequence[Group]) -> None:
        for k, (mine, saved) in enumerate(zip(self.param_groups, groups, strict=False)):
            if saved.get("optimizer", mine["optimizer"]) != mine["optimizer"]:
                raise ValueError(
                    f"parameter group {k} was saved from {saved['optimizer']} and is "
                    f"{mine['optimizer']}'s here; build the optimizer as it was built then"
                )

    def _parts(self, saved: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for k in range(len(self.optimizers)):
            groups = [
                {key: value for key, value in group.items() if key != "param_names"}
                for owner, group in zip(self._owners, saved["param_groups"], strict=True)
                if owner == k
            ]
            numbers = [i for group in groups for i in group["params"]]
            state = {i: saved["state"][i] for i in numbers if i in saved["state"]}
            yield {"state": state, "param_groups": groups}

    def __repr__(self) -> str:
        total = sum(p.numel() for group in self.param_groups for p in group["params"])
        return "\n".join(
            [f"{type(self).__name__} of {_count(total, 'element')} ("]
            + [line for k, group in enumerate(self.param_groups) for line in _lines(k, group)]
            + [")"]
        )


class _JointState(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one, read and written where they are."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _holding(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        for optimizer in self._optimizers:
            if param in optimizer.state:
                return optimizer.state
        for optimizer in self._optimizers:
            if any(param is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        raise KeyError(param)

    def __getitem__(self, param: Tensor) -> Any:
        return self._holding(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._holding(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._holding(param)[param]

    def __contains__(self, param: object) -> bool:
        return any(param in optimizer.state for optimizer in self._optimizers)

    def get(self, param: Tensor, default: Any = None) -> Any:
        """As of torch's dict, which leaves no empty state behind either."""
        if param not in self:
            return default
        return self[param]

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def __repr__(self) -> str:
        return repr(dict(self))


def _params_of(group: Group) -> list[Tensor]:
    """What a group as users write it will hold, in that order; generators in it become lists."""
    if "grids" in group:
        group["grids"] = as_grid_list(group)
        return list({id(p): p for grid in group["grids"] for p in grid.params()}.values())
    params = group["params"]
    listed = [params] if isinstance(params, Tensor) else list(params)
    if not isinstance(params, set):  # which torch refuses
        group["params"] = listed
    return [item[1] if isinstance(item, tuple) else item for item in listed]


def _has_names(group: Group) -> bool:
    params = group.get("params", ())
    return isinstance(params, list) and any(isinstance(item, tuple) for item in params)


def _lines(index: int, group: Group) -> Iterator[str]:
    """A group as it is shown: its optimizer and main options, then parameters, layers as ``*``."""
    shown = ("geometry", "lr", "momentum", "betas", "weight_decay")
    options = ", ".join(f"{key}={group[key]}" for key in shown if key in group)
    size = _count(sum(p.numel() for p in group["params"]), "element")
    products = f"{_products(group['grids'])}, " if "grids" in group else ""
    yield f"  [{index}] {group['optimizer']}({options}): {products}{size}"
    names = group.get("param_names") or [str(tuple(p.shape)) for p in group["params"]]
    patterns = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    for pattern, times in patterns.items():
        yield f"        {pattern}" + (f"  ×{times}" if times > 1 else "")


def _products(grids: Sequence[Grid]) -> str:
    """How many members, and which rates of their own: ``2 grids of 8 members (4 at 8·lr)``."""
    members: Counter[tuple[float, float]] = Counter()
    for grid in grids:
        left, right = (grid.rate * side for side in grid.sides)
        members[left, right] += grid.groups

    def shown(left: float, right: float) -> str:
        return f"{left:g}·lr" if left == right else f"{left:g}·lr and {right:g}·lr"

    own = sorted(rates for rates in members if rates != (1, 1))
    apart = ", ".join(f"{members[rates]} at {shown(*rates)}" for rates in own)
    every = f"{_count(len(grids), 'grid')} of {_count(members.total(), 'member')}"
    return every + (f" ({apart})" if apart else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
