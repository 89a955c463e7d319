"""The optimizers of a run: one for attention, AdamW for the rest, float32 whatever the weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ..optimizer import RiemannianSGD
from .config import OptimizerConfig
from .model import Decoder


class Stepper(Protocol):
    """What the training loop needs of an optimizer."""

    def step(self) -> None:
        """Update the weights from their gradients."""

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """All a later process needs to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class WideAdamW:
    """AdamW with float32 state and arithmetic on weights of any dtype.

    With ``masters`` a float32 copy of low-precision weights lives on between steps; without, each
    step begins at the rounded weights.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, masters: bool
    ) -> None:
        self.params: list[Tensor] = list(params)
        self.masters = masters
        self.narrow = any(p.dtype != torch.float32 for p in params)
        self.wide: list[Tensor] = list(params)
        if self.narrow:
            self.wide = [p.detach().float() for p in params]
        self.inner = AdamW(self.wide, lr=lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from their gradients."""
        if self.narrow:
            if not self.masters:
                torch._foreach_copy_(self.wide, self.params)
            for wide, param in zip(self.wide, self.params, strict=True):
                wide.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        if self.narrow:
            torch._foreach_copy_(self.params, self.wide)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own, and the masters."""
        wide = self.wide if self.narrow else []
        return {"inner": self.inner.state_dict(), "wide": wide}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.inner.load_state_dict(state["inner"])
        with torch.no_grad():
            for wide, kept in zip(self.wide, state["wide"], strict=False):
                wide.copy_(kept)


class Riemannian:
    """rankfold's optimizer on the grids of a model."""

    def __init__(self, model: Decoder, config: OptimizerConfig) -> None:
        self.masters = config.masters
        self.inner = RiemannianSGD(
            model.grids(),
            config.lr,
            geometry=config.name,
            momentum=config.momentum,
            normalize=None if config.normalize == "none" else config.normalize,
            norm_floor=config.norm_floor,
            retraction=config.retraction or None,
        )

    def step(self) -> None:
        """Update the weights from their gradients."""
        self.inner.step()
        if not self.masters:
            for state in self.inner.state.values():
                state.pop("master", None)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Momenta and masters."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.inner.load_state_dict(state)


def build(model: Decoder, config: OptimizerConfig) -> tuple[Stepper | None, WideAdamW]:
    """The optimizer of the attention weights, None if they are frozen, and that of all others."""
    attention, others = model.attention_parameters(), model.other_parameters()
    rest = WideAdamW(others, config.other_lr, config.weight_decay, config.masters)
    if config.name == "frozen":
        for param in attention:
            param.requires_grad_(False)
        return None, rest
    if config.name == "adamw":
        return WideAdamW(attention, config.lr, config.weight_decay, config.masters), rest
    return Riemannian(model, config), rest
