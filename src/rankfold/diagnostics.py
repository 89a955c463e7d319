"""What can be measured about a point, a gradient and a momentum, and what to do about it.

`measure` is a pure function of one step of one stack; `RiemannianSGD` calls it while recording is
on and never otherwise. `log_to` sends the numbers somewhere every k steps, `explain` turns them
into sentences, and `check_geometry` measures a geometry itself rather than a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .advice import Numbers, explain
from .geometries import EVENTS, Geometry, Outcome, Pair, StepOptions, course
from .geometries.embedded import EmbeddedGeometry
from .geometries.stiefel import StiefelGeometry
from .geometry_check import GeometryReport, check_geometry
from .linalg import frobenius, skew, squared_norm, sym

if TYPE_CHECKING:
    from .combined import CombinedOptimizer
    from .optimizer import RiemannianSGD

__all__ = ["GeometryReport", "check_geometry", "explain", "log_to", "measure"]

Sink = Callable[[int, dict[str, float]], object]


# Measuring -----------------------------------------------------------------------------------

# Overlaps below this share of what unrelated factors and gradients would have are taken for it:
# their difference is rounding (bfloat16 gradients included), and says nothing about the loss.
_OVERLAP_FLOOR = 0.1


def measure(
    geometry: Geometry,
    point: Pair,
    grad: Pair,
    momentum: Pair | None,
    outcome: Outcome,
    options: StepOptions,
    running: course.Running | None = None,
) -> dict[str, Tensor]:
    """The numbers of one step, each (batch,), by name.

    ``point``, ``grad``, ``momentum`` and ``running`` are what the step was given: (batch, I, m, r)
    and (batch, J, n, r), and numbers (batch,). ``outcome`` is what it returned. Singular values and
    defects are those of the factors after the step, everything else is taken where it began.
    """
    frame = geometry.frame(point, options.damping)
    gradient = geometry.gradient(frame, grad, options.gradient_repair)
    found = _factor_numbers(geometry, outcome.point)
    found["gradient_inconsistency"] = disagreement(point, grad, geometry.isometry)
    if momentum is not None:
        found.update(_momentum_numbers(geometry, frame, point, momentum))
    # A skipped member made no step, whatever its scale would have been.
    alive = outcome.alive
    moved = outcome.scale.abs()
    step = course.plot(geometry, frame, grad, momentum, running, options).direction
    for what, coords in (("gradient", geometry.coordinates(frame, gradient)), ("step", step)):
        for kind in ("metric", "spectral"):
            size = geometry.norm(frame, coords, kind)
            if what == "step":
                size = torch.where(alive, size * moved, 0)
            found[f"{what}_{kind}_norm"] = size
    limit = geometry.step_limit(frame, step)
    if limit is not None:
        found["step_share"] = torch.where(alive, moved / limit / (1 - options.shrink), 0)
    found["precision"] = torch.full_like(moved, torch.finfo(point.left.dtype).eps)
    return found


# Members, and a number (batch,) of each by name.
Measured = tuple[list[str], dict[str, Tensor]]


def by_member(
    measured: list[Measured], counted: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """All numbers of each member, on the host, with how often what has happened to it."""
    found: dict[str, dict[str, float]] = {}
    for members, numbers in measured:
        columns = {name: values.tolist() for name, values in numbers.items()}
        for k, member in enumerate(members):
            events = counted.get(member, {})
            found[member] = {name: column[k] for name, column in columns.items()}
            found[member].update({event: events.get(event, 0) for event in EVENTS})
    return found


def _factor_numbers(geometry: Geometry, point: Pair) -> dict[str, Tensor]:
    """Singular values of the factors, worst over the blocks of a member."""
    found = {}
    for side, blocks in zip(("left", "right"), point, strict=True):
        wide = blocks.double()
        gram = wide.mT @ wide
        finite = gram.isfinite().flatten(1).all(1)
        squares = torch.linalg.eigvalsh(gram.nan_to_num(0, 0, 0)).clamp_min(0)
        numbers = {
            "smallest_singular_value": squares[..., 0].sqrt().amin(1),
            # A zero factor has no direction at all: inf, and not 0/0.
            "condition": (squares[..., -1] / squares[..., 0]).sqrt().nan_to_num(torch.inf).amax(1),
        }
        if geometry.isometry:
            numbers["orthogonality_defect"] = (squares - 1).abs().amax((1, 2))
        for name, value in numbers.items():
            found[f"{side}_{name}"] = torch.where(finite, value, torch.nan)
    return found


class Overlaps(NamedTuple):
    """Norms (batch,): of ΣA_iᵀX_Ai − (ΣB_jᵀX_Bj)ᵀ, of both added up, and of unrelated vectors'."""

    difference: Tensor
    size: Tensor
    unrelated: Tensor


def overlaps(point: Pair, vector: Pair, isometry: bool) -> Overlaps:
    """How far both sides of a vector agree on what they share; for isometries the skew parts."""
    left = (point.left.mT @ vector.left).sum(1)
    right = (point.right.mT @ vector.right).sum(1).mT
    if isometry:
        left, right = skew(left), skew(right)
    unrelated = [
        squared_norm(p, 3).sqrt() * squared_norm(x, 3).sqrt() / math.sqrt(p.shape[1] * p.shape[2])
        for p, x in zip(point, vector, strict=True)
    ]
    size = frobenius(left) + frobenius(right)
    return Overlaps(frobenius(left - right), size, unrelated[0] + unrelated[1])


