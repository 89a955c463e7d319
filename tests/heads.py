"""Members alike in shape, each with a target of its own, for tests that spoil one of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankfold import Grid, RiemannianSGD
from rankfold.checks import orthonormality_defect

from .reference import FIXED


class Heads(nn.Module):
    """Members ``W = A Bᵀ``, 7×6 of rank 2 and alike in shape, each with a target of its own."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, members: int = 4, lefts: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        self.members = members
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.a = nn.Parameter(torch.linalg.qr(draw(members * lefts, 7, 2)).Q.to(dtype).contiguous())
        self.b = nn.Parameter(torch.linalg.qr(draw(members, 6, 2)).Q.to(dtype).contiguous())
        self.target = 0.7 * draw(members, lefts, 7, 6)

    def grid(self) -> Grid:
        return Grid(self.a, self.b, groups=self.members, name="w")

    def losses(self) -> Tensor:
        """One a member."""
        a = self.a.double().view(*self.target.shape[:2], 7, 2)
        products = a @ self.b.double().mT[:, None]
        return (products - self.target).square().sum((1, 2, 3))

    def loss(self) -> float:
        return self.losses().sum().item()

    def backward(self, times: float = 1.0) -> float:
        """Gradients, so many times as long."""
        self.zero_grad()
        loss = self.losses().sum()
        (times * loss).backward()
        return loss.item()

    def run(self, optimizer: RiemannianSGD, steps: int) -> list[float]:
        """The losses before the steps and after each of them."""
        found = []
        for _ in range(steps):
            found.append(self.backward())
            optimizer.step()
        return [*found, self.loss()]

    def survives(self, geometry: str) -> bool:
        """Whether parameters are finite and, for isometries, orthonormal."""
        finite = all(bool(p.isfinite().all()) for p in self.parameters())
        if geometry in FIXED:
            return finite
        tolerance = 2e-2 if self.a.dtype == torch.bfloat16 else 2e-6
        return finite and all(orthonormality_defect(p).max() < tolerance for p in self.parameters())


def states(optimizer: RiemannianSGD, model: nn.Module) -> list[Tensor]:
    """The parameters, each followed by what the optimizer keeps for it."""
    return [v for p in model.parameters() for v in (p.detach(), *optimizer.state[p].values())]
