"""What the safeguards study is made of: two toy problems, one training loop, and the patches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from rankfold import Factor, Grid, RiemannianSGD, linalg, polar, tall
from rankfold.geometries import EVENTS, Pair, base
from rankfold.geometries.fixed_embedded import FixedEmbedded
from rankfold.geometries.fixed_quotient import FixedQuotient
from rankfold.geometries.isometry_quotient import IsometryQuotient
from rankfold.geometries.stiefel import StiefelFrame, StiefelGeometry, StiefelTangent

RECORDS, EARLY = 250, 300  # records a run, and the first steps, recorded more often
Patch = AbstractContextManager[object]


class Problem(Protocol):
    """Parameters in grids, stochastic gradients for them, and what to measure."""

    grids: list[Grid]

    def backward(self, step: int) -> None:
        """Leave the gradients of one minibatch in ``.grad``."""

    def measure(self) -> dict[str, float]:
        """Noise-free numbers at the present point; "error" is one of them."""


@dataclass
class Trace:
    """One run: the steps recorded, a series for each quantity, and when it died, if it did."""

    steps: list[int] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    died: int | None = None
    warned: bool = False

    def add(self, step: int, values: dict[str, float]) -> None:
        """Record ``values`` at ``step``."""
        self.steps.append(step)
        for name, value in values.items():
            self.series.setdefault(name, []).append(value)

    def last(self, name: str) -> float:
        """The last value recorded."""
        return self.series[name][-1]

    def at(self, step: int, name: str) -> float:
        """The value recorded at ``step``, or the last one before it."""
        return self.series[name][max(i for i, s in enumerate(self.steps) if s <= step)]

    def settled(self, name: str) -> float:
        """The mean of the last tenth, which constant learning rates make noisy."""
        tail = self.series[name][-max(1, sum(s > 0.9 * self.steps[-1] for s in self.steps)) :]
        return math.fsum(tail) / len(tail) if all(map(math.isfinite, tail)) else math.nan


def draws(seed: int) -> torch.Generator:
    """A generator of its own for each purpose, so that variants see the same numbers."""
    return torch.Generator().manual_seed(seed)


def orthonormal(*shape: int, generator: torch.Generator) -> Tensor:
    """Random factors with orthonormal columns, float32."""
    q: Tensor = torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64))[0]
    return q.float()


def condition(blocks: Tensor) -> float:
    """The worst condition number among (..., m, r), up to 1e18."""
    values = torch.linalg.svdvals(blocks.detach().double().nan_to_num())
    return float((values[..., 0] / values[..., -1].clamp_min(1e-18)).amax())


class Regression:
    """Four members W = A Bᵀ (24×20, rank 4) fitted to y = T x + noise, 32 fresh x a step.

    Args:
        isometry: orthonormal factors and target, for the isometry geometries.
        noise: standard deviation of the labels' noise.
        target_rank: rank of T, 4 or below.
        dtype: of the parameters.
        twist: for each member, the size, relative to the gradient, of a constant vector along the
            gauge that is added to the factor gradients: an inconsistency of known size.
        left_scale: scale of A at the start, 0 for LoRA's start.
        nan_share: the share of steps at which one entry of the first member's gradient is NaN.
    """

    members, m, n, rank, batch = 4, 24, 20, 4, 32

    def __init__(
        self,
        *,
        isometry: bool = False,
        noise: float = 0.3,
        target_rank: int = 4,
        dtype: torch.dtype = torch.float32,
        twist: tuple[float, ...] | None = None,
        left_scale: float = 1.0,
        nan_share: float = 0.0,
    ) -> None:
        g, k, r = draws(1), self.members, self.rank
        spread = torch.ones(r) if isometry else torch.tensor([2.0, 1.5, 1.0, 0.7])
        spread[target_rank:] = 0
        u, v = (orthonormal(k, rows, r, generator=g) for rows in (self.m, self.n))
        self.target = (u * spread) @ v.mT
        a, b = (orthonormal(k, rows, r, generator=g) for rows in (self.m, self.n))
        self.a = torch.nn.Parameter((left_scale * a).to(dtype))
        self.b = torch.nn.Parameter(b.to(dtype))
        self.grids = [Grid(self.a, self.b, groups=k, name="w")]
        self.noise, self.data = noise, draws(2)
        self.twist = None if twist is None else torch.tensor(twist)[:, None, None]
        self.direction = torch.randn(k, r, r, generator=g)
        self.nan_steps = draws(9), nan_share

    def residual(self) -> Tensor:
        """W − T, (members, m, n)."""
        return self.a.detach().float() @ self.b.detach().float().mT - self.target

    def backward(self, step: int) -> None:
        """Gradients of ½‖x Wᵀ − y‖²/batch, in the parameters' dtype."""
        a, b = self.a.detach().float(), self.b.detach().float()
        x = torch.randn(self.members, self.batch, self.n, generator=self.data)
        label = torch.randn(self.members, self.batch, self.m, generator=self.data)
        g = (x @ self.residual().mT - self.noise * label).mT @ x / self.batch
        left, right = g @ b, g.mT @ a
        if self.twist is not None:
            vertical = a @ self.direction @ (b.mT @ b), -b @ self.direction.mT @ (a.mT @ a)
            size = torch.sqrt(_squares(left) + _squares(right))
            share = self.twist * size / torch.sqrt(sum(map(_squares, vertical), torch.zeros(())))
            left, right = left + share * vertical[0], right + share * vertical[1]
        chance, nan_share = self.nan_steps
        if nan_share and float(torch.rand((), generator=chance)) < nan_share:
            left[0, 0, 0] = math.nan
        self.a.grad, self.b.grad = left.to(self.a.dtype), right.to(self.b.dtype)

    def measure(self) -> dict[str, float]:
        """Relative errors, over all and for each member; conditioning; orthonormality."""
        relative = torch.sqrt(_squares(self.residual()) / _squares(self.target)).flatten()
        a, b = self.a.detach().double(), self.b.detach().double()
        values = torch.linalg.svdvals((a @ b.mT).nan_to_num())[:, : self.rank]
        eye = torch.eye(self.rank, dtype=torch.float64)
        grams = [(x.mT @ x - eye).nan_to_num() for x in (a, b)]
        defects = [float(torch.linalg.matrix_norm(gram, ord=2).amax()) for gram in grams]
        worst = (condition(a), condition(b))
        return {
            "error": float(relative.square().mean().sqrt()),
            "first": float(relative[0]),
            "others": float(relative[1:].square().mean().sqrt()),
            "smallest": float((values[:, -1] / values[:, 0]).amin()),
            "condition": max(worst),
            "defect": max(defects),
            **{f"condition{k}": max(condition(a[k]), condition(b[k])) for k in range(len(a))},
            **{f"error{k}": float(relative[k]) for k in range(len(a))},
        }