def disagreement(point: Pair, vector: Pair, isometry: bool) -> Tensor:
    """The difference of the `overlaps` as a share of their sizes, (batch,)."""
    found = overlaps(point, vector, isometry)
    return _share(found.difference, torch.maximum(found.size, _OVERLAP_FLOOR * found.unrelated))


def _momentum_numbers(
    geometry: Geometry, frame: Any, point: Pair, momentum: Pair
) -> dict[str, Tensor]:
    """How far the momentum a step was given is from being tangent, and horizontal, there."""
    found = {}
    overlaps = Pair(point.left.mT @ momentum.left, point.right.mT @ momentum.right)
    if isinstance(geometry, EmbeddedGeometry):
        found["momentum_decoherence"] = disagreement(point, momentum, geometry.isometry)
    # Upstairs, each factor counts as often as there are blocks it is in.
    weights = (point.right.shape[1], point.left.shape[1])

    def size(pair: Pair) -> Tensor:
        left, right = (w * squared_norm(x, 3) for w, x in zip(weights, pair, strict=True))
        return torch.sqrt(left + right)

    if geometry.isometry:
        symmetric = Pair(sym(overlaps.left), sym(overlaps.right))
        found["momentum_deskewing"] = _share(size(symmetric), size(momentum))
    if isinstance(geometry, StiefelGeometry):
        arrived = geometry.arrive(frame, momentum)
        vertical = Pair(
            *(
                x - p @ sym(o) - a
                for x, p, o, a in zip(momentum, point, overlaps, arrived, strict=True)
            )
        )
        found["momentum_horizontality"] = _share(size(vertical), size(momentum))
    elif not isinstance(geometry, EmbeddedGeometry):
        arrived = geometry.arrive(frame, momentum)
        vertical = Pair(*(x - a for x, a in zip(momentum, arrived, strict=True)))
        norms = (
            geometry.metric_norm(frame, geometry.coordinates(frame, x))
            for x in (vertical, momentum)
        )
        found["momentum_horizontality"] = _share(*norms)
    return found


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part/whole, and 0 where both are."""
    return part / whole.clamp_min(torch.finfo(whole.dtype).tiny)


# Logging -------------------------------------------------------------------------------------


class ScalarWriter(Protocol):
    """What TensorBoard's SummaryWriter has, and all that is asked of it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class LogHandle:
    """Stops the logging that `log_to` began."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def remove(self) -> None:
        """Log no more. Doing it twice does no harm."""
        self._stop()


def log_to(
    optimizer: RiemannianSGD | CombinedOptimizer,
    sink: Sink | ScalarWriter,
    every: int = 100,
    *,
    start: int = 0,
    per_member: bool = True,
) -> LogHandle:
    """Send the diagnostics of every ``every``-th step to ``sink``; the other steps cost nothing.

    Args:
        optimizer: whose steps; recording is switched on for those that are logged. Of what
            `build_optimizer` returns the products.
        sink: called as ``sink(step, values)``, with values by name, ``"member/number"``. An
            object with ``add_scalar``, like TensorBoard's SummaryWriter, gets them one by one.
        every: steps from one record to the next.
        start: steps taken before this one, for runs that go on.
        per_member: False keeps to ``"worst/..."``, over members and both sides, and
            ``"total/..."`` for the counts.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    # By name: that class is built on the one this module serves.
    products: Any = getattr(optimizer, "products", optimizer)
    taken = start
    switched = False

    def before(*_: object) -> None:
        nonlocal switched
        if (taken + 1) % every == 0 and not products.recording_diagnostics:
            products.record_diagnostics()
            switched = True

    def after(*_: object) -> None:
        nonlocal taken
        taken += 1
        try:
            # A step on which no grid had a gradient measured nothing.
            if taken % every == 0 and (members := products.diagnostics()):
                _send(sink, taken, _flat(members, per_member))
        finally:
            back()

    def back() -> None:
        nonlocal switched
        if switched:
            products.record_diagnostics(False)
            switched = False

    hooks = [
        products.register_step_pre_hook(before),
        products.register_step_post_hook(after),
    ]

    def stop() -> None:
        for hook in hooks:
            hook.remove()
        back()

    return LogHandle(stop)


def _send(sink: Sink | ScalarWriter, step: int, values: dict[str, float]) -> None:
    write = getattr(sink, "add_scalar", None)
    if write is not None:
        for name, value in values.items():
            write(name, value, step)
    elif callable(sink):
        sink(step, values)


def _flat(members: Mapping[str, Numbers], per_member: bool) -> dict[str, float]:
    """``member/number`` for each member, the worst of each number, and totals of the counts."""
    flat: dict[str, float] = {}
    extremes: dict[str, float] = {}
    for member, numbers in members.items():
        for name, value in numbers.items():
            if name == "precision":
                continue
            if per_member:
                flat[f"{member}/{name}"] = value
            if name in EVENTS:
                total = f"total/{name}"
                extremes[total] = extremes.get(total, 0) + value
                continue
            worst = f"worst/{name.removeprefix('left_').removeprefix('right_')}"
            smaller = worst.endswith("smallest_singular_value")
            before = extremes.get(worst, value)
            # NaN compares false with everything: it must win by name.
            beats = math.isnan(value) or (value < before if smaller else value > before)
            extremes[worst] = value if beats else before
    return {**flat, **extremes}
