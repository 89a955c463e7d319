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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from .candidates import plain_path
from .lora import adapters_of, lora_layers, why_not


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
    for name, layer in layers:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        generator = torch.Generator("cpu").manual_seed(seed + zlib.crc32(name.encode()))
        with torch.no_grad():
            for weight in (down, up):
                drawn = torch.empty(weight.shape, device="cpu")
                nn.init.orthogonal_(drawn, math.sqrt(size), generator=generator)
                weight.copy_(drawn)
        for buffer, weight in zip(_buffers(adapter), (down, up), strict=True):
            layer.register_buffer(buffer, weight.detach().clone(), persistent=False)
    return FullRankStart(model, adapter, dict(layers))


class FullRankStart:
    """An adapter that began at full rank; made by `full_rank_start_`."""

    def __init__(self, model: Any, adapter: str, layers: dict[str, Any]) -> None:
        self._model = model
        self._adapter = adapter
        self._layers = layers
        self._handles: list[RemovableHandle] = [
            layer.register_forward_hook(_TakeAway(adapter)) for layer in layers.values()
        ]
        for layer in layers.values():
            if "get_delta_weight" not in vars(layer):  # of another adapter that began so
                layer.get_delta_weight = _Difference(layer)
            layer.get_delta_weight.adapters.add(adapter)

    def remove(self) -> None:
        """Take the hooks off: the model then has B₀A₀ in it. Not while the adapter is merged."""
        if any(self._adapter in layer.merged_adapters for layer in self._layers.values()):
            raise RuntimeError(
                f"the adapter {self._adapter!r} is merged, without B₀A₀; unmerge it first"
            )
        for handle in self._handles:
            handle.remove()
        for layer in self._layers.values():
            layer.get_delta_weight.adapters.discard(self._adapter)

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
        for name, layer in self._layers.items():
            down, up = (_key(tensors, name, f"lora_{side}.weight") for side in "AB")
            a, b = _begun(layer, self._adapter, tensors[down])
            tensors[down] = torch.cat([tensors[down], a])
            tensors[up] = torch.cat([tensors[up], -b], 1)
        safetensors.save_file(tensors, weights, metadata={"format": "pt"})
        described = folder / "adapter_config.json"
        config = json.loads(described.read_text(encoding="utf-8"))
        described.write_text(json.dumps(_doubled(config), indent=2) + "\n", encoding="utf-8")


# Objects, and neither closures nor methods, so that a copy of a model has its own, and a file too.


class _TakeAway:
    """A hook of a LoRA layer, which takes s B₀ A₀ x from what it makes of x."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if layer.disable_adapters or self._adapter not in layer.active_adapters:
            return output
        if self._adapter in layer.merged_adapters:  # the weights have the difference in them
            return output
        a, b = _begun(layer, self._adapter, output)
        begun = functional.linear(functional.linear(inputs[0].to(a.dtype), a), b)
        return output - float(layer.scaling[self._adapter]) * begun


class _Difference:
    """What PEFT merges: of ``adapters`` that began so s (B A − B₀ A₀), of others what it was."""

    def __init__(self, layer: Any) -> None:
        self.adapters: set[str] = set()
        self._layer = layer

    def __call__(self, adapter: str) -> Tensor:
        layer = self._layer
        delta: Tensor = type(layer).get_delta_weight(layer, adapter)
        if adapter not in self.adapters:
            return delta
        a, b = _begun(layer, adapter, delta)
        begun = float(layer.scaling[adapter]) * (b @ a)
        return delta - (begun.mT if layer.fan_in_fan_out else begun)


def _buffers(adapter: str) -> tuple[str, str]:
    """Where a layer has A₀ (r, in) and B₀ (out, r), which go with it to other devices."""
    return f"full_rank_start_A_{adapter}", f"full_rank_start_B_{adapter}"


def _begun(layer: Any, adapter: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """A₀ and B₀ on the device and in the dtype of ``like``."""
    a, b = (getattr(layer, name).to(like.device, like.dtype) for name in _buffers(adapter))
    return a, b


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
