"""Dion on heads against the published algorithm, one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankfold.lab.dion import Dion, orthonormal_columns
from rankfold.stacks import grad_of, itself

from .test_lab_muon import (
    DECAY,
    LR,
    MODELS,
    MOMENTUM,
    blocks,
    decoder,
    differentiate,
    operations,
)


class Reference:
    """The algorithm on one matrix m×r, with Householder's QR, from a given basis."""

    def __init__(self, weight: Tensor, basis: Tensor) -> None:
        self.weight, self.basis = weight.clone(), basis.clone()
        self.momentum = torch.zeros_like(weight)

    def step(self, gradient: Tensor) -> None:
        whole = self.momentum + gradient
        left = torch.linalg.qr(whole @ self.basis).Q
        right = whole.T @ left
        self.momentum = whole - (1 - MOMENTUM) * left @ right.T
        self.basis = right / right.norm(dim=0)
        m, r = self.weight.shape
        self.weight = (1 - LR * DECAY) * self.weight - LR * (m / r) ** 0.5 * left @ self.basis.T


def blocks_in_order(optimizer: Dion) -> list[Tensor]:
    """The blocks of the weights as the optimizer has them: stack by stack, shape by shape."""
    found = [x for side in optimizer._blocks(optimizer.plan.gather(itself)) for x in side]
    shapes = list(dict.fromkeys(x.shape for x in found))
    return sorted(found, key=lambda x: shapes.index(x.shape))


@pytest.mark.parametrize(("heads", "kv_heads", "biases"), MODELS)
@pytest.mark.parametrize("rank", [1.0, 0.5, 0.3])
def test_dion_is_the_published_one_on_every_head(
    heads: int, kv_heads: int, biases: bool, rank: float
) -> None:
    model = decoder(heads, kv_heads, biases, dtype=torch.float64)
    optimizer = Dion(
        model.grids(), LR, momentum=MOMENTUM, weight_decay=DECAY, masters=True, rank=rank
    )
    bases = [basis for group in optimizer.bases for basis in group]
    assert {basis.shape[1] for basis in bases} == {{1.0: 4, 0.5: 2, 0.3: 2}[rank]}
    starts = blocks_in_order(optimizer)
    references = [Reference(*each) for each in zip(starts, bases, strict=True)]
    order = {x.flatten()[0].item(): k for k, x in enumerate(starts)}
    places = [order[x.flatten()[0].item()] for x in blocks(model, itself)]
    assert sorted(places) == list(range(len(starts)))
    for _ in range(6):
        differentiate(model)
        for place, gradient in zip(places, blocks(model, grad_of), strict=True):
            references[place].step(gradient)
        optimizer.step()
        for place, weight in zip(places, blocks(model, itself), strict=True):
            assert torch.allclose(weight, references[place].weight, rtol=0, atol=1e-9)
    kept = {x.norm().item() for side in optimizer._blocks(optimizer.momenta) for x in side}
    assert sorted(kept) == pytest.approx(sorted(r.momentum.norm().item() for r in references))


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("shape", [(64, 16), (9, 9), (40, 1)])
def test_columns_are_orthonormal_in_float32(shape: tuple[int, int], condition: float) -> None:
    """Also where a Gram matrix in float32 is singular; they span what the input does."""
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(5, *shape, dtype=torch.float64), full_matrices=False)
    x = (u * torch.logspace(0, -1, shape[1], base=condition, dtype=torch.float64) @ vh).float()
    found = orthonormal_columns(1e-6 * x).double()
    eye = torch.eye(shape[1], dtype=torch.float64)
    assert (found.mT @ found - eye).abs().max() < 1e-5
    outside = x.double() - found @ (found.mT @ x.double())
    assert outside.norm() < 1e-5 * x.double().norm()


def test_columns_of_zeros() -> None:
    x = torch.randn(3, 8, 4)
    x[0], x[1, :, 2] = 0, 0
    found = orthonormal_columns(x)
    assert not found[0].any()
    gram = found[1].mT @ found[1]
    assert torch.allclose(gram, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-6)


def test_a_step_without_gradients_is_not_the_end() -> None:
    """A basis that became zero would never be anything else."""
    model = decoder()
    optimizer = Dion(model.grids(), LR, momentum=MOMENTUM, weight_decay=0.0, masters=True)
    before = [x.clone() for x in blocks(model, itself)]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(map(torch.equal, blocks(model, itself), before))
    differentiate(model)
    optimizer.step()
    for now, then in zip(blocks(model, itself), before, strict=True):
        assert (now - then).norm() > 0.1 * LR


@pytest.mark.usefixtures("as_on_a_device")  # or the operations depend on what is lifted
def test_as_many_operations_for_many_heads_and_layers() -> None:
    found = [operations("dion", 3 * n, n, layers) for n, layers in ((2, 2), (8, 2), (2, 9))]
    assert found[0] == found[1] == found[2]
    assert sum(found[0].values()) < 160
