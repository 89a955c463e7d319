"""Triton kernels for whitened directions, float32: inverse roots of r×r matrices, singular ones
included, for r up to 64, and balanced rows for r up to 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linalg import least_norm
from .floats import single
from .products import dot
from .refine import launch, tile, total
from .sizes import padded


@triton.jit
def _stretch(low):
    """What is best before a step σ(3 − σ²)/2 where all σ are in [low, 1]."""
    return tl.sqrt(3.0 / (1.0 + low + low * low))


@triton.jit
def _root(gram, eye, low, steps, P: tl.constexpr):
    """``gram^(-1/2)`` of a symmetric matrix with eigenvalues from ``low²`` to 1."""
    root = gram
    stretch = _stretch(low)
    half = 1.5 * stretch * eye - 0.5 * stretch * stretch * stretch * root
    inverse = half
    for _ in range(1, steps):
        root = dot(root, half, P)
        low = stretch * low * (3.0 - stretch * low * stretch * low) * 0.5
        stretch = _stretch(low)
        cubed = 0.5 * stretch * stretch * stretch
        half = 1.5 * stretch * eye - cubed * dot(inverse, root, P)
        inverse = dot(half, inverse, P)
    return 0.5 * (inverse + tl.trans(inverse))


@triton.jit
def _ridged(gram, smallest, eye):
    """With its ridge, and eigenvalues of at most 1 still."""
    ridge = smallest * smallest
    return (gram + ridge * eye) / (1.0 + ridge)


@triton.jit
def _inverse_root_kernel(
    gram_ptr, scale_ptr, out_ptr, r, smallest, low, steps, R: tl.constexpr, PRECISION: tl.constexpr
):
    place, inside, eye = tile(r, R)
    scale = tl.load(scale_ptr + tl.program_id(0))
    # What pads a matrix is 1 after this, and stays.
    gram = tl.load(gram_ptr + place, mask=inside, other=eye * scale) / scale
    inverse = _root(_ridged(gram, single(smallest), eye), eye, single(low), steps, PRECISION)
    tl.store(out_ptr + place, inverse / tl.sqrt(scale), mask=inside)


@triton.jit
def _even_kernel(
    raised_ptr, first_ptr, own_ptr, share_ptr, tilted_ptr, made_ptr, squares_ptr,
    blocks, r, floor, partners, smallest, part, least_square, ridge, low, steps,
    roots_ridge, largest, low_1, steps_1, low_2, steps_2, low_3, steps_3,
    HALVINGS: tl.constexpr, TILT: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One factor's part of `whitening._even`, from the Gram matrix of what is raised on.

    Bounds are taken by comparisons, which let NaN through: it is what stops its member.
    """
    P: tl.constexpr = PRECISION
    floor, smallest, part = single(floor), single(smallest), single(part)
    least_square, ridge, low = single(least_square), single(ridge), single(low)
    roots_ridge, largest = single(roots_ridge), single(largest)
    low_1, low_2, low_3 = single(low_1), single(low_2), single(low_3)
    place, inside, eye = tile(r, R)
    factor = tl.program_id(0)
    member = factor // blocks
    own = tl.load(own_ptr + factor)
    least = 0.0
    for k in range(blocks):
        least += part * tl.load(own_ptr + member * blocks + k)
    least = tl.where(least < floor, floor, least)
    square = own / least
    square = partners * tl.where(square > 1.0, 1.0, square)
    if SHARED:
        share = tl.load(share_ptr + member)
        square *= share * share
    raised = tl.load(raised_ptr + place, mask=inside, other=eye)
    second = _root(_ridged(raised, ridge, eye), eye, low, steps, P)
    raised = tl.load(raised_ptr + place, mask=inside, other=0.0)
    length = total(second * dot(raised, second, P))
    tl.store(squares_ptr + factor, square * tl.where(length < 0.0, 0.0, length))
    if TILT:
        tilted = True
        if MASKED:
            tilted = tl.load(tilted_ptr + member)
        if tilted:
            # The first root, whose eigenvalues are from ``smallest`` to 1 after this.
            scale = smallest * tl.sqrt(tl.where(own < least_square, least_square, own))
            x = scale * tl.load(first_ptr + place, mask=inside, other=eye / scale)
            for halving in tl.static_range(HALVINGS):
                begin = low_1 if halving == 0 else (low_2 if halving == 1 else low_3)
                count = steps_1 if halving == 0 else (steps_2 if halving == 1 else steps_3)
                inverse = _root(_ridged(x / largest, roots_ridge, eye), eye, begin, count, P)
                x = dot(x, inverse, P) / tl.sqrt(largest)
                x = 0.5 * (x + tl.trans(x))
            second = dot(second, x, P)
    first = tl.load(first_ptr + place, mask=inside, other=0.0)
    tl.store(made_ptr + place, tl.sqrt(square) * dot(first, second, P), mask=inside)


def inverse_root(gram: Tensor, scale: Tensor, smallest: float, low: float, steps: int) -> Tensor:
    """``(gram + smallest² scale)^(-1/2)`` of symmetric (..., r, r) with eigenvalues in [0, scale].

    As `schatten.inverse_root`; ``scale`` is (...), ``steps`` how many its stretches from ``low`` on
    are.
    """
    gram, scale = gram.contiguous(), scale.contiguous()
    out = torch.empty_like(gram)
    members, r = gram.shape[:-2].numel(), gram.shape[-1]
    if members:
        _inverse_root_kernel[(members,)](gram, scale, out, r, smallest, low, steps, **launch(r))
    return out


