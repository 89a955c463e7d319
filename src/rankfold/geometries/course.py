"""What a step goes along: momentum in its forms, and by what it is divided."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import linalg, scalars, tall
from ..together import both
from .terms import LONGEST_CAPTURED, Pair, StepOptions

if TYPE_CHECKING:
    from .base import Geometry


class Running(NamedTuple):
    """What members remember of their gradients besides momentum, each (batch,).

    ``square`` is the running mean of squared norms. The weights are the sums of what gradients
    count in the momentum and in that mean, 1 − ν^t and 1 − β^t after t steps, and right also where
    ν and β change on the way.
    """

    weight: Tensor
    square: Tensor
    square_weight: Tensor


class Course(NamedTuple):
    """A step before it is made: ``scale`` (batch,) times ``direction``, in coordinates.

    ``momentum`` is the vector to keep, if any is, and ``own`` says whether ``direction`` is this.
    ``clipped`` (batch,) marks members whose learning rate is longer than can be captured.
    """

    direction: Any
    scale: Tensor
    momentum: Pair | None
    own: bool
    running: Running | None
    clipped: Tensor | None


class _Given(NamedTuple):
    """What the forms of momentum begin with; ``scale`` (batch,) is the learning rate."""

    geometry: Geometry
    frame: Any
    grad: Pair
    momentum: Pair | None
    running: Running | None
    options: StepOptions
    scale: Tensor

    @property
    def sign(self) -> float:
        """Up or down."""
        return 1.0 if self.options.maximize else -1.0


def plot(
    geometry: Geometry,
    frame: Any,
    grad: Pair,
    momentum: Pair | None,
    running: Running | None,
    options: StepOptions,
) -> Course:
    """The course of a step, from the factors' gradients and what the last step has left."""
    lr, batch, clipped = options.lr, grad.left.shape[0], None
    if geometry.isometry and options.capturable and options.bounded:
        lr = torch.as_tensor(lr)
        clipped = (lr > LONGEST_CAPTURED).expand(batch)
        lr = lr.clamp(max=LONGEST_CAPTURED)
    scale = _spread(lr, batch, grad.left)
    if options.growth:
        scale = _grown(geometry, frame, scale, grad, options.growth)
    if running is not None:
        nu, weight = options.momentum, running.weight
        weight = torch.zeros_like(weight) if momentum is None else nu * weight + (1 - nu)
        running = running._replace(weight=weight)
    given = _Given(geometry, frame, grad, momentum, running, options, scale)
    course = _heavy_ball(given) if options.momentum_form == "heavy-ball" else _smoothing(given)
    kept = None if momentum is None else course.momentum
    # Kernels read a number a member.
    return course._replace(scale=course.scale.contiguous(), momentum=kept, clipped=clipped)


def _spread(lr: float | Tensor, batch: int, like: Tensor) -> Tensor:
    """A learning rate (batch,), perhaps of stride 0, of the dtype and on the device of ``like``."""
    if not isinstance(lr, Tensor):
        return like.new_full((batch,), lr)
    if lr.device == like.device:
        return lr.to(like.dtype).expand(batch)
    return lr * like.new_ones(batch)  # of 0 dimensions and on the host, it is read there


def _grown(geometry: Geometry, frame: Any, scale: Tensor, factors: Pair, growth: float) -> Tensor:
    """``scale`` (batch,) times a power of the products' singular values' root mean square."""
    square = geometry.product_square(frame)
    assert square is not None  # option_checks.check_choices
    (_, i, _, r), j = factors.left.shape, factors.right.shape[1]
    return scalars.grown(scale, square, 1 / (i * j * r), growth)


def _smoothing(given: _Given) -> Course:
    """ν times the momentum plus 1 − ν times the gradient, or the gradient over its norm."""
    geometry, frame, grad, momentum, running, options, scale = given
    nu, repair = options.momentum, options.gradient_repair
    if momentum is None:
        tangent, coords = geometry.descent(frame, grad, repair)
    elif options.momentum_form == "unit-smoothing":
        tangent, coords = _unit_taken_in(given, momentum)
    else:
        tangent, coords = _taken_in(given, momentum)
    look_ahead = momentum is not None and options.nesterov
    direction = geometry.direction(frame, coords, options)
    weight = running.weight if running is not None and options.bias_correction else None
    if weight is not None and look_ahead:
        weight = nu * weight + (1 - nu)
    if direction is not coords:  # of length 1, whatever the length of the vector
        return Course(direction, given.sign * scale, tangent, False, running, None)
    if options.second_moment and momentum is not None:
        coords = geometry.coordinates(frame, geometry.gradient(frame, grad, repair))
    scale, running = _normalized(given, coords, weight)
    return Course(direction, scale, tangent, not look_ahead, running, None)


