"""What stands between the factors of an attention module's products, told by names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from .rules import AttentionRule, containers

_ROTARY = re.compile(r"(^|_)(rope|rotary)")
_ROTARY_CLASS = re.compile(r"Ro[Pp][Ee](?![a-z])|Rotary")
# On queries and keys alone; on values or what is attended to alone. Others may be on both.
_ON_SCORES = re.compile(r"(^|_)(q|k|qk|query|key)(_|$)|^[qk](norm|ln)")
_ON_VALUES = re.compile(r"(^|_)(v|o|value|out|output|sub|g|gate)(_|$)")
_NORM = re.compile(r"norm|(^|_)ln($|_)|gate", re.IGNORECASE)
_NORM_CALL = re.compile(r"^(normalize|rms_norm|l2_?norm)$")
# Added to the scores, after the product.
_ON_TOP = frozenset({"relative_attention_bias", "sinks"})

_ROTARY_OPTIONS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct")
_NORM_OPTIONS = ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_l2norm")
# Attributes of modules and configurations that mean something where they are switched on.
_SWITCHES: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_NORM_OPTIONS, ("qk",), "a norm on queries and keys"),
    (("rotary_value",), ("vo",), "rotary embeddings on values"),
    (("clip_qkv",), ("qk", "vo"), "queries, keys and values are clamped"),
    (("num_kv_shared_layers",), ("qk", "vo"), "layers share keys and values"),
)


def what_bends(model: nn.Module, name: str, rule: AttentionRule) -> dict[str, str]:
    """Why a pair of the module at ``name`` is not a product alone, for pairs that are not."""
    if rule.between is not None:
        return dict(rule.between)
    owners = [model]
    for step in name.split(".") if name else []:
        owners.append(getattr(owners[-1], step))
    layer = owners[-1]
    paths = sorted(rule.paths(layer))
    parts = [layer, *containers(layer, paths)]
    configs = [c for c in (getattr(part, "config", None) for part in parts) if c is not None]
    found: dict[str, list[str]] = {"qk": [], "vo": []}
    place = next(_rotations([*owners, *parts[1:]], parts, configs), None)
    if place is not None:
        found["qk"].append(f"rotary embeddings{_share(configs)} between queries and keys ({place})")
    for keys, pairs, what in _SWITCHES:
        switch = next(_switched_on([*parts, *configs], keys), None)
        if switch is not None:
            for pair in pairs:
                found[pair].append(f"{what} ({switch})")
    for call in sorted(_called(parts)):
        if _NORM_CALL.search(call):
            for pair in found:
                found[pair].append(f"forward calls {call}, which may stand between its factors")
    for path, what in _others(layer, paths, {*rule.beside}):
        step = path.rpartition(".")[2]
        on_scores, on_values = _ON_SCORES.search(step), _ON_VALUES.search(step)
        if on_scores or not on_values:
            found["qk"].append(f"{path}{what} may stand between queries and keys")
        if on_values or not on_scores:
            found["vo"].append(f"{path}{what} may stand between values and output")
    return {pair: "; ".join(reasons) for pair, reasons in found.items() if reasons}


def _rotations(
    owners: Sequence[nn.Module], parts: Sequence[nn.Module], configs: Sequence[Any]
) -> Iterator[str]:
    """Where rotary embeddings show: attributes of modules around the layer, options, code."""
    for part in parts:
        if _ROTARY_CLASS.search(type(part).__name__):
            yield type(part).__name__
    for owner in reversed(owners):
        for attribute in (*owner._modules, *owner._buffers, *vars(owner)):
            if _ROTARY.search(attribute) and getattr(owner, attribute) is not None:
                yield f"{type(owner).__name__}.{attribute}"
    for config in configs:
        for key in _ROTARY_OPTIONS:
            if getattr(config, key, None) is not None:
                yield f"config.{key}"
        if "rotary" in str(getattr(config, "position_embedding_type", "")):
            yield "config.position_embedding_type"
    for call in sorted(_called(parts)):
        if _ROTARY.search(call):
            yield f"{call} in forward"


def _called(parts: Sequence[nn.Module]) -> set[str]:
    """Names that the forward functions of these modules use, functions among them."""
    names: set[str] = set()
    for part in parts:
        code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
        names.update(() if code is None else (*code.co_names, *code.co_varnames, *code.co_freevars))
    return names


def _share(configs: Sequence[Any]) -> str:
    """How much of a head is rotated, where that is said to be a part."""
    for config in configs:
        parameters = getattr(config, "rope_parameters", None)
        nested = parameters if isinstance(parameters, dict) else {}
        for share in (
            nested.get("partial_rotary_factor"),
            getattr(config, "partial_rotary_factor", None),
            getattr(config, "rotary_pct", None),
        ):
            if isinstance(share, float) and share < 1:
                return f" on {share:.0%} of each head"
    return ""


def _switched_on(owners: Sequence[Any], keys: Sequence[str]) -> Iterator[str]:
    for owner in owners:
        for key in keys:
            value = getattr(owner, key, None)
            if isinstance(value, (bool, int, float)) and value:
                yield key if isinstance(owner, nn.Module) else f"config.{key}"


def _others(layer: nn.Module, paths: Sequence[str], known: set[str]) -> Iterator[tuple[str, str]]:
    """Norms, gates and weights in the layer that the rule does not read, by path and class."""

    def below(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
        for name, child in module._modules.items():
            path = prefix + name
            if child is None or path in paths or path in known or name in _ON_TOP:
                continue
            if any(used.startswith(path + ".") for used in paths):
                yield from below(child, path + ".")
            elif _NORM.search(name) or any(True for _ in child.parameters()):
                yield path, f" ({type(child).__name__})"
        for name, param in module._parameters.items():
            path = prefix + name
            if param is not None and path not in (*paths, *known) and name not in _ON_TOP:
                yield path, ""

    yield from below(layer, "")
