"""`inspect`: the products of a model, what is left out and why, and whether gradients agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.attention import attention_candidates
from .adapters.candidates import Candidate, plain_path
from .adapters.lora import lora_candidates
from .diagnostics import disagreement
from .factors import Grid
from .precision import exact_arithmetic
from .stacks import Plan, itself

# Exact products have 1e-6 at most in float32, and 2e-2 where gradients are of 16 bits.
_BENT = 0.05


@dataclass(frozen=True)
class Product:
    """One product of a model.

    Args:
        name: of its grid: the module's path and what the product is.
        kind: ``"qk"``, ``"vo"`` or ``"lora"``; another word for products that are never taken.
        grid: None where it cannot be had; with a ``reason``, `attention_grids` takes it on request.
        reason: why it is left out, None if it is not.
        inconsistency: how far, on one batch, factor gradients are from those of any function of
            the product: ‖ΣAᵀG_A − (ΣBᵀG_B)ᵀ‖ as a share of both sizes, the largest of the grid's
            members. 0 to rounding where the product is exact, up to 1 elsewhere; None where it
            was not measured.
    """

    name: str
    kind: str
    grid: Grid | None
    reason: str | None
    inconsistency: float | None = None


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found; prints as a table.

    Args:
        model: the class of the model.
        products: all of them, in the order of modules, adapters last.
        parameters: elements of all parameters, shared ones once.
        trainable: those that require a gradient.
        covered: those in the products that were found.
        partly: parameters that these cover in part, and the share; an optimizer of the grids
            leaves the rest of them as it is.
    """

    model: str
    products: tuple[Product, ...]
    parameters: int
    trainable: int
    covered: int
    partly: dict[str, float]

    @property
    def found(self) -> list[Product]:
        """What `attention_grids` and `lora_grids` take by default."""
        return [each for each in self.products if each.reason is None]

    @property
    def skipped(self) -> list[Product]:
        """The others, each with its reason."""
        return [each for each in self.products if each.reason is not None]

    @property
    def grids(self) -> list[Grid]:
        """The grids of ``found``."""
        return [each.grid for each in self.found if each.grid is not None]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "trainable": self.trainable,
            "covered": self.covered,
            "partly_covered": self.partly,
            "found": [_plain(each) for each in self.found],
            "skipped": [_plain(each) for each in self.skipped],
        }

    def __str__(self) -> str:
        measured = any(each.inconsistency is not None for each in self.products)
        extra = ["inconsistency"] * measured
        parts = []
        if self.found:
            head = ["found", "times", "members", "grid", "product", "rank", *extra]
            rows = [
                [name, str(len(alike)), *_shape(alike[0].grid), *([_worst(alike)] * measured)]
                for name, alike in _alike(self.found)
            ]
            parts.append(_table(head, rows))
        if self.skipped:
            head = ["left out", "times", *extra, "why"]
            rows = [
                [name, str(len(alike)), *([_worst(alike)] * measured), _why(alike)]
                for name, alike in _alike(self.skipped)
            ]
            parts.append(_table(head, rows))
        partly = {_starred(name): share for name, share in self.partly.items()}
        bent = [each for each in self.found if (each.inconsistency or 0) > _BENT]
        told = [
            f"no product to the loss: {name} ({_worst(alike)}), of which its gradients disagree; "
            "something between the factors bends it, such as rotary embeddings or a norm"
            for name, alike in _alike(bent)
        ]
        notes = [
            f"covered in part: {name} ({share:.0%}); an optimizer of these grids leaves the rest "
            "of it as it is"
            for name, share in partly.items()
        ]
        return "\n\n".join([*parts, "\n".join([self._coverage(), *told, *notes])])

    def _coverage(self) -> str:
        of = f"{self.model}: {len(self.found)} grids found, {len(self.skipped)} left out; "
        if not self.trainable:
            return of + "no trainable parameters"
        share = self.covered / self.trainable
        whole = f"{self.covered:,} of {self.trainable:,} trainable parameters covered ({share:.1%})"
        frozen = self.parameters - self.trainable
        return of + whole + (f", {frozen:,} more are frozen" if frozen else "")


