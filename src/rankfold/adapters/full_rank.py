"""LoRA adapters that start at full rank without changing the model.

LoRA begins with B = 0, where a matrix of rank r has no tangent space. Here the adapter begins at an
orthonormal product B₀A₀ instead, and a hook takes that same product away again: the model computes
``W + s (B A − B₀ A₀)``. The base weights are not touched. What is saved is a plain adapter of rank
2r, with factors (B, −B₀) and (A; A₀); what PEFT merges into base weights is the difference, too.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from .candidates import plain_path
from .lora import adapters_of, lora_layers, why_not


class _Start(NamedTuple):
    """Of one layer: A₀ (r, in) and B₀ (out, r)."""

    layer: Any
    a: Tensor
    b: Tensor


def full_rank_start_(
    model: nn.Module, *, size: float = 0.1, adapter: str = "default", seed: int = 0
) -> FullRankStart:
    """Bring a PEFT LoRA adapter to full rank, in place, leaving what the model computes as it is.

    Args:
        model: a PEFT model whose LoRA layers are all plain linear ones, active, with B = 0 as PEFT
            makes them.
        size: all singular values of the product B₀A₀.
        adapter: its name.
        seed: of B₀ and A₀, which follow from it and the names of the layers alone. To go on with a
            run, call this with the same seed on the fresh model, then load the adapter's weights.

    Returns what saves the adapter. Keep it: with the model's own `save_pretrained` the part that
    is taken away would be lost. Merging (`merge_and_unload`) is right as it is. With dropout in the
    adapter the model is unchanged on average.
    """
    layers = _linear_layers(model, adapter)
    for name, layer in layers:
        if layer.lora_B[adapter].weight.count_nonzero():
            raise ValueError(
                f"{name}: B is not zero, so this adapter has begun already; call full_rank_start_ "
                "on a fresh one, and load trained weights after it"
            )
    started = {}
    for name, layer in layers:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        generator = torch.Generator("cpu").manual_seed(seed + zlib.crc32(name.encode()))
        with torch.no_grad():
            for weight in (down, up):
                drawn = torch.empty(weight.shape, device="cpu")
                nn.init.orthogonal_(drawn, math.sqrt(size), generator=generator)
                weight.copy_(drawn)
        started[name] = _Start(layer, down.detach().clone(), up.detach().clone())
    return FullRankStart(model, adapter, started)


class FullRankStart:
    """An adapter that began at full rank; made by `full_rank_start_`."""

    def __init__(self, model: Any, adapter: str, started: dict[str, _Start]) -> None:
        self._model = model
        self._adapter = adapter
        self._started = started
        self._handles: list[RemovableHandle] = [
            start.layer.register_forward_hook(self._hook(start)) for start in started.values()
        ]
        self._removed = False
        for start in started.values():
            # A method, not a closure over the layer: a copy of the model then merges its own.
            start.layer.get_delta_weight = MethodType(self._delta(start), start.layer)

    def _hook(self, start: _Start) -> Any:
        def take_away(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if layer.disable_adapters or self._adapter not in layer.active_adapters:
                return output
            if self._adapter in layer.merged_adapters:  # the weights have the difference in them
                return output
            a, b = (x.to(output.device, output.dtype) for x in (start.a, start.b))
            begun = functional.linear(functional.linear(inputs[0].to(a.dtype), a), b)
            return output - float(layer.scaling[self._adapter]) * begun

        return take_away

    def _delta(self, start: _Start) -> Any:
        """What PEFT merges: of this adapter s (B A − B₀ A₀), of others what it was."""
        plain = start.layer.get_delta_weight.__func__

        def get_delta_weight(layer: Any, adapter: str) -> Tensor:
            delta: Tensor = plain(layer, adapter)
            if self._removed or adapter != self._adapter:
                return delta
            a, b = (x.to(delta.device, delta.dtype) for x in (start.a, start.b))
            begun = float(layer.scaling[adapter]) * (b @ a)
            return delta - (begun.mT if layer.fan_in_fan_out else begun)

        return get_delta_weight

    def remove(self) -> None:
        """Take the hooks off: the model then has B₀A₀ in it. Not while the adapter is merged."""
        if any(self._adapter in start.layer.merged_adapters for start in self._started.values()):
            raise RuntimeError(
                f"the adapter {self._adapter!r} is merged, without B₀A₀; unmerge it first"
            )
        self._removed = True
        for handle in self._handles:
            handle.remove()

    def save(self, folder: str | Path) -> None:
        """Write the adapter, at rank 2r, as a folder that plain PEFT loads on the same base model.

        What it adds to the base model is ``s (B A − B₀ A₀)``, as here.
        """
        safetensors = importlib.import_module("safetensors.torch")
        self._model.save_pretrained(str(folder), selected_adapters=[self._adapter])
        folder = Path(folder)
        if self._adapter != "default":  # PEFT gives adapters of other names a folder each
            folder = folder / self._adapter
        weights = folder / "adapter_model.safetensors"
        tensors = safetensors.load_file(weights)
        for name, start in self._started.items():
            down, up = (_key(tensors, name, f"lora_{side}.weight") for side in "AB")
            a, b = (x.to("cpu", tensors[down].dtype) for x in (start.a, start.b))
            tensors[down] = torch.cat([tensors[down], a])
            tensors[up] = torch.cat([tensors[up], -b], 1)
        safetensors.save_file(tensors, weights, metadata={"format": "pt"})
        described = folder / "adapter_config.json"
        config = json.loads(described.read_text(encoding="utf-8"))
        described.write_text(json.dumps(_doubled(config), indent=2) + "\n", encoding="utf-8")


def _linear_layers(model: nn.Module, adapter: str) -> list[tuple[str, Any]]:
    """The LoRA layers of an adapter, each once; raises for all that is no plain product."""
    found: dict[int, tuple[str, Any]] = {}
    for name, layer in lora_layers(model):
        if adapter not in adapters_of(layer):
            continue
        reason = why_not(layer, adapter)
        if adapter in layer.lora_magnitude_vector:
            reason = "DoRA scales its product, which a full-rank start would bend"
        if reason is not None:
            raise ValueError(f"{name} cannot start at full rank: {reason}")
        found.setdefault(id(layer), (name, layer))
    if not found:
        raise ValueError(f"the model has no LoRA layers with an adapter {adapter!r}")
    return list(found.values())


def _key(tensors: dict[str, Tensor], layer: str, weight: str) -> str:
    """The name under which PEFT saved a layer's weight: it may leave out the adapter's name."""
    [key] = [k for k in tensors if plain_path(k).endswith(f"{layer}.{weight}")]
    return key


def _doubled(config: dict[str, Any]) -> dict[str, Any]:
    """A LoRA configuration with twice the rank, and the same scaling of the product."""
    # The scaling is alpha / r, or alpha / √r if it is rank-stabilized.
    growth = math.sqrt(2) if config.get("use_rslora") else 2
    changed = dict(config, r=2 * config["r"], lora_alpha=growth * config["lora_alpha"])
    for pattern, factor in (("rank_pattern", 2), ("alpha_pattern", growth)):
        changed[pattern] = {k: factor * v for k, v in (config.get(pattern) or {}).items()}
    return changed
