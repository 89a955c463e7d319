"""The optimizers of a run: one for attention, AdamW for the rest, float32 whatever the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from .. import kernels
from ..defaults import RECOMMENDED, RECOMMENDED_NAME, is_value_output
from ..factors import Grid
from ..geometries import is_isometry
from ..geometries.terms import LONGEST_CAPTURED
from ..optimizer import RiemannianSGD
from ..schatten import by_products, exponent
from ..whitening import Manner
from .config import ADAMW_MOMENTUM, CHOSEN, OptimizerConfig
from .dion import Dion
from .model import Decoder
from .muon import Muon, Whitened


class Stepper(Protocol):
    """What the training loop needs of an optimizer."""

    @property
    def capturable(self) -> bool:
        """Whether it can be recorded into a CUDA graph."""

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

    ``momentum`` is its first beta, 0 for torch's own. With ``masters`` a float32 copy of
    low-precision weights lives on between steps; without, each step begins at the rounded weights.
    A GPU makes a step with masters in ``one_pass`` through memory, to float32 rounding torch's own.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float,
        weight_decay: float,
        masters: bool,
        capturable: bool = False,
        momentum: float = 0.0,
    ) -> None:
        self.capturable = capturable
        self.params: list[Tensor] = list(params)
        self.masters = masters
        self.narrow = any(p.dtype != torch.float32 for p in params)
        self.wide = self.params
        if self.narrow:
            self.wide = [p.detach().float() for p in params]
        mastered = self.narrow and masters and all(p.is_contiguous() for p in params)
        self.one_pass = mastered and kernels.available(self.params[0].device)
        self.inner = AdamW(
            self.wide,
            lr=_rate(lr, self.wide[0], capturable),
            betas=(momentum or ADAMW_MOMENTUM, 0.999),
            weight_decay=weight_decay,
            fused=True,
            capturable=capturable,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from their gradients."""
        if self.one_pass:
            from . import adamw_kernel  # which wants Triton

            adamw_kernel.step(self.inner, self.params)
            return
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
        _set_rate(self.inner, lr)

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
    """rankfold's optimizer on the grids of a model.

    Isometries take longer normalized steps than a graph can, and some Schatten norms want
    eigenvalues, so those are not capturable.
    """

    def __init__(self, grids: Sequence[Grid], config: OptimizerConfig, graph: bool = False) -> None:
        self.masters = config.masters
        for grid in grids:
            grid.rate = config.vo_rate if is_value_output(grid) else 1.0
            grid.sides = _sides(grid, config)
            grid.tilted = config.tilted_products == "all" or is_value_output(grid)
        self.scale_share = config.scale_lr / config.lr if config.scale_lr else None
        bounded = is_isometry(config.name) and config.normalize != "none"
        bounded = bounded and config.momentum_form != "heavy-ball" and not config.second_moment
        p = exponent(config.normalize)
        longest = config.lr * max(1.0, config.vo_rate * max(1.0, config.output_rate))
        recordable = p is None or by_products(p)
        recordable = recordable and not (bounded and longest > LONGEST_CAPTURED)
        self.capturable = graph and recordable
        beside = grids[0].params()[0]
        self.inner = RiemannianSGD(
            grids,
            _rate(config.lr, beside, self.capturable),
            geometry=config.name,
            momentum=config.momentum,
            momentum_form=config.momentum_form,
            nesterov=config.nesterov,
            bias_correction=config.bias_correction,
            second_moment=config.second_moment,
            growth=config.growth,
            tilt=config.tilt,
            row_balance=config.row_balance,
            normalize=None if config.normalize == "none" else config.normalize,
            norm_floor=config.norm_floor,
            retraction=config.retraction or None,
            weight_decay=config.product_decay,
            decay_to=config.decay_to,
            scale_lr=_rate(config.scale_lr, beside, self.capturable) if config.scale_lr else None,
            capturable=self.capturable,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from their gradients."""
        self.inner.step()
        if not self.masters:  # the next step begins at the rounded weights
            for param, state in self.inner.state.items():
                if "master" in state:
                    state["master"].copy_(param)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step, which that of a scale follows."""
        _set_rate(self.inner, lr)
        if self.scale_share is not None:
            _set_rate(self.inner, self.scale_share * lr, "scale_lr")

    def events(self) -> str:
        """What became of steps since the optimizer was made or loaded, if something did."""
        counted: Counter[str] = Counter()
        for of_member in self.inner.counts().values():
            counted.update(of_member)
        told = ", ".join(f"{number:,} {event}" for event, number in counted.items())
        return f"steps of members: {told}" if told else ""

    def state_dict(self) -> dict[str, Any]:
        """Momenta and masters."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.inner.load_state_dict(state)


class Separate:
    """One optimizer for each part of the grids, at its share of the learning rate."""

    def __init__(self, parts: Sequence[tuple[Stepper, float]]) -> None:
        self.parts = list(parts)

    @property
    def capturable(self) -> bool:
        """Whether all of them can be recorded."""
        return all(part.capturable for part, _ in self.parts)

    def step(self) -> None:
        """Update the weights from their gradients."""
        for part, _ in self.parts:
            part.step()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        for part, share in self.parts:
            part.set_lr(share * lr)

    def state_dict(self) -> dict[str, Any]:
        """Of all parts."""
        return {"parts": [part.state_dict() for part, _ in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for (part, _), kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def by_rate(grids: Sequence[Grid], config: OptimizerConfig) -> list[tuple[list[Grid], float]]:
    """Grids that go by one learning rate, and its share: value·output ones by ``vo_rate``."""
    if config.vo_rate == config.output_rate == 1:
        return [(list(grids), 1.0)]
    others = [grid for grid in grids if not is_value_output(grid)]
    return [(others, 1.0), ([grid for grid in grids if is_value_output(grid)], config.vo_rate)]


def _rate(lr: float, beside: Tensor, capturable: bool) -> float | Tensor:
    """What a graph reads at every replay must be on its device."""
    return torch.tensor(lr, device=beside.device) if capturable else lr


def _set_rate(optimizer: Optimizer, rate: float, name: str = "lr") -> None:
    for group in optimizer.param_groups:
        if isinstance(group[name], Tensor):
            group[name].fill_(rate)
        else:
            group[name] = rate


def build(
    model: Decoder, config: OptimizerConfig, graph: bool = False
) -> tuple[Stepper | None, WideAdamW]:
    """The optimizer of the attention weights, None if they are frozen, and that of all others.

    With ``graph`` they are made to be recorded into CUDA graphs, where they can be.
    """
    rest = WideAdamW(
        model.other_parameters(), config.other_lr, config.weight_decay, config.masters, graph
    )
    if config.name == "frozen":
        for param in model.attention_parameters():
            param.requires_grad_(False)
        return None, rest
    grids = model.grids()
    if config.name == RECOMMENDED_NAME:
        config = replace(config, name=RECOMMENDED["geometry"], **CHOSEN)
    if config.name not in _RIVALS:
        return Riemannian(grids, config, graph), rest
    make = _RIVALS[config.name]
    parts = [
        (make(part, replace(config, lr=share * config.lr), graph), share)
        for part, share in by_rate(grids, config)
    ]
    return _together(parts), rest


def _together(parts: Sequence[tuple[Stepper, float]]) -> Stepper:
    return parts[0][0] if len(parts) == 1 else Separate(parts)


def _sides(grid: Grid, config: OptimizerConfig) -> tuple[float, float]:
    """What the rates of its left and right factors, outputs and values, are multiplied with."""
    return (config.output_rate, 1.0) if is_value_output(grid) else (1.0, 1.0)


def _decay(grids: Sequence[Grid], config: OptimizerConfig) -> float:
    """Of each factor, so that their product has that of a geometry: at the faster one's rate."""
    decay = config.product_decay * max(_sides(grids[0], config))
    if config.lr * decay >= 1:
        raise ValueError(
            "a learning rate times optimizer.product_decay must be below 1, the share of a product "
            f"that a step takes away, and is {config.lr * decay:g}: make one of them smaller"
        )
    return decay / 2


def _adamw(grids: Sequence[Grid], config: OptimizerConfig, graph: bool) -> Stepper:
    (left, right), decay = _sides(grids[0], config), _decay(grids, config)
    by_share: dict[float, dict[int, Tensor]] = {}
    for grid in grids:
        for share, factors in ((left, grid.left), (right, grid.right)):
            of_share = by_share.setdefault(share, {})
            of_share.update((id(p), p) for factor in factors for p in factor.params)

    def made(params: Mapping[int, Tensor], share: float) -> WideAdamW:
        decays, lr = config.weight_decay + decay / share, share * config.lr
        return WideAdamW(list(params.values()), lr, decays, config.masters, graph, config.momentum)

    return _together([(made(params, share), share) for share, params in by_share.items()])


def _muon_kind(
    kind: Callable[..., Muon], grids: Sequence[Grid], config: OptimizerConfig, graph: bool
) -> Muon:
    manner = Manner(config.norm_floor, config.tilt, config.row_balance)
    further = {"rank": config.dion_rank} if kind is Dion else {"manner": manner}
    return kind(
        grids,
        _rate(config.lr, grids[0].params()[0], graph),
        momentum=config.momentum,
        weight_decay=config.weight_decay + _decay(grids, config),
        masters=config.masters,
        sides=_sides(grids[0], config),
        **further,
    )


_RIVALS: dict[str, Callable[[Sequence[Grid], OptimizerConfig, bool], Stepper]] = {
    "adamw": _adamw,
    "muon": partial(_muon_kind, Muon),
    "whitened": partial(_muon_kind, Whitened),
    "dion": partial(_muon_kind, Dion),
}
