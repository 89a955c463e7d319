"""`build_optimizer`: one optimizer for a whole model, and which parameter goes where."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import adapters
from .adapters.candidates import plain_path
from .combined import CombinedOptimizer
from .defaults import recommended
from .factors import Grid, Region, describe
from .groups import as_grid_list, as_groups
from .optimizer import RiemannianSGD

Group = dict[str, Any]
Named = dict[str, Tensor]
IsHidden = Callable[[str, Tensor], bool]

BASES: Mapping[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "muon": torch.optim.Muon,
    "sgd": torch.optim.SGD,
}
# How modules that turn hidden states into logits are called, where the model does not say.
_UNEMBEDDING = re.compile(r"(^|[._])(head|unembed\w*|classifier|score|outputs)\.weight$")
_MOST_NAMED = 4


def build_optimizer(
    model: nn.Module,
    lr: float | Tensor | None = None,
    *,
    geometry: str | None = None,
    base: str | type[Optimizer] = "adamw",
    base_lr: float | Tensor | None = None,
    base_options: Mapping[str, Any] | None = None,
    grids: Grid | Iterable[Grid] | Iterable[Group] | None = None,
    decay_vectors: bool = False,
    hidden: IsHidden | None = None,
    **options: Any,
) -> CombinedOptimizer:
    """One optimizer for a whole model: `RiemannianSGD` on its products, a base one elsewhere.

    Every trainable parameter is in one parameter group, and in one only; print the optimizer to
    see where. It is a `torch.optim.Optimizer` for plain loops, schedulers, Trainer, Accelerate
    and Lightning alike.

    Args:
        model: any module, compiled or not. Parameters that are frozen now are left out.
        lr: learning rate of the products; that of `recommended` by default.
        geometry: and ``options``: those of `RiemannianSGD`, in place of those of `recommended`.
            Isometries need factors that start orthonormal: call `orthonormalize_` first.
        base: ``"adamw"``, ``"sgd"``, ``"muon"`` or a class of torch optimizers, for parameters
            that are in no product. With ``"muon"``, `torch.optim.Muon` takes the two-dimensional
            weights between embeddings and logits and AdamW all else; both have the learning rate
            ``base_lr``, since Muon's is adjusted to match (``adjust_lr_fn="match_rms_adamw"``).
        base_lr: learning rate of the base optimizer; that of its class by default.
        base_options: further options of it. With ``"muon"`` they are Muon's; ``lr`` and
            ``weight_decay`` go for AdamW too, and the entry ``"adamw"`` is a dict of its own.
        grids: the products, as `RiemannianSGD` takes them. None looks for them: those of PEFT
            adapters if there are any, and `attention_grids`.
        decay_vectors: let the base optimizer's weight decay act on biases, norms and all else of
            fewer than two dimensions, which by default it does not.
        hidden: which two-dimensional weights are Muon's, told by name and parameter, in place of
            all but embeddings and what is named or known as the output layer.

    A parameter that grids cover only in part would stay where it is elsewhere. So grids given are
    refused where they do that, with the rows named; grids found are left out, with a warning, and
    their parameters go to the base optimizer whole.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model, a torch.nn.Module, got {type(model).__name__}: products are found "
            "in modules, not among parameters"
        )
    module = _unwrapped(model)
    named: Named = {
        plain_path(name): param for name, param in module.named_parameters() if param.requires_grad
    }
    names = {id(param): name for name, param in named.items()}
    groups = _found_groups(module, names) if grids is None else _given_groups(grids, names)
    _require_known(options)
    if geometry is not None:
        options["geometry"] = geometry
    products = recommended(groups, lr, **options)
    for group in products.param_groups:
        group["param_names"] = [names[id(p)] for p in group["params"]]
    covered = {id(p) for group in products.param_groups for p in group["params"]}
    rest = {name: param for name, param in named.items() if id(param) not in covered}
    chosen = dict(base_options or {})
    if base_lr is not None:
        chosen["lr"] = base_lr
    if base != "muon":
        if hidden is not None:
            raise ValueError(f"hidden tells which weights are Muon's, and base is {base!r}")
        return CombinedOptimizer([products, _base(_class(base), rest, chosen, decay_vectors)])
    if hidden is None:
        hidden = _between_embeddings(module)
    matrices = {name: p for name, p in rest.items() if p.dim() == 2 and hidden(name, p)}
    others = {name: p for name, p in rest.items() if name not in matrices}
    shared = {key: chosen[key] for key in ("lr", "weight_decay") if key in chosen}
    for_adamw = {**shared, **chosen.pop("adamw", {})}
    for_muon = {"adjust_lr_fn": "match_rms_adamw", **chosen}
    return CombinedOptimizer(
        [
            products,
            _base(torch.optim.Muon, matrices, for_muon, decay_vectors),
            _base(torch.optim.AdamW, others, for_adamw, decay_vectors),
        ]
    )


