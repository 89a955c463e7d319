"""Attention modules -> grids of query·key and output·value products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ..factors import Grid
from .between import what_bends
from .candidates import Candidate, candidate, plain_path, without_sharing
from .families import rules_for
from .rules import AttentionRule, containers

PAIRS = ("qk", "vo")


def attention_grids(model: nn.Module, *, pairs: str | Iterable[str] | None = None) -> list[Grid]:
    """The products of every attention layer in ``model``, as grids named by module.

    Args:
        model: any module. `torch.nn.MultiheadAttention` and the attention of most transformers
            models is found in it, and what `register_attention` has been told of. Grouped-query
            attention gives one member a key/value head. Biases of q, k and v are carried as one
            more row of their factors.
        pairs: ``"qk"``, ``"vo"``, or both. None takes those whose loss depends on the product
            alone: query·key is left out where rotary embeddings or a norm on queries and keys
            stand between the two factors, output·value where a norm or a gate does. This is told
            by the names of modules and configuration, so look at what it finds.

    `rankfold.inspect` shows what was found, and why the rest was not: frozen or shared factors,
    layouts that no rule knows. Of a fused weight the grids may cover some rows only; an optimizer
    of grids leaves the others as they are. Raises ValueError if nothing is found.
    """
    wanted = _parse_pairs(pairs)
    found = attention_candidates(model)
    grids = [
        each.grid
        for each in found
        if each.grid is not None
        and (each.reason is None if wanted is None else each.kind in wanted)
    ]
    if not grids:
        reasons = "".join(
            f"\n  {each.name or 'the module itself'}: {each.reason}"
            for each in found
            if each.reason
        )
        raise ValueError(
            f"no attention products found in {type(model).__name__}: expected attention that "
            "rankfold has a rule for, with trainable weights (describe other layouts with "
            "rankfold.register_attention, or rankfold.Factor and rankfold.Grid; adapters of PEFT "
            f"are found by rankfold.lora_grids){reasons}"
        )
    return grids


def attention_candidates(model: nn.Module) -> list[Candidate]:
    """Every attention product in ``model``, taken or not."""
    return without_sharing(model, _all_candidates(model))


def _parse_pairs(pairs: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if pairs is None:
        return None
    wanted = (pairs,) if isinstance(pairs, str) else tuple(pairs)
    unknown = [p for p in wanted if p not in PAIRS]
    if unknown or not wanted:
        raise ValueError(f"pairs must be 'qk', 'vo' or both, got {pairs!r}")
    return wanted


def _all_candidates(model: nn.Module) -> Iterator[Candidate]:
    inside: set[int] = set()  # parts of modules that a rule has read
    for name, module in model.named_modules(remove_duplicate=False):
        rules = rules_for(module)
        fitting = next((rule for rule in rules if rule.fits(module)), None)
        if fitting is not None:
            inside.update(id(x) for x in containers(module, [*_paths(fitting, module)]))
            yield from _layer_candidates(model, name, module, fitting)
        elif rules:
            kind = type(module).__name__
            yield Candidate(
                plain_path(name), "attention", reason=f"the rule of {kind} does not fit it"
            )
        elif id(module) not in inside and _looks_like_attention(module):
            yield Candidate(
                plain_path(name),
                "attention",
                reason=f"no rule for {type(module).__name__}; see rankfold.register_attention",
            )


def _paths(rule: AttentionRule, module: nn.Module) -> set[str]:
    try:
        return rule.paths(module)
    except ValueError:  # without an output; its candidate says so
        return set()


def _layer_candidates(
    model: nn.Module, name: str, module: nn.Module, rule: AttentionRule
) -> Iterator[Candidate]:
    plain = plain_path(name)

    def labelled(kind: str) -> str:
        return f"{plain}.{kind}" if plain else kind

    try:
        factors, groups = rule.factors(module)
        bent = what_bends(model, name, rule)
    except ValueError as error:
        yield Candidate(plain, "attention", reason=str(error))
        return
    for kind, left, right in (("qk", "q", "k"), ("vo", "o", "v")):
        label = labelled(kind)

        def build(left: str = left, right: str = right, label: str = label) -> Grid:
            return Grid(factors[left], factors[right], groups=groups, name=label)

        yield candidate(model, label, kind, build, bent.get(kind))
    for kind, reason in rule.never.items():
        yield Candidate(labelled(kind), kind, reason=reason)


def _looks_like_attention(module: nn.Module) -> bool:
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    return "Attention" in type(module).__name__ and len(linears) > 1
