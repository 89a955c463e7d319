"""PEFT's LoRA adapters -> grids of B·A products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..factors import Factor, Grid
from .candidates import Candidate, candidate, plain_path, without_sharing
from .rules import qualified_name

_LAYER = "peft.tuners.lora.layer.LoraLayer"
_ADALORA = "peft.tuners.adalora.layer.AdaLoraLayer"
_EXPERTS = "peft.tuners.lora.layer.ParamWrapper"
# Variants whose output depends on B·A alone: DoRA scales the rows of W + BA by their norms, which
# are functions of it and held constant in gradients; aLoRA adds BA at some tokens only.
_EXACT_VARIANTS = frozenset({"DoraLinearVariant", "ALoraLinearVariant"})


def lora_grids(model: nn.Module, *, adapters: str | Iterable[str] | None = None) -> list[Grid]:
    """The products ``B A`` of PEFT's LoRA adapters in ``model``, named by module and adapter.

    Args:
        model: a PEFT model, or any with its LoRA layers in it. Every adapter on a linear is one
            pair, ``lora_B.weight`` (out, r) and ``lora_A.weight`` (r, in). Its constant scaling
            and the dropout before A change nothing about that; a bias of B, DoRA's magnitudes and
            modules that are saved whole are outside of the product.
        adapters: names of the adapters to take, ``"default"`` for instance; all by default.

    Adapters that are frozen, inactive, or merged are left out, and so are those of embeddings and
    convolutions; `rankfold.inspect` shows which and why. B is zero in a fresh adapter, where
    fixed-rank geometries need `full_rank_start_` or ``damping``. Raises ValueError without any.
    """
    wanted = None if adapters is None else {adapters} if isinstance(adapters, str) else {*adapters}
    known = {adapter for _, layer in lora_layers(model) for adapter in adapters_of(layer)}
    if wanted is not None and not wanted <= known:
        missing = ", ".join(sorted(wanted - known))
        raise ValueError(
            f"no LoRA adapter named {missing} in {type(model).__name__}; there are: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    found = lora_candidates(model, wanted)
    grids = [each.grid for each in found if each.grid is not None]
    if not grids:
        reasons = "".join(f"\n  {each.name}: {each.reason}" for each in found)
        raise ValueError(
            f"no trainable LoRA adapters of linears found in {type(model).__name__}: expected "
            f"PEFT's, or build grids with rankfold.Grid{reasons}"
        )
    return grids


def lora_candidates(model: nn.Module, adapters: set[str] | None = None) -> list[Candidate]:
    """Every adapter in ``model``, of these names, taken or not."""
    return without_sharing(
        model,
        (
            _candidate(model, name, layer, adapter)
            for name, layer in lora_layers(model)
            for adapter in adapters_of(layer)
            if adapters is None or adapter in adapters
        ),
    )


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's LoRA layers by name, those in several places under each."""
    for name, module in model.named_modules(remove_duplicate=False):
        if _is(module, _LAYER):
            yield plain_path(name), module


def _is(module: nn.Module, kind: str) -> bool:
    return any(qualified_name(each) == kind for each in type(module).__mro__)


def adapters_of(layer: Any) -> list[str]:
    """The names of the adapters on a layer."""
    return [*dict.fromkeys([*layer.lora_A, *layer.lora_embedding_A])]


def _candidate(model: nn.Module, name: str, layer: Any, adapter: str) -> Candidate:
    label = f"{name}.{adapter}" if name else adapter

    def build() -> Grid:
        reason = why_not(layer, adapter)
        if reason is not None:
            raise ValueError(reason)
        left, right = layer.lora_B[adapter].weight, Factor(layer.lora_A[adapter].weight, axis=0)
        return Grid(left, right, name=label)

    return candidate(model, label, "lora", build)


def why_not(layer: Any, adapter: str) -> str | None:
    """Why the layer's output is no function of this adapter's product, or None if it is."""
    if _is(layer, _ADALORA):
        return "AdaLoRA: lora_E stands between the factors"
    if _is(layer, _EXPERTS):
        return "adapts a parameter of experts, whose products are blocks of B and A"
    if adapter in layer.lora_embedding_A:
        return (
            "an embedding: a batch has gradients for its own tokens only, and a step of the "
            "product would move all others"
        )
    parts = (layer.lora_A[adapter], layer.lora_B[adapter])
    for part in parts:
        if not isinstance(part, nn.Linear):
            what = "a convolution" if "Conv" in type(part).__name__ else type(part).__name__
            return f"not on a linear: its factors are no matrices but {what}"
    variant = layer.lora_variant.get(adapter)
    kind = getattr(variant, "__name__", type(variant).__name__)
    if variant is not None and kind not in _EXACT_VARIANTS:
        return f"{kind} is not known to depend on the product alone"
    if layer.disable_adapters:
        return "adapters are disabled"
    if adapter in layer.merged_adapters:
        return "merged into the base weight, so that the adapter has no gradients"
    if adapter not in layer.active_adapters:
        return "inactive"
    return None