def _require_known(options: Mapping[str, Any]) -> None:
    known = {
        *inspect.signature(recommended).parameters,
        *inspect.signature(RiemannianSGD).parameters,
    }
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise TypeError(
                f"build_optimizer has no option {name!r}"
                + (f" (is {near[0]!r} meant?)" if near else "")
                + f"; one of the base optimizer goes into base_options={{{name!r}: ...}}"
            )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module that was compiled or distributed."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


# Products ---------------------------------------------------------------------------------------


def _given_groups(
    grids: Grid | Iterable[Grid] | Iterable[Group], names: Mapping[int, str]
) -> list[Group]:
    groups: list[Group] = [{**group, "grids": as_grid_list(group)} for group in as_groups(grids)]
    every = [grid for group in groups for grid in group["grids"]]
    for grid in every:
        for param in grid.params():
            if param.requires_grad and id(param) not in names:
                raise ValueError(
                    f"grid {grid.name!r} has {describe(param)}, which is not one of the model"
                )
    missing = _missing(every)
    if missing:
        raise ValueError(
            f"grids cover only a part of some parameters: {_rows(missing.values(), names)} in no "
            "grid, where nothing would update them. Add grids that cover these, or leave out those "
            "that cover the rest"
        )
    return groups


def _found_groups(model: nn.Module, names: Mapping[int, str]) -> list[Group]:
    grids = _find(model)
    left_out: list[Grid] = []
    missing: dict[int, Region] = {}
    while found := _missing(grids):
        missing |= found
        left_out += [grid for grid in grids if any(id(p) in found for p in grid.params())]
        grids = [grid for grid in grids if all(id(p) not in found for p in grid.params())]
    if left_out:
        shown = ", ".join(str(grid.name) for grid in left_out[:_MOST_NAMED])
        more = f" and {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
        message = (
            f"{shown}{more} cannot be optimized as products, since they share parameters with what "
            f"is in none: {_rows(missing.values(), names)}. {_way_out(model, missing)}"
        )
        if not grids:
            raise ValueError(message)
        warnings.warn(f"{message}; the base optimizer has these", stacklevel=3)
    return [{"grids": grids}]


def _way_out(model: nn.Module, missing: Mapping[int, Region]) -> str:
    """Whether inexact products would cover what exact ones leave, as they do without latents."""
    if missing.keys() & _missing(adapters.attention_grids(model, pairs=("qk", "vo"))).keys():
        return "No product of the model has all of these"
    return (
        'grids=rankfold.attention_grids(model, pairs=("qk", "vo")) takes in query·key products '
        "that were left out as inexact"
    )


def _find(model: nn.Module) -> list[Grid]:
    """The products of adapters, if there are any, and of attention."""
    adapted = any(
        ".lora_A." in name for name, param in model.named_parameters() if param.requires_grad
    )
    if not adapted:
        return adapters.attention_grids(model)
    grids = adapters.lora_grids(model)
    with suppress(ValueError):  # what adapters are added to is frozen, as a rule
        grids += adapters.attention_grids(model)
    return grids