class Spectrum(NamedTuple):
    """For an inverse root: what it makes its ridge of, where it begins, and how many steps."""

    smallest: float
    low: float
    steps: int


class Numbers(NamedTuple):
    """What `whitening._even` goes by; ``floor`` is of squares.

    A tilt is so many ``halvings`` of an exponent, None for no tilt.
    """

    floor: float
    partners: int
    smallest: float
    part: float
    raised: Spectrum
    halvings: list[Spectrum] | None
    largest: float


def even(
    raised: Tensor,
    first: Tensor,
    own: Tensor,
    share: Tensor | None,
    tilted: Tensor | None,
    numbers: Numbers,
) -> tuple[Tensor, Tensor]:
    """C_i (batch, I, r, r) and squares (batch, I), as `whitening._even` has them.

    ``raised`` and ``first`` are (batch, I, r, r), ``own`` (batch, I), ``share`` and ``tilted``
    (batch,) or None for all.
    """
    raised, first, own = raised.contiguous(), first.contiguous(), own.contiguous()
    made, squares = torch.empty_like(first), torch.empty_like(own)
    halvings = numbers.halvings or []
    nothing = Spectrum(1.0, 1.0, 0)
    one, two, three = [*halvings, nothing, nothing, nothing][:3]
    if own.numel():
        _even_kernel[(own.numel(),)](
            raised, first, own, own if share is None else share.contiguous(),
            own if tilted is None else tilted.contiguous(), made, squares,
            own.shape[1], raised.shape[-1], numbers.floor, numbers.partners, numbers.smallest,
            numbers.part, least_norm(own.dtype) ** 2, *numbers.raised, one.smallest,
            numbers.largest, one.low, one.steps, two.low, two.steps, three.low, three.steps,
            HALVINGS=len(halvings), TILT=numbers.halvings is not None, SHARED=share is not None,
            MASKED=tilted is not None, **launch(raised.shape[-1]),
        )  # fmt: skip
    return made, squares


@triton.jit
def _of_square_kernel(
    made_ptr, square_ptr, now_ptr, chosen_ptr, out_ptr, r, blocks, members, least,
    MASKED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    place, inside, _ = tile(r, R)
    factor = tl.program_id(0)
    now = tl.load(now_ptr + factor)
    least = single(least)
    ratio = tl.div_rn(tl.load(square_ptr + factor), tl.where(now < least, least, now))
    if MASKED:
        ratio = tl.where(tl.load(chosen_ptr + factor // blocks % members), ratio, 1.0)
    made = tl.load(made_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, tl.sqrt_rn(ratio) * made, mask=inside)


def of_square(made: Tensor, square: Tensor, now: Tensor, chosen: Tensor | None) -> Tensor:
    """``made`` (batch, I, r, r) times √(``square`` / ``now``) of each, (batch, I).

    Of the members (batch,) ``chosen`` alone, if they are given; the others' stay.
    """
    made, square, now = made.contiguous(), square.contiguous(), now.contiguous()
    out, r = torch.empty_like(made), made.shape[-1]
    if square.numel():
        _of_square_kernel[(square.numel(),)](
            made, square, now, square if chosen is None else chosen.contiguous(), out, r,
            square.shape[1], len(made) if chosen is None else len(chosen),
            least_norm(now.dtype) ** 2, MASKED=chosen is not None, R=padded(r), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _balanced_kernel(
    x_ptr, chosen_ptr, out_ptr, weights_ptr, m, r, blocks, balance, smallest, least,
    MASKED: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One factor a program: the largest of its rows, and then all of them by that."""
    factor = tl.program_id(0).to(tl.int64)
    balance, smallest, least = single(balance), single(smallest), single(least)
    x_ptr += factor * m * r
    out_ptr += factor * m * r
    cols = tl.arange(0, R)[None, :]
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, m, ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows[:, None] < m) & (cols < r)
        x = tl.load(x_ptr + rows[:, None] * r + cols, mask=there, other=0.0)
        largest = tl.maximum(largest, tl.sum(x * x, 1))
    size = tl.sqrt_rn(tl.max(largest, 0))
    size = tl.where(size < least, least, size)
    chosen = True
    if MASKED:
        chosen = tl.load(chosen_ptr + factor // blocks)
    for start in range(0, m, ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows[:, None] < m) & (cols < r)
        x = tl.load(x_ptr + rows[:, None] * r + cols, mask=there, other=0.0)
        share = tl.sqrt_rn(tl.sum(x * x, 1)) / size
        weight = tl.exp2(-0.5 * balance * tl.log2(share * share + smallest * smallest))
        weight = tl.where(chosen, weight, 1.0)
        tl.store(weights_ptr + factor * m + rows, weight, mask=rows < m)
        tl.store(out_ptr + rows[:, None] * r + cols, x * weight[:, None], mask=there)


def balanced(
    x: Tensor, balance: float, smallest: float, chosen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of ``x`` (batch, I, m, r) times weights, and these (batch, I, m, 1).

    As `whitening._balanced` has them; 1 but for the members (batch,) ``chosen``, if they are given.
    """
    x = x.contiguous()
    (batch, blocks, m, r), out = x.shape, torch.empty_like(x)
    weights = x.new_empty(batch, blocks, m, 1)
    size = padded(r)
    if x.numel():
        _balanced_kernel[(batch * blocks,)](
            x, x if chosen is None else chosen.contiguous(), out, weights, m, r, blocks,
            balance, smallest, least_norm(x.dtype),
            MASKED=chosen is not None, R=size, ROWS=8192 // size, num_warps=8,
        )  # fmt: skip
    return out, weights
