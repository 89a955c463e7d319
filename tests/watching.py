"""Watching what a step dispatches, and problems of any size to watch it on."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rankfold


class Watch(TorchDispatchMode):
    """Counts operations by name, and remembers the largest tensor that any of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


class Holding(TorchDispatchMode):
    """The most bytes that were alive at once of what operations allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        for x in filter(_is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage._cdata not in given | self._alive.keys():
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.most = max(self.most, sum(self._alive.values()))
        return result


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations that are no views, and kernels by `add`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._on = False

    def __enter__(self) -> Self:
        self._on = True
        super().__enter__()
        return self

    def add(self) -> None:
        """One more, if it is being counted."""
        self.count += self._on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        idle = func.is_view or "empty" in name or "_unsafe_view" in name or "profiler" in name
        self.count += not idle
        return func(*args, **(kwargs or {}))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


FACTORIZATIONS = "svd qr geqrf orgqr ormqr eig lstsq pinv cholesky_solve householder"
SYNCHRONISATIONS = "_local_scalar_dense is_nonzero nonzero equal item unique masked_select"
# Operations whose names happen to contain one of these, "qr" in "sqrt" and "eig" in "weight".
HARMLESS = ("sqrt", "weight")
# What reads values on the host without an operation to show for it when tensors are on the CPU.
METHODS_THAT_READ = (
    "tolist item numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ cpu"
)


class Denied(AssertionError):
    """A step did what it must not."""


class Deny(TorchDispatchMode):
    """Raises at any operation on the deny-list."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        plain = name
        for word in HARMLESS:
            plain = plain.replace(word, "")
        if any(word in plain for word in (FACTORIZATIONS + " " + SYNCHRONISATIONS).split()):
            raise Denied(name)
        masks = [
            x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and x.dtype == torch.bool
        ]
        if masks and name.startswith("index"):  # as many elements as the mask has ones
            raise Denied(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


class DenyReading(TorchFunctionMode):
    """Raises where Python asks a tensor for its values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or getattr(func, "__name__", "")).rsplit(".", 1)[-1]
        if name in METHODS_THAT_READ.split():
            raise Denied(name)
        return func(*args, **(kwargs or {}))


# Problems ----------------------------------------------------------------------------------------


def product_gradients(left: list[Tensor], right: list[Tensor]) -> None:
    """Set the gradients of Σ_ij ⟨u_i v_jᵀ, A_i B_jᵀ⟩, with u_i and v_j of three columns."""
    generator = torch.Generator().manual_seed(11)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape[-2], 3, generator=generator, dtype=torch.float64).to(x.dtype)

    us, vs = [noise(a) for a in left], [noise(b) for b in right]
    with torch.no_grad():
        for a, u in zip(left, us, strict=True):
            a.grad = u @ sum(v.mT @ b for v, b in zip(vs, right, strict=True))
        for b, v in zip(right, vs, strict=True):
            b.grad = v @ sum(u.mT @ a for u, a in zip(us, left, strict=True))


def factors(
    lefts: int, rights: int, m: int, n: int, rank: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    """Random orthonormal factors with gradients."""
    generator = torch.Generator().manual_seed(7)

    def draw(rows: int) -> nn.Parameter:
        noise = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
        return nn.Parameter(torch.linalg.qr(noise).Q.to(dtype).contiguous())

    left: list[Tensor] = [draw(m) for _ in range(lefts)]
    right: list[Tensor] = [draw(n) for _ in range(rights)]
    product_gradients(left, right)
    return left, right


def second_step(optimizer: rankfold.RiemannianSGD, *watchers: Any) -> None:
    """The first step, whose look at values is its own, then another one that is watched."""
    optimizer.step()
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher)
        optimizer.step()
