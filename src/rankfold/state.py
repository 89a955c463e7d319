"""What an optimizer keeps between steps, and how it is saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .precision import working_dtype
from .stacks import needs_master

# What a parameter group holds beside torch's own keys and the options.
_GRID_KEYS = ("grids", "grid_names")


class StatefulOptimizer(Optimizer):
    """Masters and momenta by parameter, and checkpoints of them that hold no grids."""

    def reset_momentum(self) -> None:
        """Forget all momentum: the hard reset, for runs whose past has become misleading."""
        for state in self.state.values():
            state.pop("momentum", None)

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
        """Tensors and plain values only; grids are left out, since they are code, not state."""

        def without_grids(_: Optimizer, saved: dict[str, Any]) -> None:
            for group in saved["param_groups"]:
                for key in _GRID_KEYS:
                    del group[key]

        hook = self.register_state_dict_post_hook(without_grids, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options, momenta and masters; grids stay this optimizer's own.

        State goes to the devices of its parameters and keeps its dtype, where torch would cast
        float32 masters and momenta to the dtype of a bfloat16 parameter.
        """
        own_grids = [{key: group[key] for key in _GRID_KEYS} for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, saved: dict[str, Any]) -> None:
            loaded.update(saved)

        def restore(_: Optimizer) -> None:
            for group, grids in zip(self.param_groups, own_grids, strict=True):
                group.update(grids)
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