class Attention:
    """A layer with rotary embeddings and QK-norm, fitted to a layer like it with other weights."""

    width, heads, size, context, batch = 16, 2, 4, 8, 8

    def __init__(self) -> None:
        g = draws(4)
        shape = (self.heads * self.size, self.width)

        def weights() -> list[Tensor]:
            return [torch.randn(*shape, generator=g) / 4 for _ in range(4)]

        self.teacher = weights()
        self.student = [torch.nn.Parameter(w) for w in weights()]
        q, k, v, o = (Factor(w, axis=0, blocks=self.heads) for w in self.student)
        self.grids = [
            Grid(q, k, groups=self.heads, name="qk"),
            Grid(o, v, groups=self.heads, name="vo"),
        ]
        turn = torch.arange(self.context)[:, None] * torch.tensor([1.0, 0.1])
        self.turn = torch.polar(torch.ones_like(turn), turn)
        self.data = draws(5)
        self.held_out = torch.randn(64, self.context, self.width, generator=draws(6))

    def layer(self, x: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """(batch, context, width) to the same."""
        q, k, v, o = weights
        heads = [(x @ w.mT).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for w in (q, k, v)]
        q, k = (self.rotate(F.rms_norm(h, (self.size,))) for h in heads[:2])
        mixed = F.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(2) @ o

    def rotate(self, h: Tensor) -> Tensor:
        """Rotary embedding of (batch, heads, context, size)."""
        pairs = torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2)

    def loss(self, x: Tensor) -> Tensor:
        """Mean squared distance to the teacher."""
        return F.mse_loss(self.layer(x, self.student), self.layer(x, self.teacher))

    def backward(self, step: int) -> None:
        """Gradients of the loss of fresh inputs."""
        for p in self.student:
            p.grad = None
        x = torch.randn(self.batch, self.context, self.width, generator=self.data)
        self.loss(x).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Held-out loss relative to the teacher's output, and conditioning of the heads."""
        size = self.layer(self.held_out, self.teacher).square().mean()
        q, k = (w.view(self.heads, -1, self.width).mT for w in self.student[:2])
        worst = max(condition(q), condition(k))
        return {"error": float(self.loss(self.held_out) / size), "condition": worst}


def _squares(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1), keepdim=True)


