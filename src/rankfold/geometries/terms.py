"""What a step is given: pairs of stacks, and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tall
from ..whitening import Manner

# The longest normalized step of an isometry in capturable mode. Its retraction runs a number of
# iterations fixed beforehand, which serve any step up to this one.
LONGEST_CAPTURED = 0.5
_COMMON_REACH = 0.25


class Pair(NamedTuple):
    """Left and right stacks, (batch, I, m, r) and (batch, J, n, r)."""

    left: Tensor
    right: Tensor


class Sides(NamedTuple):
    """One number (batch,) for the left and one for the right factors of a member."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class StepOptions:
    """What a step is told, besides tensors. ``lr`` is a float, a 0-dim tensor, or (batch,).

    ``longest`` is the largest of (batch,) learning rates where the host knows it. ``sides``, each
    (batch,) and at most 1, is what a whitened step takes of the left and of the right factors'
    parts, None for all. ``tilt`` and ``row_balance`` are of the members ``tilted`` (batch,) alone,
    None for all. A ``capturable`` step runs the same operations whatever the value of
    ``lr``, a tensor, is.
    """

    lr: float | Tensor
    momentum: float
    normalize: str | None
    norm_floor: float
    retraction: str
    maximize: bool
    gradient_repair: str = "average"
    damping: float = 0.0
    trust_region: float | None = None
    rank_floor: float = 0.0
    capturable: bool = False
    nesterov: bool = False
    momentum_form: str = "smoothing"
    second_moment: float = 0.0
    bias_correction: bool = False
    growth: float = 0.0
    tilt: float = 0.0
    row_balance: float = 0.0
    tilted: Tensor | None = None
    weight_decay: float = 0.0
    decay_to: float = 0.0
    largest: float = torch.finfo(torch.float32).max  # what the parameters can store
    longest: float | None = None
    sides: Sides | None = None

    @property
    def manner(self) -> Manner:
        """How a whitened step of a fixed-rank geometry is made."""
        return Manner(self.norm_floor, self.tilt, self.row_balance, self.tilted)

    @property
    def shrink(self) -> float | Tensor:
        """The share ηλ of the singular values' distance to their target that a step takes away.

        A float, 0-dim or (batch,), like the learning rate.
        """
        return self.lr * self.weight_decay

    def shrink_of(self, like: Tensor) -> float | Tensor:
        """The same share, to be multiplied with ``like`` (batch, ...)."""
        shrink = self.shrink
        # A 0-dim tensor stays one, so that it does not widen what it is multiplied with.
        if isinstance(shrink, Tensor) and shrink.dim():
            return tall.per_member(shrink, like)
        return shrink

    @property
    def bounded(self) -> bool:
        """Whether no step is longer than the learning rate."""
        divided = self.normalize is not None and not self.second_moment
        return divided and self.momentum_form != "heavy-ball"

    @property
    def reach(self) -> float | None:
        """An upper bound on the length of the step, where the host knows one."""
        if not self.bounded:
            return None
        lr = self.lr if self.longest is None else self.longest
        if isinstance(lr, Tensor):
            return LONGEST_CAPTURED if self.capturable else None
        if torch.compiler.is_compiling():
            # A bound that a changing learning rate stays below, so that nothing compiles again.
            return _COMMON_REACH if lr <= _COMMON_REACH else None
        return lr
