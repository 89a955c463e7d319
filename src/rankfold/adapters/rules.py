"""AttentionRule: where queries, keys, values and the output lie in a module, declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from ..factors import Factor

# Where modules and configurations commonly say how large a head is, or how many there are.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class Joined:
    """One weight with all heads of one role after all heads of another.

    Args:
        path: the linear, or a parameter laid out like its weight, (out, in).
        order: the roles in it, one letter each: all query heads, then all key heads, ...
        bias: path of the bias, where ``path`` is a parameter.
    """

    path: str
    order: str = "qkv"
    bias: str | None = None

    def __post_init__(self) -> None:
        if not self.order or set(self.order) - set("qkv") or len({*self.order}) < len(self.order):
            raise ValueError(f"order is made of the letters q, k and v, got {self.order!r}")


@dataclass(frozen=True)
class PerHead:
    """One weight in which each head is cut into segments, of which this role has one.

    Args:
        path: the linear.
        sizes: of the segments of a head, in order: numbers, or attributes of the module or its
            configuration.
        index: which segment is meant.
    """

    path: str
    sizes: tuple[str | int, ...]
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < len(self.sizes):
            raise ValueError(f"there is no segment {self.index} of {len(self.sizes)}")


Where: TypeAlias = "str | Joined | PerHead"


@dataclass(frozen=True)
class AttentionRule:
    """How to read the products of one kind of attention module.

    Args:
        query: path of the linear from the module, like ``"q_proj"`` or ``"self.query"``; `Joined`
            or `PerHead` where several roles share a weight.
        key: likewise.
        value: likewise.
        output: path of the linear after attention; of several, the first that is there.
        heads: how many query heads there are, a number or an attribute of the module or its
            configuration. By default the usual names are looked up. The number of key and value
            heads follows from the shapes: query heads are dealt to them in contiguous runs.
        head_dim: the size of a head, in place of ``heads``.
        between: what stands between the factors, by pair: ``{"qk": "rotary embeddings"}`` leaves
            query·key out unless it is asked for. ``{}`` says that nothing does. None looks for
            rotary embeddings, norms, gates and weights of unknown purpose by their names.
        beside: paths of other weights in the module that do not stand between any factors.
        refuse: paths whose presence makes the module unreadable, and why.
        never: other products in the module, and why they are not taken; `inspect` shows these.
    """

    query: Where
    key: Where
    value: Where
    output: str | tuple[str, ...]
    heads: int | str | None = None
    head_dim: int | str | None = None
    between: Mapping[str, str] | None = None
    beside: tuple[str, ...] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.between or ()) - {"qk", "vo"}
        if unknown:
            raise ValueError(f"between is by 'qk' and 'vo', got {sorted(unknown)}")
        for role, where in self.inputs.items():
            if isinstance(where, Joined) and role not in where.order:
                raise ValueError(f"{where} has no {role!r}")

    @property
    def inputs(self) -> dict[str, Where]:
        """Queries, keys and values by their letters."""
        return {"q": self.query, "k": self.key, "v": self.value}

    def fits(self, module: nn.Module) -> bool:
        """Whether all three of queries, keys and values are there."""
        return all(_at(module, _path(where)) is not None for where in self.inputs.values())

    def output_of(self, module: nn.Module) -> str:
        """The path of the output linear."""
        names = (self.output,) if isinstance(self.output, str) else self.output
        for name in names:
            if _at(module, name) is not None:
                return name
        raise ValueError(f"has {self._named()} but no linear {' or '.join(names)}")

    def paths(self, module: nn.Module) -> set[str]:
        """Paths of every weight and bias the rule reads."""
        found = {_path(where) for where in self.inputs.values()} | {self.output_of(module)}
        biases = {w.bias for w in self.inputs.values() if isinstance(w, Joined)}
        return found | {bias for bias in biases if bias is not None}

    def factors(self, module: nn.Module) -> tuple[dict[str, Factor], int]:
        """Factors by the letters q, k, v and o, and the number of groups; ValueError says why not.

        Biases of queries, keys and values are one more row. The output's is outside of the
        product: it is added after it.
        """
        for path, reason in self.refuse.items():
            if _at(module, path) is not None:
                raise ValueError(reason)
        output = _weight(module, self.output_of(module), None, inputs=True)
        weights = {r: _weight(module, _path(w), _bias(w)) for r, w in self.inputs.items()}
        # Queries that share a weight do not tell their own width; the output has as many heads.
        sizes = _Sizes(module, self, weights["q"] if isinstance(self.query, str) else output)
        places = {r: self._place(r, weights[r], output, sizes) for r in weights}
        rank = places["v"].rank
        if output.size % rank:
            raise ValueError(f"head_dim {rank} does not divide the {output.size} of {output.path}")
        places["o"] = _Place(rank, output.size // rank, 0, rank)
        counts = {r: place.blocks for r, place in places.items()}
        heads, groups = counts["q"], counts["k"]
        if counts["v"] != groups or counts["o"] != heads or heads % groups:
            raise ValueError(
                f"{heads} query heads, {groups} key heads, {counts['v']} value heads and "
                f"{counts['o']} output heads do not form groups"
            )
        weights["o"] = output
        return {r: weights[r].factor(place) for r, place in places.items()}, groups

    def _place(self, role: str, weight: _Weight, output: _Weight, sizes: _Sizes) -> _Place:
        where = self.inputs[role]
        if isinstance(where, PerHead):
            segments = [sizes.number(size) for size in where.sizes]
            begin, stride = sum(segments[: where.index]), sum(segments)
            return _Place(segments[where.index], weight.over(stride), begin, stride)
        rank = sizes.head_dim()
        if isinstance(where, str):
            return _Place(rank, weight.over(rank), 0, rank)
        heads = output.over(rank)
        others = len(where.order) - ("q" in where.order)
        left = weight.over(rank) - heads * ("q" in where.order)
        if left < others or left % others:
            raise ValueError(
                f"the {weight.size} of {weight.path} are not {where.order!r} with {heads} query "
                f"heads of {rank}"
            )
        counts = {r: heads if r == "q" else left // others for r in where.order}
        before = sum(counts[r] for r in where.order[: where.order.index(role)])
        return _Place(rank, counts[role], before * rank, rank)

    def _named(self) -> str:
        names = list(dict.fromkeys(_path(where) for where in self.inputs.values()))
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class _Place(NamedTuple):
    """Where the heads of one role lie along the axis of a weight."""

    rank: int
    blocks: int
    start: int
    stride: int


@dataclass(frozen=True)
class _Weight:
    """A weight, the axis along which heads lie, and how long that is."""

    path: str
    param: Tensor
    axis: int
    bias: Tensor | None

    @property
    def size(self) -> int:
        return self.param.shape[self.axis]

    def over(self, size: int) -> int:
        """How many heads of this size there are."""
        if self.size % size:
            raise ValueError(f"head_dim {size} does not divide the {self.size} of {self.path}")
        return self.size // size

    def factor(self, place: _Place) -> Factor:
        rank, blocks, start, stride = place
        return Factor(
            self.param,
            axis=self.axis,
            rank=rank,
            blocks=blocks,
            start=start,
            stride=stride,
            bias=self.bias,
        )


class _Sizes:
    """Sizes as a rule, a module, its parts and their configurations give them."""

    def __init__(self, module: nn.Module, rule: AttentionRule, heads: _Weight) -> None:
        owners: list[Any] = [module, *containers(module, [_path(rule.query)])]
        self._owners = [*owners, *(getattr(owner, "config", None) for owner in owners)]
        self._rule = rule
        self._heads = heads  # a weight with all query heads and nothing else

    def number(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        found = self._look_up((size,))
        if found is None:
            raise ValueError(f"neither the module nor its configuration has a number {size}")
        return found

    def head_dim(self) -> int:
        rule, weight = self._rule, self._heads
        if rule.head_dim is not None:
            return self.number(rule.head_dim)
        if rule.heads is None:
            size = self._look_up(_HEAD_SIZES)
            if size is not None:
                return size
        heads = self._look_up(_HEAD_COUNTS) if rule.heads is None else self.number(rule.heads)
        if heads is None:
            raise ValueError(
                "cannot tell the size of a head; give the module an attribute head_dim or "
                "num_heads, register a rule, or build its grids with rankfold.Grid"
            )
        if weight.size % heads:
            raise ValueError(f"{heads} heads do not divide the {weight.size} of {weight.path}")
        return weight.size // heads

    def _look_up(self, names: Sequence[str]) -> int | None:
        for owner in self._owners:
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None


def containers(module: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The modules below ``module`` through which these paths go."""
    found: dict[int, nn.Module] = {}
    for path in paths:
        steps = path.split(".")
        for k in range(1, len(steps)):
            inner = _at(module, ".".join(steps[:k]))
            if isinstance(inner, nn.Module):
                found[id(inner)] = inner
    return list(found.values())


