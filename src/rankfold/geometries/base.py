"""The schematic iteration every geometry fills in, and the words they share.

A geometry works on stacks of equally shaped grids and knows nothing of parameters. Points,
tangents and momenta are pairs of tensors, ``left`` (batch, I, m, r) and ``right``
(batch, J, n, r); shorter factors of a ragged grid are padded with zero rows, which no formula
notices because rows only ever meet inside Gram matrices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import schatten, tall


class Pair(NamedTuple):
    """Left and right stacks, (batch, I, m, r) and (batch, J, n, r)."""

    left: Tensor
    right: Tensor


# The longest normalized step of an isometry in capturable mode. Its retraction runs a number of
# iterations fixed beforehand, which serve any step up to this one.
LONGEST_CAPTURED = 0.5
_COMMON_REACH = 0.25


@dataclass(frozen=True)
class StepOptions:
    """What a step is told, besides tensors. ``lr`` is a float or a 0-dim tensor.

    A ``capturable`` step runs the same operations whatever the value of ``lr``, a tensor, is.
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
    largest: float = torch.finfo(torch.float32).max  # what the parameters can store

    @property
    def reach(self) -> float | None:
        """An upper bound on the length of the step, where the host knows one."""
        if self.normalize is None:
            return None
        if isinstance(self.lr, Tensor):
            return LONGEST_CAPTURED if self.capturable else None
        if torch.compiler.is_compiling():
            # A bound that a changing learning rate stays below, so that nothing compiles again.
            return _COMMON_REACH if self.lr <= _COMMON_REACH else None
        return self.lr


# What can happen to a member in a step, in the words of `RiemannianSGD.counts`.
EVENTS = ("skipped", "unconverged", "lifted", "clipped")


class Outcome(NamedTuple):
    """What a step leaves: the new point, the momentum to keep, and what happened to whom.

    ``events`` maps some of `EVENTS` to ``(batch,)`` booleans. ``scale`` (batch,) is what the
    tangent vector, or the steepest direction, was multiplied by, for skipped members as well.
    """

    point: Pair
    momentum: Pair | None
    events: dict[str, Tensor]
    scale: Tensor


class Landing(NamedTuple):
    """Where a retraction arrived; ``record`` is what its own `depart` needs to carry momentum.

    ``alive`` (batch,) are the members whose step is finite and can be stored, told from r×r
    matrices alone before any row is written. The others have not moved.
    """

    point: Pair
    record: Any
    alive: Tensor
    unconverged: Tensor | None


