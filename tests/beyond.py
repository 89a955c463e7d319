"""What the library adds to the paper's steps, in the dense reference; and runs beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import rankfold

from .problems import Blocks, Case, Loss, smallest_singular_value, starting_factors
from .reference import Reference

STEPS = 5
# Every class of shapes: pairs, tall and wide grids, a ragged one, and r = m.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "1x1": ((7,), (5,), 2),
    "square": ((3,), (6,), 3),
    "4x1": ((5, 5, 5, 5), (6,), 2),
    "2x3": ((5, 5), (4, 4, 4), 2),
    "ragged": ((4, 7, 2), (5, 3), 2),
}


class Beyond(Reference):
    """The reference with further options, each written as it is defined."""

    def __init__(
        self,
        *args: Any,
        weight_decay: float = 0.0,
        decay_to: float = 0.0,
        momentum_form: str = "smoothing",
        second_moment: float = 0.0,
        bias_correction: bool = False,
        growth: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.weight_decay, self.decay_to = weight_decay, decay_to
        self.heavy, self.unit = momentum_form == "heavy-ball", momentum_form == "unit-smoothing"
        self.beta, self.bias_correction = second_moment, bias_correction
        self.growth = growth
        self.squares: list[float] = []
        self.taken = 0

    def size(self, vector: Tensor) -> float:
        """What a step along a vector is divided by."""
        if not self.beta:
            return self.divisor(vector)
        # The newest last; weights that add up to 1 make it a mean.
        weights = [self.beta**k for k in range(len(self.squares))][::-1]
        total = sum(w * s for w, s in zip(weights, self.squares, strict=True))
        return max(float((total / sum(weights)) ** 0.5), self.norm_floor)

    @property
    def rate(self) -> float:
        """The learning rate of a step from here."""
        values = [torch.linalg.svdvals(w)[: self.r] for w in itertools.chain(*self.W)]
        return self.lr * float(torch.cat(values).square().mean().sqrt()) ** self.growth

    def decay(self, vectors: list[Tensor]) -> list[Tensor]:
        """Move to the decayed product, and give vectors there with the same matrices."""
        matrices = [self.matrix(vector).flatten() for vector in vectors]
        w, share = self.a @ self.b.T, self.lr * self.weight_decay
        u, s, vt = torch.linalg.svd(w, full_matrices=False)
        u, s, vt = u[:, : self.r], s[: self.r], vt[: self.r]
        s = s + share * (self.decay_to - s)
        self.move_to(u * s.sqrt(), vt.T * s.sqrt())
        return matrices if self.lives_downstairs else [self.lift(x) for x in matrices]

    def step(self, grad: Any) -> None:
        gradient, nu = self.gradient(grad), self.momentum
        if self.normalize is not None:
            kind = torch.linalg.matrix_norm(self.matrix(gradient), ord=2)
            if self.normalize == "metric":
                kind = self.metric(gradient, gradient).sqrt()
            self.squares.append(float(kind) ** 2)
        self.taken += 1
        if self.unit:
            length = float(self.metric(gradient, gradient).sqrt())
            gradient = gradient / max(length, self.norm_floor)
        if self.heavy:
            fresh = -self.rate * gradient / self.size(gradient)
            self.M = nu * self.M + fresh
            step = nu * self.M + fresh if self.nesterov else self.M
        else:
            self.M = nu * self.M + (1 - nu) * gradient
            along = nu * self.M + (1 - nu) * gradient if self.nesterov else self.M
            if self.bias_correction:
                along = along / (1 - nu ** (self.taken + self.nesterov))
            step = -self.rate * along / self.size(along)
        if self.weight_decay:
            step, self.M = self.decay([step, self.M])
        self.move_to(*self.retract(step))
        self.M = self.transport(self.M)


def side_by_side(
    case: Case, dtype: torch.dtype = torch.float64, shrink: float = 0.0, **options: Any
) -> Iterator[tuple[Blocks, Blocks]]:
    """Products after each step, of the library and of the reference, which share the start alone.

    A step is about 4% of the smallest singular value; ``shrink`` is lr times the weight decay.
    """
    generator = case.generator()
    left, right = starting_factors(case, generator)
    common = {
        "momentum": case.momentum,
        "normalize": case.normalize,
        "retraction": case.retraction,
        "nesterov": case.nesterov,
        **options,
    }
    reference = Beyond(case.geometry, left, right, lr=1.0, **common)
    loss = Loss(reference.W, case.rank, generator)
    gradient = reference.gradient(loss.gradient(reference.W))
    length = float(torch.linalg.matrix_norm(reference.matrix(gradient)))
    reference.lr = smallest_singular_value(reference.W, case.rank) * reference.divisor(gradient)
    reference.lr *= 0.04 / length
    reference.weight_decay = shrink / reference.lr
    params = [[nn.Parameter(x.to(dtype, copy=True)) for x in side] for side in (left, right)]
    optimizer = rankfold.RiemannianSGD(
        rankfold.Grid(*params),
        lr=reference.lr,
        geometry=case.geometry,
        weight_decay=reference.weight_decay,
        **common,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss([[a @ b.T for b in params[1]] for a in params[0]]))
        optimizer.step()
        reference.step(loss.gradient(reference.W))
        made = [[x.detach().double() for x in side] for side in params]
        yield [[a @ b.T for b in made[1]] for a in made[0]], reference.W


def check(
    case: Case, dtype: torch.dtype = torch.float64, shrink: float = 0.0, **options: Any
) -> None:
    """Products agree after every step: to 1e-10, or in float32 to 3e-6, of the block's size."""
    tolerance = 1e-10 if dtype == torch.float64 else 3e-6
    for t, (ours, theirs) in enumerate(side_by_side(case, dtype, shrink, **options), start=1):
        for here, there in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            off = float(torch.linalg.matrix_norm(here - there) / torch.linalg.matrix_norm(there))
            assert off <= tolerance, f"off by {off:.1e} at step {t}"
