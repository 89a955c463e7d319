"""Factor and Grid: which parts of which parameters form a product."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Region(NamedTuple):
    """The part of a parameter a factor uses: some indices along one dimension, all of the rest."""

    param: Tensor
    dim: int
    indices: frozenset[int]

    def overlaps(self, other: Region) -> bool:
        """Whether both, of one parameter, name an element in common."""
        return self.dim != other.dim or not self.indices.isdisjoint(other.indices)


class Factor:
    """Reads a parameter as ``blocks`` factors of ``m × rank``.

    Args:
        param: a floating-point parameter of two or more dimensions. Leading dimensions beyond
            the last two are further blocks, flattened in order.
        axis: the dimension along which the rank runs, one of the last two; the other is m.
        rank: columns a block; by default all that is left after ``start``, divided by ``blocks``.
        blocks: factors side by side along ``axis``.
        start: where the first block begins.
        stride: from the start of one block to that of the next; ``rank`` by default.
        bias: a 1-D parameter indexed along ``axis`` exactly as ``param`` is. It becomes one more
            row of each factor, since ``x W + b`` is a product with ``[x, 1]``.

    Block b covers ``start + b·stride`` up to ``+ rank`` along ``axis``.
    """

    def __init__(
        self,
        param: Tensor,
        *,
        axis: int = -1,
        rank: int | None = None,
        blocks: int = 1,
        start: int = 0,
        stride: int | None = None,
        bias: Tensor | None = None,
    ) -> None:
        _require_real(param, "a factor")
        blocks, start = _whole("blocks", blocks), _whole("start", start)
        rank = None if rank is None else _whole("rank", rank)
        stride = None if stride is None else _whole("stride", stride)
        if param.dim() < 2:
            raise ValueError(f"a factor needs 2 or more dimensions, got {describe(param)}")
        dim = axis + param.dim() if axis < 0 else axis
        if dim not in (param.dim() - 2, param.dim() - 1):
            raise ValueError(
                f"axis must be one of the last two dimensions of {describe(param)}, got {axis}"
            )
        size = param.shape[dim]
        if blocks < 1 or not 0 <= start < size:
            raise ValueError(
                f"blocks must be at least 1 and start inside the {size} elements of axis {axis} "
                f"of {describe(param)}, got blocks={blocks}, start={start}"
            )
        if rank is None:
            if (size - start) % blocks:
                raise ValueError(
                    f"{blocks} blocks do not divide the {size - start} elements of axis {axis} "
                    f"of {describe(param)} from {start} on; give rank="
                )
            rank = (size - start) // blocks
        stride = rank if stride is None else stride
        if rank < 1 or stride < rank:
            raise ValueError(
                f"rank must be at least 1 and stride no smaller than rank, got rank={rank}, "
                f"stride={stride} for {describe(param)}"
            )
        if start + (blocks - 1) * stride + rank > size:
            raise ValueError(
                f"{blocks} blocks of rank {rank}, stride {stride}, starting at {start}, run past "
                f"the {size} elements of axis {axis} of {describe(param)}"
            )
        if bias is not None:
            _require_real(bias, "a bias")
            if bias.shape != (size,):
                raise ValueError(
                    f"a bias must have shape ({size},), the length of axis {axis} of "
                    f"{describe(param)}, got {describe(bias)}"
                )
            if param.shape[:-2].numel() != 1:
                raise ValueError(
                    f"a bias needs a parameter of two dimensions, got {describe(param)}"
                )
        self.param = param
        self.shape = param.shape
        self.axis = dim - param.dim()
        self.rank = rank
        self.blocks = blocks
        self.start = start
        self.stride = stride
        self.bias = bias

    def __repr__(self) -> str:
        return (
            f"Factor({describe(self.param)}, axis={self.axis}, rank={self.rank}, "
            f"blocks={self.blocks}, start={self.start}, stride={self.stride}, "
            f"bias={self.bias is not None})"
        )

    @property
    def count(self) -> int:
        """How many factors this reads: blocks times the leading dimensions."""
        return self.blocks * self.param.shape[:-2].numel()

    @property
    def height(self) -> int:
        """Rows of each factor, the bias included."""
        return self.param.shape[-3 - self.axis] + (self.bias is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """What two factors must share to be read by the same operations."""
        bias = None if self.bias is None else (self.bias.dtype, self.bias.device)
        where = (self.axis, self.rank, self.blocks, self.start, self.stride)
        return (self.param.shape, self.param.dtype, self.param.device, where, bias)

    @property
    def params(self) -> list[Tensor]:
        """The parameter, and the bias if there is one."""
        return [self.param] if self.bias is None else [self.param, self.bias]

    def regions(self) -> Iterator[Region]:
        """The parts of parameters this factor owns."""
        begins = (self.start + block * self.stride for block in range(self.blocks))
        indices = frozenset(i for begin in begins for i in range(begin, begin + self.rank))
        yield Region(self.param, self.param.dim() + self.axis, indices)
        if self.bias is not None:
            yield Region(self.bias, 0, indices)

    def view_blocks(self, stacked: Tensor) -> Tensor:
        """A view of parameters ``(L, *param.shape)`` as ``(L, *leading, blocks, m, rank)``."""
        return self._view(stacked.transpose(-1, -2) if self.axis == -2 else stacked)

    def view_bias(self, stacked: Tensor) -> Tensor:
        """A view of biases ``(L, size)`` as one row a factor, ``(L, blocks, 1, rank)``."""
        return self._view(stacked.unsqueeze(-2))

    def _view(self, rows: Tensor) -> Tensor:
        # Blocks with their gaps, where these all lie within the tensor: of windows of `unfold`
        # torch's compiler forgets where they begin when a CPU is to multiply them.
        lead = min(self.start, self.stride - self.rank)
        first, whole = self.start - lead, self.blocks * self.stride
        if first + whole <= rows.shape[-1]:
            gapped = rows.narrow(-1, first, whole).view(*rows.shape[:-1], self.blocks, self.stride)
            windows: Tensor = gapped.narrow(-1, lead, self.rank)
        else:
            covered = whole - self.stride + self.rank
            windows = rows.narrow(-1, self.start, covered).unfold(-1, self.rank, self.stride)
        return windows.transpose(-2, -3)


FactorLike: TypeAlias = "Factor | Tensor"


class Grid:
    """Factors that share a product pattern: every left block times every right block of its group.

    Args:
        left: a Factor, a parameter (read whole, rank last), or a list of either. Blocks are
            concatenated in list order; heights may differ, the rank may not.
        right: likewise.
        groups: members the blocks are dealt to, in contiguous runs of equal length, the way query
            heads belong to key/value heads. Each member is one product of I × J blocks.
        name: how errors and diagnostics call this grid; its members are ``name[g]``.
        rate: its learning rate, as a multiple of that of its parameter group.
        sides: what the left and what the right factors' part of a step is multiplied with, for
            ``normalize="whitened"``, where each factor goes by itself.
        tilted: whether ``tilt`` and ``row_balance`` of its parameter group are for it, too.
    """

    def __init__(
        self,
        left: FactorLike | Sequence[FactorLike],
        right: FactorLike | Sequence[FactorLike],
        *,
        groups: int = 1,
        name: str | None = None,
        rate: float = 1.0,
        sides: tuple[float, float] = (1.0, 1.0),
        tilted: bool = True,
    ) -> None:
        self.name = name
        self.rate = rate
        self.sides = sides
        self.tilted = tilted
        self.groups = groups = _whole("groups", groups)
        self.left = _as_factors(left)
        self.right = _as_factors(right)
        label = self._label
        for side in ("left", "right"):
            factors: list[Factor] = getattr(self, side)
            if not factors:
                raise ValueError(f"{label} has no {side} factor")
            total = sum(f.count for f in factors)
            if groups < 1 or total % groups:
                raise ValueError(
                    f"{label}: {total} {side} blocks cannot be dealt to groups={groups} members"
                )
        self.rank = self.left[0].rank
        for side, k, factor in self.factors():
            if factor.rank != self.rank:
                raise ValueError(
                    f"{label}: the factors cannot form a product, {side}[{k}] has rank "
                    f"{factor.rank} where left[0] has {self.rank}: {factor!r} (the rank is the "
                    "last axis unless Factor(..., axis=0) says that it is the first)"
                )
            if factor.rank > factor.height:
                raise ValueError(
                    f"{label}: rank {factor.rank} is above the height {factor.height} of "
                    f"{side}[{k}], so the product cannot have that rank: {factor!r} "
                    "(is axis= the rank axis?)"
                )
        devices = {p.device for p in self.params()}
        if len(devices) > 1:
            raise ValueError(f"{label}: its parameters are on several devices, {devices}")
        require_disjoint([(f"{label}: {side}[{k}]", factor) for side, k, factor in self.factors()])

    @property
    def _label(self) -> str:
        return "grid" if self.name is None else f"grid {self.name!r}"

    @property
    def rate(self) -> float:
        """Its learning rate, as a multiple of that of its parameter group; may be set."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"{self._label}: rate must be finite and not negative, got {rate}")
        self._rate = rate

    @property
    def sides(self) -> tuple[float, float]:
        """By what both factors' parts of a whitened step are multiplied; may be set."""
        return self._sides

    @sides.setter
    def sides(self, sides: tuple[float, float]) -> None:
        left, right = sides
        if not (math.isfinite(left + right) and min(left, right) >= 0 < max(left, right)):
            raise ValueError(
                f"{self._label}: sides must be two finite numbers, none negative and not both 0, "
                f"got {sides}"
            )
        self._sides = (left, right)

    def __repr__(self) -> str:
        rate = "" if self.rate == 1 else f", rate={self.rate:g}"
        sides = "" if self.sides == (1, 1) else f", sides={self.sides}"
        tilted = "" if self.tilted else ", tilted=False"
        inside = f"left={self.left}, right={self.right}, groups={self.groups}{rate}{sides}{tilted}"
        return f"Grid(name={self.name!r}, {inside})"

    @property
    def lefts(self) -> int:
        """I, the left factors of each member."""
        return sum(f.count for f in self.left) // self.groups

    @property
    def rights(self) -> int:
        """J, the right factors of each member."""
        return sum(f.count for f in self.right) // self.groups

    def factors(self) -> Iterator[tuple[str, int, Factor]]:
        """Every factor with its side and position."""
        for side, factors in (("left", self.left), ("right", self.right)):
            for k, factor in enumerate(factors):
                yield side, k, factor

    def params(self) -> list[Tensor]:
        """Every parameter used, once, in order of appearance."""
        found = {id(p): p for _, _, factor in self.factors() for p in factor.params}
        return list(found.values())