def qualified_name(kind: type) -> str:
    """The name of a class with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _path(where: Where) -> str:
    return where if isinstance(where, str) else where.path


def _bias(where: Where) -> str | None:
    return where.bias if isinstance(where, Joined) else None


def _at(module: nn.Module, path: str) -> nn.Module | Tensor | None:
    """The module or parameter at a path; properties and plain attributes do not count."""
    found: Any = module
    for step in path.split("."):
        if not isinstance(found, nn.Module):
            return None
        found = found._modules.get(step, found._parameters.get(step))
    return found if isinstance(found, (nn.Module, Tensor)) else None


def _weight(module: nn.Module, path: str, bias: str | None = None, inputs: bool = False) -> _Weight:
    """The weight at a path with heads along its outputs, or its inputs."""
    found = _at(module, path)
    axis = 0
    param: nn.Module | Tensor | None
    offset: Any
    if isinstance(found, nn.Module):
        kind = type(found)
        if qualified_name(kind) == "transformers.pytorch_utils.Conv1D":
            axis = 1
        elif not (isinstance(found, nn.Linear) and kind.forward is nn.Linear.forward):
            raise ValueError(f"{path} is a {qualified_name(kind)}, not a plain linear")
        param, offset = found._parameters.get("weight"), found._parameters.get("bias")
    else:
        param, offset = found, None if bias is None else _at(module, bias)
    if not isinstance(param, Tensor):
        raise ValueError(f"the weight of {path} is computed from other parameters")
    if param.dim() != 2:
        raise ValueError(
            f"the weight of {path} has shape {tuple(param.shape)} and is no matrix: find grids "
            "before a wrapper flattens parameters"
        )
    return _Weight(path, param, 1 - axis if inputs else axis, None if inputs else offset)
