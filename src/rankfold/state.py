"""What an optimizer keeps between steps, and how it is saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .eager import uncompiled
from .factors import describe
from .geometries.course import Running
from .precision import working_dtype
from .stacks import Plan, Stack, needs_master

# What a parameter group holds beside torch's own keys and the options.
_GRID_KEYS = ("grids", "grid_names")


# Numbers of a grid's members go by its name, with its first left parameter, which may serve others.
_RUNNING = "running:"


class RunningNumbers:
    """The `Running` numbers of a stack during one step, (batch, 3), from those of its grids."""

    def __init__(self, grids: list[Tensor]) -> None:
        self._grids = grids
        self._numbers = torch.cat(grids)

    def read(self, members: slice) -> Running:
        """Of these members, as they were before the step."""
        return Running(*self._numbers[members].unbind(1))

    def write(self, members: slice, running: Running) -> None:
        """As they are after it."""
        self._numbers[members] = torch.stack(running, 1)

    def finish(self) -> None:
        """Into the state, in place, so that a recorded graph goes on with it."""
        parts = torch.split(self._numbers, [len(grid) for grid in self._grids])
        torch._foreach_copy_(self._grids, list(parts))


class StatefulOptimizer(Optimizer):
    """Masters, momenta and numbers of members, and checkpoints of them that hold no grids."""

    def reset_momentum(self) -> None:
        """Forget all momentum, and running means: the hard reset, where the past misleads."""
        for group in self.param_groups:
            self._forget(group)

    def _forget(self, group: dict[str, Any], momentum: bool = True, running: bool = True) -> None:
        """Let go of momenta, and of running numbers."""
        for param in group["params"]:
            state = self.state.get(param, {})
            if momentum:
                state.pop("momentum", None)
            if running:
                for key in [key for key in state if key.startswith(_RUNNING)]:
                    del state[key]

    @uncompiled
    def _forget_unused(self, group: dict[str, Any]) -> None:
        """Let go of momenta and numbers that a group no longer asks for."""
        momentum, running = group["momentum"] > 0, _has_running(group)
        if not (momentum and running):
            self._forget(group, not momentum, not running)

    @uncompiled
    def _running_of(self, group: dict[str, Any], plan: Plan) -> dict[int, RunningNumbers]:
        """By stack, where the group asks for them.

        To be called before a new momentum is made, which weighs nothing yet.
        """
        if not _has_running(group):
            return {}
        return {id(stack): self._running_of_stack(stack) for stack in plan.stacks}

    def _running_of_stack(self, stack: Stack) -> RunningNumbers:
        found: list[Tensor] = []
        first = 0
        for source in stack.sources:
            for param in source.left[0].params:
                key = _RUNNING + stack.members[first].rpartition("[")[0]
                state: dict[str, Tensor] = self.state[param]
                numbers = state.get(key)
                if numbers is None:
                    numbers = torch.zeros(source.groups, 3, dtype=stack.dtype, device=param.device)
                    numbers[:, 0] = float("momentum" in state)
                elif numbers.device != param.device or numbers.dtype != stack.dtype:
                    numbers = numbers.to(param.device, stack.dtype)
                state[key] = numbers
                found.append(numbers)
                first += source.groups
        return RunningNumbers(found)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The parameter's state, with a master on its device if it needs one."""
        state: dict[str, Tensor] = self.state[param]
        if needs_master(param):
            master = state.get("master")
            if master is None:
                state["master"] = param.detach().to(working_dtype(param.dtype))
            elif master.device != param.device:
                state["master"] = master.to(param.device)
        return state

    def _master_of(self, param: Tensor) -> Tensor:
        """The master of a parameter that needs one, in working precision."""
        state, dtype = self._state_of(param), working_dtype(param.dtype)
        if state["master"].dtype != dtype:
            state["master"] = state["master"].to(dtype)
        return state["master"]

    def _momentum_of(self, param: Tensor) -> Tensor:
        """The parameter's momentum, of its shape, in working precision and on its device."""
        state: dict[str, Tensor] = self.state[param]
        momentum = state.get("momentum")
        dtype = working_dtype(param.dtype)
        if momentum is None:
            momentum = torch.zeros_like(param, dtype=dtype)
        elif momentum.device != param.device or momentum.dtype != dtype:
            momentum = momentum.to(param.device, dtype)
        state["momentum"] = momentum
        return momentum

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only; grids are None, since they are code, not state."""

        def without_grids(_: Optimizer, saved: dict[str, Any]) -> None:
            for group in saved["param_groups"]:
                # Not deleted: flattened checkpoints are asked for every key of a group.
                group.update(dict.fromkeys(_GRID_KEYS))

        hook = self.register_state_dict_post_hook(without_grids, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options, momenta, masters and numbers; grids stay this optimizer's own.

        State goes to the devices of its parameters and keeps its dtype, where torch would cast
        float32 masters and momenta to the dtype of a bfloat16 parameter.
        """
        own_grids = [{key: group[key] for key in _GRID_KEYS} for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, saved: dict[str, Any]) -> None:
            _require_shapes(self.param_groups, saved)
            loaded.update(saved)

        def restore(_: Optimizer) -> None:
            for group, grids in zip(self.param_groups, own_grids, strict=True):
                group.update(grids)
                for option, value in self.defaults.items():
                    group.setdefault(option, value)  # one that the saver did not have yet
            ids = [i for group in loaded["param_groups"] for i in group["params"]]
            params = [p for group in self.param_groups for p in group["params"]]
            for index, param in zip(ids, params, strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    self.state[param][key] = value.detach().to(param.device, copy=True)

        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


def _require_shapes(groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Raise where a saved momentum or master is not of its parameter's shape."""
    ids = (i for group in saved["param_groups"] for i in group["params"])
    params = (p for group in groups for p in group["params"])
    for index, param in zip(ids, params, strict=False):  # torch counts them
        for key, value in saved["state"].get(index, {}).items():
            if not key.startswith(_RUNNING) and value.shape != param.shape:
                raise ValueError(
                    f"the {key} saved for {describe(param)} is of shape {tuple(value.shape)}: it "
                    "belongs to another model, or to its parameters in another order"
                )


def _has_running(group: dict[str, Any]) -> bool:
    return bool(group["second_moment"] or group["bias_correction"])