def require_disjoint(factors: Iterable[tuple[str, Factor]]) -> None:
    """Raise if two of these labelled factors read the same part of a parameter."""
    owned: dict[int, list[tuple[str, Region]]] = {}
    for label, factor in factors:
        for region in factor.regions():
            taken = owned.setdefault(id(region.param), [])
            for other, theirs in taken:
                if region.overlaps(theirs):
                    raise ValueError(
                        f"{label} and {other} read the same part of {describe(region.param)} (is "
                        "a grid given twice, or start= or blocks= wrong?)"
                    )
            taken.append((label, region))


def _as_factors(side: FactorLike | Sequence[FactorLike]) -> list[Factor]:
    items = side if isinstance(side, Sequence) else [side]
    return [item if isinstance(item, Factor) else Factor(item) for item in items]


def _require_real(param: Tensor, what: str) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"{what} must be a parameter, got {type(param).__name__}")
    if param.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{what} must be float64, float32, bfloat16 or float16, got {describe(param)}"
        )


def _whole(name: str, number: int) -> int:
    """An integer, of any type that is one."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r}") from None


def describe(param: Tensor) -> str:
    """A parameter as messages name it, by shape and dtype."""
    return f"a parameter of shape {tuple(param.shape)}, {str(param.dtype).removeprefix('torch.')}"