class Geometry(ABC):
    """One Riemannian geometry: a frame, a gradient, a norm, retractions and a transport.

    Momentum is carried in two halves. `depart` takes it away from the old point as far as only
    the old point can, `arrive` projects it at the new one, at the start of the next step, where
    the products a projection needs are at hand anyway.
    """

    name: str
    isometry: bool
    retractions: tuple[str, ...]  # the default first

    @abstractmethod
    def frame(self, point: Pair, damping: float = 0.0) -> Any:
        """What the steps share about the point; ``damping`` is an absolute ridge in its solves."""

    def lifted(self, frame: Any) -> Tensor | None:
        """Members (batch,) whose Gram matrices had to be lifted to factor, if that can happen."""
        return None

    @abstractmethod
    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        """The Riemannian gradient in this geometry's coordinates, from the factors' gradients.

        ``repair`` says what to do about gradients that no function of the product has: "none",
        "average" or "exact". Geometries where the exact repair costs nothing always make it.
        """

    def arrive(self, frame: Any, momentum: Pair) -> Pair:
        """Finish the transport of ``momentum`` at the point of ``frame``."""
        return momentum

    def mix(self, frame: Any, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        """ν times the momentum, arrived, plus 1 − ν times the gradient.

        Both are projections, so geometries can make one of the two.
        """
        carried, gradient = self.arrive(frame, momentum), self.gradient(frame, grad, repair)
        return Pair(*(torch.lerp(m, g, 1 - nu) for m, g in zip(carried, gradient, strict=True)))

    @abstractmethod
    def coordinates(self, frame: Any, tangent: Pair) -> Any:
        """The tangent vector as the norm, the retraction and the transport want it."""

    @abstractmethod
    def metric_norm(self, frame: Any, coords: Any) -> Tensor:
        """Length of a tangent vector in the metric, (batch,)."""

    @abstractmethod
    def spectral_norm(self, frame: Any, coords: Any) -> Tensor:
        """Largest singular value of the (stacked) tangent matrix downstairs, (batch,)."""

    @abstractmethod
    def steepest(self, frame: Any, coords: Any, p: float, floor: float) -> Any:
        """The tangent vector of Schatten-p norm 1 along which ``coords`` lies furthest, p ≠ 2.

        ``floor`` bounds norms from below. For p = 2 that is ``coords`` over its metric norm.
        """

    def whitened(self, frame: Any, coords: Any, floor: float) -> Any:
        """The same for p = ∞, but with each factor's part of the vector by itself.

        Upstairs that is the steepest one.
        """
        return self.steepest(frame, coords, math.inf, floor)

    def direction(self, frame: Any, coords: Any, options: StepOptions) -> Any:
        """What a step goes along: ``coords``, unless the normalization asks for the steepest."""
        p = schatten.exponent(options.normalize)
        if p is None or p == 2:
            return coords
        if options.normalize == schatten.WHITENED:
            return self.whitened(frame, coords, options.norm_floor)
        return self.steepest(frame, coords, p, options.norm_floor)

    @abstractmethod
    def retract(self, frame: Any, coords: Any, scale: Tensor, options: StepOptions) -> Landing:
        """Move by ``scale`` (batch,) times the tangent vector."""

    def step_limit(self, frame: Any, coords: Any) -> Tensor | None:
        """The largest |scale| (batch,) for which the retraction is certain to be well defined.

        None where every step is.
        """
        return None

    def depart(self, frame: Any, coords: Any, tangent: Pair, landing: Landing) -> Pair:
        """The momentum to keep, before `arrive`; ``tangent`` and ``coords`` are one vector."""
        return tangent

    def follow(self, frame: Any, tangent: Pair, landing: Landing) -> Pair:
        """The same for a momentum ``tangent`` that is not the vector the step went along."""
        return tangent

    def norm(self, frame: Any, coords: Any, kind: str) -> Tensor:
        """The ``"spectral"`` or else the metric norm, which ``"schatten-2"`` is too, (batch,)."""
        measure = self.spectral_norm if kind == "spectral" else self.metric_norm
        return measure(frame, coords)

    def step(self, point: Pair, grad: Pair, momentum: Pair | None, options: StepOptions) -> Outcome:
        """One iteration: gradient, momentum, normalization, retraction, transport."""
        frame = self.frame(point, options.damping)
        if momentum is None:
            tangent = self.gradient(frame, grad, options.gradient_repair)
        else:
            tangent = self.mix(frame, grad, momentum, options.momentum, options.gradient_repair)
        ahead = tangent
        if momentum is not None and options.nesterov:
            ahead = self.mix(frame, grad, tangent, options.momentum, options.gradient_repair)
        coords = self.coordinates(frame, ahead)
        scale = tangent.left.new_full((tangent.left.shape[0],), 1.0 if options.maximize else -1.0)
        events: dict[str, Tensor | None] = {"lifted": self.lifted(frame)}
        if self.isometry and options.capturable and options.normalize is not None:
            lr = torch.as_tensor(options.lr)
            events["clipped"] = (lr > LONGEST_CAPTURED).expand_as(scale)
            scale = scale * lr.clamp(max=LONGEST_CAPTURED)
        else:
            scale = scale * options.lr
        direction = self.direction(frame, coords, options)
        if direction is coords and options.normalize is not None:
            norm = self.norm(frame, coords, options.normalize)
            # A finite gradient whose norm overflows would pass as a step of length zero.
            norm = torch.where(norm.isinf(), torch.nan, norm)
            scale = scale / norm.clamp_min(options.norm_floor)
        if options.trust_region is not None:
            limit = self.step_limit(frame, direction)
            if limit is not None:
                limit = options.trust_region * limit
                clipped = scale.abs() > limit
                before = events.get("clipped")
                events["clipped"] = clipped if before is None else clipped | before
                scale = torch.minimum(torch.maximum(scale, -limit), limit)
        landing = self.retract(frame, direction, scale, options)
        events["unconverged"] = landing.unconverged
        kept = None
        if momentum is not None and ahead is tangent and direction is coords:
            kept = self.depart(frame, coords, tangent, landing)
        elif momentum is not None:
            kept = self.follow(frame, tangent, landing)
        # A NaN or infinity in a gradient reaches all of its own member through the norm or the
        # products, and no other.
        happened = {
            name: event & landing.alive for name, event in events.items() if event is not None
        }
        happened["skipped"] = ~landing.alive
        if kept is not None and momentum is not None:
            pairs = zip(kept, momentum, strict=True)
            kept = Pair(*(tall.choose(landing.alive, new, old) for new, old in pairs))
        return Outcome(landing.point, kept, happened, scale)


def flatten_blocks(x: Tensor) -> Tensor:
    """(batch, I, m, r) -> (batch, I·m, r): a grid of fixed rank is one tall factor."""
    return x.flatten(1, 2)
