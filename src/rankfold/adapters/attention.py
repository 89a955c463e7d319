"""Attention modules -> grids of query·key and output·value products."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..factors import Factor, Grid

PAIRS = ("qk", "vo")

# Names by which modules give away what stands between the factors of a product: a rotation or a
# norm on queries and keys, a norm or a gate on values or on what is attended to.
_ROTARY = re.compile(r"(^|_)(rope|rotary)")
_BETWEEN = re.compile(r"norm|(^|_)ln($|_)|gate")
_ON_SCORES = re.compile(r"(^|_)(q|k|qk|query|key)_")


def attention_grids(model: nn.Module, *, pairs: str | Iterable[str] | None = None) -> list[Grid]:
    """The products of every attention layer in ``model``, as grids named by module.

    Args:
        model: any module; `torch.nn.MultiheadAttention` layers and modules with linears
            ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` (or ``out_proj``) are found in it.
            Grouped-query attention gives one member a key/value head. Biases of q, k and v are
            carried as one more row of their factors.
        pairs: ``"qk"``, ``"vo"``, or both. None takes those whose loss depends on the product
            alone: query·key is left out where rotary embeddings or a norm on queries and keys
            stand between the two factors, output·value where a norm or a gate does. This is told
            by the names of modules and configuration, so look at what it finds.

    Layers with a frozen factor are left out. Raises ValueError if nothing is found.
    """
    wanted = _parse_pairs(pairs)
    grids = [
        grid
        for name, module in model.named_modules()
        for grid in _layer_grids(
            name, module, _exact_pairs(model, name) if wanted is None else wanted
        )
    ]
    if not grids:
        raise ValueError(
            f"no attention products found in {type(model).__name__}: expected "
            "torch.nn.MultiheadAttention, or modules with q_proj, k_proj, v_proj and o_proj, with "
            "trainable weights (describe other layouts with rankfold.Factor and rankfold.Grid)"
        )
    return grids


def _parse_pairs(pairs: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if pairs is None:
        return None
    wanted = (pairs,) if isinstance(pairs, str) else tuple(pairs)
    unknown = [p for p in wanted if p not in PAIRS]
    if unknown or not wanted:
        raise ValueError(f"pairs must be 'qk', 'vo' or both, got {pairs!r}")
    return wanted


def _layer_grids(name: str, module: nn.Module, pairs: tuple[str, ...]) -> Iterator[Grid]:
    if isinstance(module, nn.MultiheadAttention):
        factors, groups = _multihead_factors(name, module)
    elif all(isinstance(getattr(module, f"{x}_proj", None), nn.Linear) for x in "qkv"):
        factors, groups = _projection_factors(name, module)
    else:
        return
    for pair, left, right in (("qk", "q", "k"), ("vo", "o", "v")):
        both = (*factors[left].params, *factors[right].params)
        if pair in pairs and all(p.requires_grad for p in both):
            label = f"{name}.{pair}" if name else pair
            yield Grid(factors[left], factors[right], groups=groups, name=label)


def _multihead_factors(name: str, module: nn.MultiheadAttention) -> tuple[dict[str, Factor], int]:
    if module.bias_k is not None:
        raise ValueError(
            f"{name}: add_bias_kv appends a learned key and value that are not in the products; "
            "build its grids by hand with rankfold.Grid"
        )
    heads, width, rank = module.num_heads, module.embed_dim, module.head_dim
    bias = module.in_proj_bias
    output = Factor(module.out_proj.weight, axis=1, blocks=heads)

    def projection(weight: Tensor | None, k: int) -> Factor:
        if weight is None:  # one fused weight (3E, E): queries, keys, values
            fused, begin = module.in_proj_weight, k * width
            return Factor(fused, axis=0, rank=rank, blocks=heads, start=begin, bias=bias)
        if bias is not None:
            raise ValueError(
                f"{name}: kdim or vdim with a bias keeps separate weights and one fused bias, "
                "which a factor cannot read; use bias=False"
            )
        return Factor(weight, axis=0, blocks=heads)

    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    q, k, v = (projection(weight, i) for i, weight in enumerate(weights))
    return {"q": q, "k": k, "v": v, "o": output}, heads


def _projection_factors(name: str, module: Any) -> tuple[dict[str, Factor], int]:
    output = getattr(module, "o_proj", None) or getattr(module, "out_proj", None)
    if not isinstance(output, nn.Linear):
        raise ValueError(f"{name}: has q_proj, k_proj and v_proj but no linear o_proj or out_proj")
    q, k, v = module.q_proj, module.k_proj, module.v_proj
    rank = _head_dim(name, module)
    for label, size in (
        ("q_proj", q.out_features),
        ("k_proj", k.out_features),
        ("v_proj", v.out_features),
        ("o_proj", output.in_features),
    ):
        if size % rank:
            raise ValueError(f"{name}: head_dim {rank} does not divide the {size} of {label}")
    heads, groups = q.out_features // rank, k.out_features // rank
    if v.out_features != k.out_features or output.in_features != q.out_features or heads % groups:
        raise ValueError(
            f"{name}: {heads} query heads, {groups} key heads, {v.out_features // rank} value "
            f"heads and {output.in_features // rank} output heads do not form groups"
        )
    factors = {
        "q": Factor(q.weight, axis=0, blocks=heads, bias=q.bias),
        "k": Factor(k.weight, axis=0, blocks=groups, bias=k.bias),
        "v": Factor(v.weight, axis=0, blocks=groups, bias=v.bias),
        "o": Factor(output.weight, axis=1, blocks=heads),
    }
    return factors, groups


def _head_dim(name: str, module: Any) -> int:
    config = getattr(module, "config", None)
    for owner in (module, config):
        size = getattr(owner, "head_dim", None)
        if isinstance(size, int):
            return size
    for owner in (module, config):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            heads = getattr(owner, attribute, None)
            if isinstance(heads, int):
                size = int(module.q_proj.out_features)
                if size % heads:
                    raise ValueError(f"{name}: {heads} heads do not divide the {size} of q_proj")
                return size // heads
    raise ValueError(
        f"{name}: cannot tell the size of a head; give the module an attribute head_dim or "
        "num_heads, or build its grids with rankfold.Grid"
    )


def _exact_pairs(model: nn.Module, name: str) -> tuple[str, ...]:
    """The pairs with nothing but a product between their factors, as far as names can tell."""
    owners = [model]
    for part in name.split(".") if name else []:
        owners.append(getattr(owners[-1], part))
    layer = owners[-1]
    children = [child for child, module in layer._modules.items() if module is not None]
    between = [child for child in children if _BETWEEN.search(child)]
    on_scores = [child for child in between if _ON_SCORES.search(child)]
    named = (a for owner in owners for a in (*owner._modules, *owner._buffers, *vars(owner)))
    config = getattr(layer, "config", None)
    rotated = any(_ROTARY.search(attribute) for attribute in named) or any(
        getattr(config, key, None) is not None
        for key in ("rope_parameters", "rope_theta", "rope_scaling")
    )
    exact = {"qk": not (on_scores or rotated), "vo": len(between) == len(on_scores)}
    return tuple(pair for pair in PAIRS if exact[pair])
