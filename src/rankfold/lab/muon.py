"""Muon on every head's factors, and its form for pairs that sees their product alone.

The arithmetic is float32, or float64 for such weights; only the iteration for signs is bfloat16.
The number of operations depends on how many shapes of factors there are, not on heads or layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tall
from ..factors import Grid
from ..geometries import Pair
from ..linalg import cholesky_pair
from ..precision import current_device, exact_arithmetic
from ..stacks import Buffers, Plan, Stack, grad_of, itself, needs_master
from ..whitening import Manner, whiten

# As in `torch.optim.Muon`. The polynomial takes singular values from (0, 1] to about [0.7, 1.2],
# small ones fast, and not to one.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_SMALLEST_NORM = 1e-7
_SIGNS = Manner(_SMALLEST_NORM)


def sign(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Roughly U Vᵀ of each x = U Σ Vᵀ (batch, rows, columns), by Newton–Schulz steps in ``dtype``.

    torch's own iteration, which takes one matrix at a time, on a batch of them.
    """
    a, b, c = _COEFFICIENTS
    tall_ones = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall_ones else x).to(dtype)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST_NORM)
    for _ in range(_STEPS):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.mT if tall_ones else y).to(x.dtype)


class Muon:
    """Muon on each factor of ``grids`` by itself, all on one device.

    To every m×r block, a row of bias included, it does what `torch.optim.Muon` does to a matrix of
    its own: Nesterov momentum, `sign`, decoupled weight decay. torch's factor √max(1, rows/columns)
    of the learning rate is √(m/r), whichever way the weight that holds the block is stored.

    Left and right factors go by ``sides`` times the learning rate. With ``masters`` a float32 copy
    of low-precision weights lives on between steps; without, each step begins at the rounded
    weights. A graph can record a step if ``lr`` is a tensor on the device; ``sign_dtype`` is that
    of the iteration. A ``manner`` with a tilt or a balance takes its direction in place of signs.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        lr: float | Tensor,
        *,
        momentum: float,
        weight_decay: float,
        masters: bool,
        sides: tuple[float, float] = (1.0, 1.0),
        sign_dtype: torch.dtype = torch.bfloat16,
        manner: Manner = _SIGNS,
    ) -> None:
        self.lr = lr
        self.sides = sides
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.sign_dtype = sign_dtype
        self.manner = manner
        # One plan, where the optimizers of the library cut theirs to a CPU's cache.
        self.plan = Plan([(str(grid.name), grid) for grid in grids])
        with torch.no_grad():
            start = self.plan.gather(itself)
        self.momenta: Buffers = {k: torch.zeros_like(x) for k, x in start.items()}
        narrow = any(needs_master(bundle[0]) for bundle in self.plan.bundles)
        self.masters: Buffers | None = start if masters and narrow else None

    @property
    def capturable(self) -> bool:
        """Whether a graph can record a step."""
        return isinstance(self.lr, Tensor)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from their gradients."""
        plan = self.plan
        with exact_arithmetic(plan.device_types), current_device(plan.device):
            weights = plan.gather(itself) if self.masters is None else self.masters
            moved = plan.gather(grad_of)
            self._take_in(moved)
            # The blocks cover the weights, so that all of what moved is overwritten.
            directions = self._directions(moved, weights)
            for stack, left, right in zip(
                plan.stacks, directions[::2], directions[1::2], strict=True
            ):
                if self.sides != (1, 1):
                    left, right = self.sides[0] * left, self.sides[1] * right
                stack.write(moved, as_pair(stack, left, right))
            for k, direction in moved.items():
                weights[k].mul_(1 - self.lr * self.weight_decay)
                weights[k].sub_(direction.mul_(self.lr))
            plan.scatter(weights, itself)

    def _take_in(self, moved: Buffers) -> None:
        """Put the gradients ``moved`` into the momenta, and what to step along in their place."""
        for k, gradient in moved.items():
            self.momenta[k].lerp_(gradient, 1 - self.momentum)
            gradient.lerp_(self.momenta[k], self.momentum)

    def _directions(self, moved: Buffers, weights: Buffers) -> list[Tensor]:
        """What is subtracted from the weights but for the learning rate, for the momenta ``moved``.

        The left side of the first stack, its right side, the left one of the second and so on,
        with blocks in a batch (batch·I, m, r) or below each other (batch, I·m, r).
        """
        pairs = [stack.read(moved) for stack in self.plan.stacks]
        signs = self._signs([side.flatten(0, 1) for pair in pairs for side in pair])
        return [x * math.sqrt(max(1, x.shape[-2] / x.shape[-1])) for x in signs]

    def _signs(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """`sign` of stacks (batch, rows, r), or past it, all of one shape in one batch."""
        found = list(blocks)
        for alike in by_shape(blocks):
            signs = self._sign(torch.cat([blocks[k] for k in alike]))
            parts = torch.split(signs, [len(blocks[k]) for k in alike])
            for k, part in zip(alike, parts, strict=True):
                found[k] = part
        return found

    def _sign(self, x: Tensor) -> Tensor:
        if not (self.manner.tilt or self.manner.balance):
            return sign(x, self.sign_dtype)
        rows, turn, _ = whiten(x[:, None], None, 1, self.manner)
        return tall.turn(rows, turn)[:, 0]

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def state_dict(self) -> dict[str, Any]:
        """Momenta and masters."""
        return {"momenta": self.momenta, "masters": self.masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in the tensors that a graph may have recorded."""
        for mine, kept in ((self.momenta, state["momenta"]), (self.masters, state["masters"])):
            for k, x in (mine or {}).items():
                x.copy_(kept[k])


class Whitened(Muon):
    """Muon that sees products: it takes the same step whatever factors a product is written in.

    A is (I·m, r), the left factors of a member below each other, B is (J·n, r). From the momentum
    M of A comes the direction sign(M H^(-1/2)) H^(-1/2) with H = BᵀB, and likewise for B with
    H = AᵀA. A direction D of A changes the product by D Bᵀ, all of whose singular values are about
    one, so the learning rate is not adjusted to shapes. With A S and B S⁻ᵀ in place of A and B it
    is D S, so that the product moves the same way.
    """

    def _directions(self, moved: Buffers, weights: Buffers) -> list[Tensor]:
        roots, whitened = [], []
        for stack in self.plan.stacks:
            a, b = (x.flatten(1, 2) for x in stack.read(weights))
            of_a, of_b = cholesky_pair(tall.gram(a), tall.gram(b), damping=0.0)
            # Any R with H⁻¹ = RᵀR will do: R = Q H^(-1/2) with Q orthogonal, and
            # sign(M Rᵀ) R = sign(M H^(-1/2)) Qᵀ Q H^(-1/2). The triangular one is the cheapest.
            for momentum, root in zip(stack.read(moved), (of_b.inverse, of_a.inverse), strict=True):
                roots.append(root)
                whitened.append(momentum.flatten(1, 2) @ root.mT)
        signs = self._signs(whitened)
        return [x @ root for x, root in zip(signs, roots, strict=True)]


def by_shape(blocks: Sequence[Tensor]) -> list[list[int]]:
    """Which of the stacks (batch, rows, r) have one shape but for their batch."""
    found: dict[torch.Size, list[int]] = {}
    for k, x in enumerate(blocks):
        found.setdefault(x.shape[1:], []).append(k)
    return list(found.values())


def as_pair(stack: Stack, left: Tensor, right: Tensor) -> Pair:
    """Both sides as (batch, I, m, r) and (batch, J, n, r)."""
    return Pair(
        left.reshape(-1, stack.lefts, stack.left_height, left.shape[-1]),
        right.reshape(-1, stack.rights, stack.right_height, right.shape[-1]),
    )
