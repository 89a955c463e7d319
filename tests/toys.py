"""A model of two products small enough to step through, and what its tests share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rankfold

WIDE = torch.float64


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random float64 matrix with orthonormal columns."""
    drawn = torch.randn(rows, columns, dtype=WIDE, generator=generator)
    return torch.linalg.qr(drawn).Q


class Toy(nn.Module):
    """A pair, 7×5 of rank 2, and grouped heads: four 6×2 queries on two 5×2 keys.

    The loss at step ``s`` is the distance of the products to targets drawn for that step, so that
    a run which lost its place, its momentum or a gradient ends somewhere else. Factors start
    orthonormal, where all five geometries can.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def stacked(rows: int, blocks: int) -> Tensor:
            return torch.cat([orthonormal(rows, 2, generator).mT for _ in range(blocks)])

        self.a = nn.Parameter(orthonormal(7, 2, generator).to(dtype))
        self.b = nn.Parameter(orthonormal(5, 2, generator).to(dtype))
        self.q = nn.Parameter(stacked(6, 4).to(dtype))
        self.k = nn.Parameter(stacked(5, 2).to(dtype))

    def pair(self) -> rankfold.Grid:
        """One product."""
        return rankfold.Grid(self.a, self.b, name="pair")

    def heads(self) -> rankfold.Grid:
        """Two members of two products each."""
        queries = rankfold.Factor(self.q, axis=0, blocks=4)
        keys = rankfold.Factor(self.k, axis=0, blocks=2)
        return rankfold.Grid(queries, keys, groups=2, name="heads")

    def grids(self) -> list[rankfold.Grid]:
        """Both."""
        return [self.pair(), self.heads()]

    def products(self) -> tuple[Tensor, Tensor]:
        """(7, 5), and (groups, queries, 6, 5), in float64."""
        a, b, q, k = (p.to(WIDE) for p in (self.a, self.b, self.q, self.k))
        return a @ b.mT, q.view(2, 2, 2, 6).mT @ k.view(2, 1, 2, 5)

    def losses(self, step: int) -> tuple[Tensor, Tensor]:
        """One loss a grid."""
        generator = torch.Generator().manual_seed(1000 + step)
        first, second = (
            (w - torch.randn(w.shape, dtype=WIDE, generator=generator)).square().mean()
            for w in self.products()
        )
        return first, second

    def loss(self, step: int) -> Tensor:
        """Of both grids."""
        first, second = self.losses(step)
        return first + second


def train(model: Toy, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take these steps, by number."""
    for step in steps:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: equal for nothing else, not even for -0.0 and 0.0."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.reshape(-1).contiguous().view(torch.uint8)


def same_bits(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether two lists hold the same shapes, dtypes and bytes."""
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))
        for x, y in zip(one, other, strict=True)
    )


def clones(model: nn.Module) -> list[Tensor]:
    """What the parameters hold now."""
    return [p.detach().clone() for p in model.parameters()]


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [{k: [*v] if isinstance(v, list) else v for k, v in g.items()} for g in groups]


@contextmanager
def unchanged(
    params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Fail if the block changes a parameter, its gradient or the optimizer by so much as a bit."""
    held = list(params)
    weights = [p.detach().clone() for p in held]
    grads = [p.grad for p in held]
    grad_values = [None if g is None else g.clone() for g in grads]
    groups = _groups(optimizer)
    state: dict[Any, dict[str, Tensor]] = {}
    if optimizer is not None:
        state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    yield
    assert same_bits(weights, held)
    for param, grad, value in zip(held, grads, grad_values, strict=True):
        assert param.grad is grad
        assert grad is None or value is None or same_bits([value], [grad])
    if optimizer is not None:
        assert _groups(optimizer) == groups
        assert optimizer.state.keys() == state.keys()
        for param, entries in optimizer.state.items():
            assert entries.keys() == state[param].keys()
            assert same_bits(entries.values(), state[param].values())


def saying(*words: str) -> str:
    """A pattern for a message that has all of these words, in this order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)