def inspect(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> Inspection:
    """What `attention_grids` and `lora_grids` find in ``model``, what they leave out, and why.

    Args:
        model: any module; on the meta device, too.
        loss: a function that computes the loss of one batch, without ``backward``. With it the
            gradient inconsistency of every product is measured, of those left out because
            something stands between their factors as well. Gradients kept in ``.grad`` stay as
            they are.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a function that computes the loss of one batch, got "
            f"{type(loss).__name__}"
        )
    candidates = [*attention_candidates(model), *lora_candidates(model)]
    measured = {} if loss is None else _inconsistencies(candidates, loss)
    products = tuple(
        Product(each.name, each.kind, each.grid, each.reason, measured.get(each.name))
        for each in candidates
    )
    found = [each.grid for each in products if each.grid is not None and each.reason is None]
    names = {id(param): plain_path(name) for name, param in model.named_parameters()}
    total = {id(param): param for param in model.parameters()}
    shares = _shares(found)
    return Inspection(
        model=type(model).__name__,
        products=products,
        parameters=sum(p.numel() for p in total.values()),
        trainable=sum(p.numel() for p in total.values() if p.requires_grad),
        covered=sum(round(shares[key] * total[key].numel()) for key in shares),
        partly={names[key]: share for key, share in shares.items() if share < 1},
    )


def _shares(grids: Sequence[Grid]) -> dict[int, float]:
    """The share of each parameter, by id, that these grids read."""
    used: dict[int, tuple[int, set[int]]] = {}
    for grid in grids:
        for _, _, factor in grid.factors():
            for param, dim, indices in factor.regions():
                _, seen = used.setdefault(id(param), (param.shape[dim], set()))
                seen.update(indices)
    return {key: len(seen) / size for key, (size, seen) in used.items()}


def _inconsistencies(
    candidates: Sequence[Candidate], loss: Callable[[], Tensor]
) -> dict[str, float]:
    """The largest disagreement of each candidate's members, by its name."""
    grids = [(each.name, each.grid) for each in candidates if each.grid is not None]
    if not grids:
        return {}
    params = {id(p): p for _, grid in grids for p in grid.params()}
    with torch.enable_grad():
        value = loss()
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            got = f"{value!r}" if not isinstance(value, Tensor) else "a tensor that is not"
            raise TypeError(
                "loss must return a tensor of one element that depends on the parameters, without "
                f"backward() or item(), got {got}"
            )
        found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    grads = dict(zip(params, found, strict=True))
    ready = [
        (name, grid) for name, grid in grids if all(grads[id(p)] is not None for p in grid.params())
    ]
    plan = Plan(ready)
    worst: dict[str, float] = {}
    with torch.no_grad(), exact_arithmetic(plan.device_types):
        weights = plan.gather(itself)
        slopes = plan.gather(lambda p: grads[id(p)])
        for stack in plan.stacks:
            values = disagreement(stack.read(weights), stack.read(slopes), isometry=False)
            for member, value in zip(stack.members, values.tolist(), strict=True):
                name = member.rpartition("[")[0]
                worst[name] = max(worst.get(name, 0.0), value)
    return worst


# Printing ----------------------------------------------------------------------------------------


def _plain(each: Product) -> dict[str, Any]:
    grid = each.grid
    shape = None
    if grid is not None:
        shape = {
            "members": grid.groups,
            "lefts": grid.lefts,
            "rights": grid.rights,
            "left_height": max(f.height for f in grid.left),
            "right_height": max(f.height for f in grid.right),
            "rank": grid.rank,
        }
    return {
        "name": each.name,
        "kind": each.kind,
        "reason": each.reason,
        "inconsistency": each.inconsistency,
        "grid": shape,
    }


def _shape(grid: Grid | None) -> list[str]:
    if grid is None:
        return ["", "", "", ""]
    rows, columns = (max(f.height for f in side) for side in (grid.left, grid.right))
    return [str(grid.groups), f"{grid.lefts}×{grid.rights}", f"{rows}×{columns}", str(grid.rank)]


def _starred(text: str | None) -> str:
    """With the numbers of layers taken out."""
    return re.sub(r"(?<![^\s.])\d+(?=\.)", "*", text or "")


def _alike(products: Sequence[Product]) -> list[tuple[str, list[Product]]]:
    """Products that differ in the numbers of their layers alone."""
    found: dict[tuple[str, ...], list[Product]] = {}
    for each in products:
        key = (_starred(each.name), _starred(each.reason), *_shape(each.grid))
        found.setdefault(key, []).append(each)
    return [(key[0] if len(a) > 1 else a[0].name, a) for key, a in found.items()]


def _why(alike: Sequence[Product]) -> str:
    return _starred(alike[0].reason) if len(alike) > 1 else alike[0].reason or ""


def _worst(products: Sequence[Product]) -> str:
    values = [each.inconsistency for each in products if each.inconsistency is not None]
    return f"{max(values):.1e}" if values else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