def _missing(grids: Iterable[Grid]) -> dict[int, Region]:
    """The parts in no grid, of parameters that have another part in one, by id."""
    regions: dict[int, Region] = {}
    for grid in grids:
        for _, _, factor in grid.factors():
            for region in factor.regions():
                before = regions.get(id(region.param), region).indices
                regions[id(region.param)] = region._replace(indices=before | region.indices)
    missing: dict[int, Region] = {}
    for key, region in regions.items():
        indices = frozenset(range(region.param.shape[region.dim])) - region.indices
        if indices:
            missing[key] = region._replace(indices=indices)
    return missing


def _rows(regions: Iterable[Region], names: Mapping[int, str]) -> str:
    """Parts of parameters in words: ``rows 0–7, 16–23 of weight``."""
    listed = list(regions)
    parts = []
    for region in listed[:_MOST_NAMED]:
        if region.param.dim() == 1:
            unit = "entries"
        else:
            unit = "rows" if region.dim == region.param.dim() - 2 else "columns"
        name = names.get(id(region.param), describe(region.param))
        parts.append(f"{unit} {_ranges(sorted(region.indices))} of {name}")
    more = f" and of {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return "; ".join(parts) + more


def _ranges(indices: Sequence[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append(f"{members[0]}–{members[-1]}" if len(members) > 1 else str(members[0]))
    shown = ", ".join(runs[:_MOST_NAMED])
    return f"{shown} …" if len(runs) > _MOST_NAMED else shown


# The base optimizer -----------------------------------------------------------------------------


def _class(base: str | type[Optimizer]) -> type[Optimizer]:
    if isinstance(base, str):
        if base not in BASES:
            raise ValueError(
                f"unknown base {base!r}; there are {', '.join(BASES)}, or give a class"
            )
        return BASES[base]
    if not (isinstance(base, type) and issubclass(base, Optimizer)):
        raise TypeError(f"base must be a name or a class of torch optimizers, got {base!r}")
    if issubclass(base, torch.optim.Muon):
        raise ValueError(
            f"{base.__name__} takes two-dimensional weights alone; base='muon' has AdamW beside it "
            "for embeddings, norms and biases"
        )
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{base.__name__} evaluates the loss several times a step, which it cannot while "
            "products are updated by another optimizer"
        )
    return base


def _base(
    kind: type[Optimizer], named: Named, options: dict[str, Any], decay_vectors: bool
) -> Optimizer:
    """An optimizer of ``kind`` on these parameters, which may be none."""
    construct: Callable[..., Optimizer] = kind
    empty = construct([{"params": []}], **options)
    groups = list(_decay_groups(named, decay_vectors or "weight_decay" not in empty.defaults))
    if groups:
        return construct(groups, **options)
    empty.param_groups.clear()  # still there for parameters that are added later
    return empty


def _decay_groups(named: Named, alike: bool) -> Iterator[Group]:
    """Parameters that decay and, unless all are alike, those of fewer than two dimensions."""
    decaying = {name: param for name, param in named.items() if alike or param.dim() > 1}
    vectors = {name: param for name, param in named.items() if name not in decaying}
    options: Group
    for part, options in ((decaying, {}), (vectors, {"weight_decay": 0.0})):
        if part:
            yield {"params": list(part.values()), "param_names": list(part), **options}


def _between_embeddings(model: nn.Module) -> IsHidden:
    """All but embeddings, by the kind of module or by name, and the layer that gives logits."""
    outside = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    for module in model.modules():  # models of transformers, here or inside, know theirs
        output_embeddings = getattr(module, "get_output_embeddings", None)
        if callable(output_embeddings) and isinstance(layer := output_embeddings(), nn.Module):
            outside |= {id(param) for param in layer.parameters()}

    def hidden(name: str, param: Tensor) -> bool:
        return not (id(param) in outside or "embed" in name or _UNEMBEDDING.search(name))

    return hidden
