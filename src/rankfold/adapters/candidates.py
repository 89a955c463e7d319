"""Candidate: a product of a model, as a grid, or the reason why it is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn

from ..factors import Grid


@dataclass(frozen=True)
class Candidate:
    """A product that may be optimized.

    Args:
        name: the module's path and what the product is, as grids are named.
        kind: ``"qk"``, ``"vo"``, ``"lora"``, or what a rule calls a product it never takes.
        grid: None where the product cannot be taken at all.
        reason: why it is not taken; None if it is. With a grid, it is taken on request.
    """

    name: str
    kind: str
    grid: Grid | None = None
    reason: str | None = None


def plain_path(path: str) -> str:
    """The path of a module or parameter without the steps that `torch.compile` puts in."""
    return ".".join(step for step in path.split(".") if step != "_orig_mod")


def candidate(
    model: nn.Module, name: str, kind: str, build: Callable[[], Grid], reason: str | None = None
) -> Candidate:
    """The grid that ``build`` makes, or why it cannot be had."""
    try:
        grid = build()
    except ValueError as error:
        return Candidate(name, kind, reason=_plain(str(error), name))
    frozen = [p for p in grid.params() if not p.requires_grad]
    if frozen:
        names = {id(p): plain_path(path) for path, p in model.named_parameters()}
        where = ", ".join(names.get(id(p), "a parameter") for p in frozen)
        return Candidate(name, kind, reason=f"frozen: {where}")
    return Candidate(name, kind, grid, reason)


def without_sharing(model: nn.Module, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each product once, and none with a factor that is used elsewhere.

    A factor that stands in two different products cannot move along with one of them. A whole
    product that stands in several places (layers repeated, all of their weights tied) can.
    """
    found = list(candidates)
    paths: dict[int, list[str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(param), []).append(plain_path(path))
    times = Counter(_signature(c.grid) for c in found if c.grid is not None)
    first: dict[tuple[object, ...], str] = {}
    kept = []
    for each in found:
        if each.grid is None:
            kept.append(each)
            continue
        signature = _signature(each.grid)
        shared = [
            places
            for param in each.grid.params()
            if len(places := paths.get(id(param), [])) > times[signature]
        ]
        if shared:
            reason = f"one parameter in several places: {', '.join(shared[0])}"
            each = replace(each, grid=None, reason=reason)
        elif signature in first:
            each = replace(each, grid=None, reason=f"the same product as {first[signature]}")
        else:
            first[signature] = each.name
        kept.append(each)
    return kept


def _signature(grid: Grid) -> tuple[object, ...]:
    """What two grids that read the same parts of the same parameters have in common."""
    return (
        grid.groups,
        *((s, k, f.layout[3], *(id(p) for p in f.params)) for s, k, f in grid.factors()),
    )


def _plain(message: str, name: str) -> str:
    """A refusal of Grid without what its reader sees anyway."""
    return message.removeprefix(f"grid {name!r}: ").partition(": Factor(")[0]