def train(
    problem: Problem,
    steps: int,
    options: dict[str, Any],
    *,
    patches: Iterable[Patch] = (),
    after: Callable[[RiemannianSGD], None] | None = None,
    probe: Callable[[], dict[str, float]] | None = None,
) -> Trace:
    """Train with momentum 0.9; ``after`` runs after each step, ``probe`` at each record."""
    trace, every = Trace(), max(1, steps // RECORDS)
    with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for patch in patches:
            stack.enter_context(patch)
        optimizer = RiemannianSGD(problem.grids, **{"momentum": 0.9, **options})
        trace.add(0, _record(problem, optimizer, None))
        for step in range(1, steps + 1):
            problem.backward(step)
            optimizer.step()
            if after is not None:
                after(optimizer)
            if trace.died is None and not all(
                bool(p.isfinite().all()) for g in problem.grids for p in g.params()
            ):
                trace.died = step
            if step % every == 0 or (step <= EARLY and step % 5 == 0):
                trace.add(step, _record(problem, optimizer, probe))
    trace.warned = any("inconsistent" in str(w.message) for w in caught)
    return trace


def _record(
    problem: Problem, optimizer: RiemannianSGD, probe: Callable[[], dict[str, float]] | None
) -> dict[str, float]:
    counted = optimizer.counts().values()
    events = {name: float(sum(member.get(name, 0) for member in counted)) for name in EVENTS}
    return {**problem.measure(), **events, **(probe() if probe else {})}


# The patches: each takes one safeguard out of the library for the length of a run.


def trust_the_formula() -> Patch:
    """Polar factors from I + ΞᵀΞ, which assumes that the stored U is orthonormal."""

    def retract(
        self: StiefelGeometry, frame: StiefelFrame, coords: StiefelTangent, scale: Tensor, _: Any
    ) -> base.Landing:
        new = []
        for side in coords:
            step = tall.per_member(scale, side.xi) * side.xi
            gram = step.mT @ step + linalg.identity_like(step.mT @ step)
            new.append((side.u + step) @ polar.inverse_sqrt(gram, 6))
        return base.Landing(Pair(*new), None, torch.ones_like(scale, dtype=torch.bool), None)

    return mock.patch.object(StiefelGeometry, "retract", retract)


def no_transport() -> list[Patch]:
    """Momentum kept as it was, number by number, and not projected at the new point."""

    def mix(
        self: base.Geometry, frame: Any, grad: Pair, momentum: Pair, nu: float, repair: str
    ) -> Pair:
        pairs = zip(momentum, self.gradient(frame, grad, repair), strict=True)
        return Pair(*(torch.lerp(m, g, 1 - nu) for m, g in pairs))

    def depart(self: base.Geometry, frame: Any, coords: Any, tangent: Pair, _: Any) -> Pair:
        return tangent

    return [
        mock.patch.object(IsometryQuotient, "mix", mix),
        mock.patch.object(FixedQuotient, "mix", mix),
        mock.patch.object(FixedEmbedded, "depart", depart),
    ]


_ARRIVE: dict[type, Any] = {g: g.arrive for g in (FixedQuotient, IsometryQuotient)}


def watch_momentum(geometry: type[base.Geometry]) -> tuple[Patch, Callable[[], dict[str, float]]]:
    """A patch that looks on, and a probe: the share of the momentum that is not a tangent vector.

    For the quotients, how far the horizontal projection moves it; for the embedded geometry, how
    far its two overlaps UᵀC and DᵀV are apart; both relative to the momentum's length.
    """
    share = [math.nan]
    original: Any = geometry.coordinates

    def coordinates(self: base.Geometry, frame: Any, tangent: Pair) -> Any:
        coords = original(self, frame, tangent)
        if geometry is FixedEmbedded:
            c = tangent.left.flatten(1, 2) @ frame.right.inverse
            d = tangent.right.flatten(1, 2) @ frame.left.inverse
            u = frame.point.left.flatten(1, 2) @ frame.left.inverse
            v = frame.point.right.flatten(1, 2) @ frame.right.inverse
            off = u.mT @ c - (v.mT @ d).mT
            size = linalg.squared_norm(off, 2).sqrt()
        else:
            fitted = _ARRIVE[geometry](self, frame, tangent)
            moved = Pair(tangent.left - fitted.left, tangent.right - fitted.right)
            size = self.metric_norm(frame, original(self, frame, moved))
        share[0] = float((size / self.metric_norm(frame, coords)).amax())
        return coords

    def probe() -> dict[str, float]:
        return {"incoherent": share[0]}

    return mock.patch.object(geometry, "coordinates", coordinates), probe


def plain_cholesky() -> Patch:
    """One Cholesky factorization, whatever becomes of it."""

    def cholesky(gram: Tensor, damping: float = 0.0) -> linalg.Cholesky:
        gram = gram + damping * linalg.identity_like(gram)
        lower, info = torch.linalg.cholesky_ex(gram, check_errors=False)
        failed = info != 0
        lower = lower.masked_fill(failed[..., None, None], math.nan)
        return linalg.Cholesky(lower, linalg.inverse(lower), failed)

    return mock.patch.object(linalg, "cholesky", cholesky)


def no_skip() -> Patch:
    """Steps that are not finite are taken like any other."""

    def choose(yes: Tensor, no: Tensor, mask: Tensor) -> Tensor:
        return yes

    return mock.patch.object(tall, "choose", choose)


def drop_masters(optimizer: RiemannianSGD) -> None:
    """After a step: overwrite the float32 masters with the rounded weights."""
    for param, state in optimizer.state.items():
        if "master" in state:
            state["master"].copy_(param.detach())
