"""A Triton kernel for AdamW on narrow weights with float32 masters: one pass through memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import AdamW

from ..kernels.sizes import parts

_BLOCK = 4096  # weights a program takes


@triton.jit
def _adamw_kernel(
    weight_ptr, gradient_ptr, master_ptr, mean_ptr, square_ptr, count_ptr, lr_ptr, size,
    TAKE_IN: tl.constexpr, LOG_KEEP: tl.constexpr,
    TAKE_IN_SQUARE: tl.constexpr, LOG_KEEP_SQUARE: tl.constexpr,
    EPS: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Masters and running means after the step numbered ``count``, and rounded weights."""
    # In float64, since of 1 - 0.999 float32 has five digits.
    count = tl.load(count_ptr).to(tl.float64)
    lr = tl.load(lr_ptr).to(tl.float64)
    rate = (lr / (1 - tl.exp(count * LOG_KEEP))).to(tl.float32)
    stretch = (1 / tl.sqrt(1 - tl.exp(count * LOG_KEEP_SQUARE))).to(tl.float32)
    decay = (lr * DECAY).to(tl.float32)

    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = where < size
    # Four to a thread, of narrow numbers too: else they change threads before they are stored.
    where = tl.max_contiguous(where, 4)
    gradient = tl.load(gradient_ptr + where, mask=there).to(tl.float32)
    master = tl.load(master_ptr + where, mask=there)
    mean = tl.load(mean_ptr + where, mask=there)
    square = tl.load(square_ptr + where, mask=there)

    # By differences: factors near 1 are rounded, and the same way at every step.
    mean += TAKE_IN * (gradient - mean)
    square += TAKE_IN_SQUARE * (gradient * gradient - square)
    master -= decay * master
    master -= rate * mean / (tl.sqrt(square) * stretch + EPS)

    tl.store(mean_ptr + where, mean, mask=there)
    tl.store(square_ptr + where, square, mask=there)
    tl.store(master_ptr + where, master, mask=there)
    tl.store(weight_ptr + where, master.to(weight_ptr.dtype.element_ty), mask=there)


def step(inner: AdamW, weights: Sequence[Tensor]) -> None:
    """What ``inner`` does to its float32 parameters, the masters of contiguous ``weights``.

    Gradients are those of the weights, which become the masters, rounded. State is that of a fused
    AdamW, in ``inner`` as ever. Nothing tells autograd of it.
    """
    (group,) = inner.param_groups
    pairs = zip(weights, group["params"], strict=True)
    moved = [(weight, weight.grad, master) for weight, master in pairs if weight.grad is not None]
    if not moved:
        return
    for _, _, master in moved:
        if not inner.state[master]:
            inner.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
    torch._foreach_add_([inner.state[master]["step"] for _, _, master in moved], 1)
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float32, device=moved[0][0].device)
    beta, beta_square = group["betas"]
    with torch.cuda.device_of(lr):
        for weight, gradient, master in moved:
            state = inner.state[master]
            size = master.numel()
            _adamw_kernel[(parts(size, _BLOCK),)](
                weight, gradient.contiguous(), master,
                state["exp_avg"], state["exp_avg_sq"], state["step"], lr, size,
                TAKE_IN=1 - beta, LOG_KEEP=math.log(beta),
                TAKE_IN_SQUARE=1 - beta_square, LOG_KEEP_SQUARE=math.log(beta_square),
                EPS=group["eps"], DECAY=group["weight_decay"], BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