def _taken_in(given: _Given, momentum: Pair) -> tuple[Pair, Any]:
    """The momentum with a gradient taken in, and coordinates of that or of a look ahead."""
    geometry, frame, grad, options = given.geometry, given.frame, given.grad, given.options
    nu, repair = options.momentum, options.gradient_repair
    if not options.nesterov:
        return geometry.descent(frame, grad, repair, momentum, nu)
    tangent = geometry.mix(frame, grad, momentum, nu, repair)
    return tangent, geometry.descent(frame, grad, repair, tangent, nu)[1]


def _unit_taken_in(given: _Given, momentum: Pair) -> tuple[Pair, Any]:
    """The same with a gradient of length one."""
    geometry, frame, options = given.geometry, given.frame, given.options
    fresh, coords = geometry.descent(frame, given.grad, options.gradient_repair)
    square = geometry.metric_square(frame, coords)
    share = scalars.over_root(square, _least(square, options), 1 - options.momentum)
    tangent, ahead = _added(options, geometry.arrive(frame, momentum), share, fresh)
    return tangent, geometry.coordinates(frame, ahead)


def _added(options: StepOptions, old: Pair, scale: Tensor, new: Pair) -> tuple[Pair, Pair]:
    """The vector to keep, ν ``old`` + ``scale`` ``new`` with a scale (batch,), and one to go along.

    Both are one, but for a look ahead, where the same is done to it once more.
    """
    weight = options.momentum
    if not options.nesterov:
        kept = Pair(*both(partial(tall.step, weight=weight), old, new, shared=(scale,)))
        return kept, kept
    left, right = both(partial(tall.steps, weight=weight), old, new, shared=(scale,))
    return Pair(left.once, right.once), Pair(left.twice, right.twice)


def _heavy_ball(given: _Given) -> Course:
    """ν times the last step plus a normalized step along the gradient."""
    geometry, frame, grad, momentum, running, options, scale = given
    assert momentum is not None  # option_checks.check_choices
    fresh = geometry.gradient(frame, grad, options.gradient_repair)
    coords = None if options.normalize is None else geometry.coordinates(frame, fresh)
    found = coords if coords is None else geometry.direction(frame, coords, options)
    if coords is not None and found is coords:
        scale, running = _normalized(given, coords, None)
    else:
        scale = given.sign * scale
    if found is not coords:
        pairs = zip(geometry.vector(frame, found), grad, strict=True)
        fresh = Pair(*(x.view_as(like) for x, like in pairs))
    step, ahead = _added(options, geometry.arrive(frame, momentum), scale, fresh)
    direction = geometry.coordinates(frame, ahead)
    return Course(direction, torch.ones_like(scale), step, ahead is step, running, None)


def _normalized(given: _Given, coords: Any, weight: Tensor | None) -> tuple[Tensor, Running | None]:
    """The signed learning rate (batch,) over what a step is divided by, and what is remembered.

    That is the norm of a vector, or the running mean of norms that it belongs to, or nothing.
    ``weight`` (batch,) is what gradients count in the vector, if they do not count as one.
    """
    geometry, frame, options, running = given.geometry, given.frame, given.options, given.running
    told = options.normalize
    if not (weight is not None or options.second_moment or told in (None, "spectral")):
        square = geometry.metric_square(frame, coords)
        least = _least(square, options)
        return scalars.over_root(square, least, given.sign, given.scale), running
    scale = given.sign * (given.scale if weight is None else given.scale / weight)
    if told is None and not options.second_moment:
        return scale, running
    norm = linalg.overflown_is_nan(geometry.norm(frame, coords, told or "metric"))
    if options.second_moment:
        norm, running = _mean_norm(norm, running, options)
    elif weight is not None:
        norm = norm / weight
    return scale / norm.clamp_min(_least(norm, options)), running


def _least(norm: Tensor, options: StepOptions) -> float:
    """What norms are bounded by from below: smaller ones cannot be told, or do not count."""
    return max(options.norm_floor, linalg.least_norm(norm.dtype))


def _mean_norm(
    norm: Tensor, running: Running | None, options: StepOptions
) -> tuple[Tensor, Running]:
    """The root of the running mean of squared norms (batch,), this one included."""
    assert running is not None  # the optimizer keeps it for those who ask for it
    beta = options.second_moment
    square = beta * running.square + (1 - beta) * norm.square()
    running = running._replace(
        square=square, square_weight=beta * running.square_weight + (1 - beta)
    )
    return (square / running.square_weight).sqrt(), running
