"""The schematic iteration every geometry fills in, and the words they share.

A geometry works on stacks of equally shaped grids and knows nothing of parameters. Points,
tangents and momenta are pairs of tensors, ``left`` (batch, I, m, r) and ``right``
(batch, J, n, r); shorter factors of a ragged grid are padded with zero rows, which no formula
notices because rows only ever meet inside Gram matrices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import scalars, schatten, tall
from ..together import both
from . import course
from .course import Course, Running
from .endings import Stepped, formed
from .terms import Pair as Pair
from .terms import Sides as Sides
from .terms import StepOptions as StepOptions

# What can happen to a member in a step, in the words of `RiemannianSGD.counts`.
EVENTS = ("skipped", "unconverged", "lifted", "clipped")


@dataclass(frozen=True)
class Outcome:
    """What a step leaves: the new point, the momentum to keep, and what happened to whom.

    Members (batch,) that are not ``alive`` were skipped. ``marks`` are of `EVENTS` after that, in
    their order, None or as `scalars.count` takes them, and mean nothing for members that were
    skipped. ``scale`` (batch,) is what the direction of its `Course` was multiplied by, for these
    as well.
    """

    ending: Pair | Stepped
    momentum: Pair | None
    alive: Tensor
    marks: Sequence[Tensor | None]
    scale: Tensor
    running: Running | None = None

    @property
    def point(self) -> Pair:
        """The new point, made anew at each call if it is not there yet."""
        return formed(self.ending)

    @property
    def events(self) -> dict[str, Tensor]:
        """To whom what happened, (batch,) booleans by name, of events that could happen."""
        happened = zip(EVENTS, scalars.happened(self.alive, self.marks), strict=True)
        return {name: members for name, members in happened if members is not None}


class Begun(NamedTuple):
    """A step before it is made, with all done that takes gradients: where it starts and goes."""

    frame: Any
    course: Course


@dataclass(frozen=True)
class Landing:
    """Where a retraction arrived; ``record`` is what its own `depart` needs to carry momentum.

    ``alive`` (batch,) are the members whose step is finite and can be stored, told from r×r
    matrices alone before any row is written. The others have not moved.
    """

    ending: Pair | Stepped
    record: Any
    alive: Tensor
    unconverged: Tensor | None

    @property
    def point(self) -> Pair:
        """The new point, made anew at each call if it is not there yet."""
        return formed(self.ending)


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
        """Members whose Gram matrices had to be lifted to factor, if that can happen.

        (batch,), or (2·batch,) of the left and then the right matrices.
        """
        return None

    def product_square(self, frame: Any) -> Tensor | None:
        """‖W‖² of the (stacked) product (batch,), unless all of its singular values are one."""
        return None

    @abstractmethod
    def gradient(self, frame: Any, grad: Pair, repair: str = "average") -> Pair:
        """The Riemannian gradient in this geometry's coordinates, from the factors' gradients.

        ``repair`` says what to do about gradients that no function of the product has: "none",
        "average" or "exact". Geometries where the exact repair costs nothing always make it.
        """

    def arrive(self, frame: Any, momentum: Pair, *, given: bool = False) -> Pair:
        """Finish the transport of ``momentum`` at the point of ``frame``.

        One that is ``given`` away may be written into.
        """
        return momentum

    def mix(self, frame: Any, grad: Pair, momentum: Pair, nu: float, repair: str) -> Pair:
        """ν times the momentum, arrived, plus 1 − ν times the gradient.

        Both are projections, so geometries can make one of the two.
        """
        carried, gradient = self.arrive(frame, momentum), self.gradient(frame, grad, repair)
        return Pair(*both(lambda m, g: torch.lerp(m, g, 1 - nu), carried, gradient))

    def descent(
        self, frame: Any, grad: Pair, repair: str, momentum: Pair | None = None, nu: float = 0.0
    ) -> tuple[Pair, Any]:
        """The gradient, or its `mix` with a momentum, and the coordinates of it.

        For geometries where the one has made what the other needs.
        """
        if momentum is None:
            tangent = self.gradient(frame, grad, repair)
        else:
            tangent = self.mix(frame, grad, momentum, nu, repair)
        return tangent, self.coordinates(frame, tangent)

    @abstractmethod
    def coordinates(self, frame: Any, tangent: Pair) -> Any:
        """The tangent vector as the norm, the retraction and the transport want it."""

    @abstractmethod
    def metric_square(self, frame: Any, coords: Any) -> Tensor:
        """Square of the length of a tangent vector in the metric, (batch,)."""

    def metric_norm(self, frame: Any, coords: Any) -> Tensor:
        """That length, (batch,)."""
        return self.metric_square(frame, coords).sqrt()

    @abstractmethod
    def spectral_norm(self, frame: Any, coords: Any) -> Tensor:
        """Largest singular value of the (stacked) tangent matrix downstairs, (batch,)."""

    @abstractmethod
    def steepest(self, frame: Any, coords: Any, p: float, floor: float) -> Any:
        """The tangent vector of Schatten-p norm 1 along which ``coords`` lies furthest, p ≠ 2.

        ``floor`` bounds norms from below. For p = 2 that is ``coords`` over its metric norm.
        """

    @abstractmethod
    def whitened(self, frame: Any, coords: Any, options: StepOptions) -> Any:
        """The same for p = ∞, but with each factor's part of the vector by itself.

        What it does to its products, all side by side and over the root of how many they are, has
        norm 1, or that of its side. The norm's floor bounds the norms of what the parts do from
        below.
        """

    def direction(self, frame: Any, coords: Any, options: StepOptions) -> Any:
        """What a step goes along: ``coords``, unless the normalization asks for the steepest."""
        p = schatten.exponent(options.normalize)
        if p is None or p == 2:
            return coords
        if options.normalize == schatten.WHITENED:
            return self.whitened(frame, coords, options)
        return self.steepest(frame, coords, p, options.norm_floor)

    @abstractmethod
    def vector(self, frame: Any, coords: Any) -> Pair:
        """The inverse of `coordinates`, with the blocks of a side perhaps stacked in one."""

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

    def step(
        self,
        point: Pair,
        grad: Pair,
        momentum: Pair | None,
        options: StepOptions,
        running: Running | None = None,
    ) -> Outcome:
        """One iteration: gradient, momentum, normalization, retraction, transport."""
        begun = self.begin(point, grad, momentum, options, running)
        return self.finish(begun, momentum, options, running)

    def begin(
        self,
        point: Pair,
        grad: Pair,
        momentum: Pair | None,
        options: StepOptions,
        running: Running | None = None,
    ) -> Begun:
        """Gradient, momentum and normalization: nothing looks at ``grad`` afterwards."""
        frame = self.frame(point, options.damping)
        return Begun(frame, course.plot(self, frame, grad, momentum, running, options))

    def finish(
        self,
        begun: Begun,
        momentum: Pair | None,
        options: StepOptions,
        running: Running | None = None,
    ) -> Outcome:
        """Retraction and transport."""
        frame, plotted = begun
        direction, scale = plotted.direction, plotted.scale
        clipped, shortened = None, plotted.clipped
        if options.trust_region is not None:
            limit = self.step_limit(frame, direction)
            if limit is not None:
                # Of the point after decay, whose singular values have fallen by no more than this.
                limit = options.trust_region * (1 - options.shrink) * limit
                clipped = scale.abs() > limit
                shortened = clipped if shortened is None else clipped | shortened
                # No step that is not finite becomes one by being cut.
                bounded = torch.minimum(torch.maximum(scale, -limit), limit)
                scale = torch.where(scale.isfinite(), bounded, math.nan)
        landing = self.retract(frame, direction, scale, options)
        kept = None
        if momentum is not None:
            kept = plotted.momentum
            assert kept is not None
            if plotted.own:
                kept = self.depart(frame, direction, kept, landing)
            else:
                kept = self.follow(frame, kept, landing)
            if clipped is not None and options.momentum_form == "heavy-ball":
                kept = Pair(*(x * tall.per_member(scale, x) for x in kept))
        # A NaN or infinity in a gradient reaches all of its own member through the norm or the
        # products, and no other.
        alive = landing.alive
        if kept is not None and momentum is not None:
            kept = Pair(*both(tall.choose, kept, momentum, shared=(alive,)))
        if running is not None and plotted.running is not None:
            numbers = zip(plotted.running, running, strict=True)
            running = Running(*(torch.where(alive, new, old) for new, old in numbers))
        marks = landing.unconverged, self.lifted(frame), shortened
        return Outcome(landing.ending, kept, alive, marks, scale, running)


def flatten_blocks(x: Tensor) -> Tensor:
    """(batch, I, m, r) -> (batch, I·m, r): a grid of fixed rank is one tall factor."""
    return x.flatten(1, 2)
