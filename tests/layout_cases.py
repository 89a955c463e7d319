"""Modules whose factors lie in every layout, and by hand the slices these modules multiply."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

from rankfold import Factor, Grid

from .gauge import Block, Member, deal

HEADS, RANK = 3, 4
WIDTH = HEADS * RANK
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
VOCABULARY: dict[str, Any] = {"vocab_size": 10, "bos_token_id": None, "eos_token_id": None}

Of = Callable[[Tensor], Tensor]  # a parameter -> itself, its gradient, its momentum, ...


@dataclass
class Case:
    """A module, its output, its grids, and the members of each grid by hand."""

    module: Any
    output: Callable[[], Tensor]
    grids: list[Grid]
    members: Callable[[Of], list[list[Member]]]

    def params(self) -> list[nn.Parameter]:
        """Every parameter that is trained, in a grid or not."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def backward(self) -> None:
        """Gradients of a smooth loss."""
        self.module.zero_grad()
        torch.autograd.backward(self.output().sin().sum())


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def randomized(module: Any) -> Any:
    """In float64, with every parameter (biases and LoRA's B, too) well away from zero."""
    module.double()
    for k, param in enumerate(module.parameters()):
        param.data.copy_(randn(*param.shape, seed=k + 1) / 2)
    return module.eval()


def causal_lm(config: Any) -> Any:
    """The model of a transformers configuration, with random weights."""
    models: Any = AutoModelForCausalLM
    return models.from_config(config)


def rows(weight: Tensor, bias: Tensor | None, begin: int, of: Of) -> Block:
    """Output features of an nn.Linear, or input features of a Conv1D, as columns of a factor."""
    here = slice(begin, begin + RANK)
    return [of(weight)[here].T] + ([] if bias is None else [of(bias)[here][None]])


def columns(weight: Tensor, bias: Tensor | None, begin: int, of: Of) -> Block:
    """Output features of a Conv1D, or input features of an nn.Linear, as columns of a factor."""
    here = slice(begin, begin + RANK)
    return [of(weight)[:, here]] + ([] if bias is None else [of(bias)[here][None]])


# Separate linears, with or without grouped queries -----------------------------------------------


class GroupedAttention(nn.Module):
    """Grouped-query attention on linears, with torch's own idea of which head is in which group."""

    def __init__(self, heads: int, groups: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * RANK, bias) for n in (heads, groups, groups))
        self.o = nn.Linear(heads * RANK, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, RANK)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        attended: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        # The softmax hides the bias of the keys, so the scores are part of the output.
        scores = q @ k.repeat_interleave(self.heads // self.groups, 1).mT
        return torch.cat([attended.flatten(), scores.flatten()])


def linears(heads: int, groups: int, bias: bool) -> Case:
    """The table's nn.Linear q, k and v, o."""
    module = randomized(GroupedAttention(heads, groups, bias))
    q, k, v, o = (getattr(module, name) for name in "qkvo")
    x = randn(2, 5, WIDTH)

    def members(of: Of) -> list[list[Member]]:
        queries = [rows(q.weight, q.bias, h * RANK, of) for h in range(heads)]
        keys = [rows(k.weight, k.bias, g * RANK, of) for g in range(groups)]
        values = [rows(v.weight, v.bias, g * RANK, of) for g in range(groups)]
        outputs = [columns(o.weight, None, h * RANK, of) for h in range(heads)]
        return [deal(queries, keys, groups), deal(outputs, values, groups)]

    factor_q = Factor(q.weight, axis=0, blocks=heads, bias=q.bias)
    factor_k = Factor(k.weight, axis=0, blocks=groups, bias=k.bias)
    factor_v = Factor(v.weight, axis=0, blocks=groups, bias=v.bias)
    factor_o = Factor(o.weight, axis=1, blocks=heads)
    grids = [Grid(factor_q, factor_k, groups=groups), Grid(factor_o, factor_v, groups=groups)]
    return Case(module, lambda: module(x), grids, members)


# One fused weight of queries, keys and values ----------------------------------------------------


def one_head_a_member(qkv: Callable[[int, int], Block], out: Callable[[int], Block]) -> Any:
    """Members of query·key and output·value, from the block of part p (q, k, v) and head h."""
    heads = range(HEADS)
    return (
        [Member([qkv(0, h)], [qkv(1, h)]) for h in heads],
        [Member([out(h)], [qkv(2, h)]) for h in heads],
    )


def multihead(bias: bool) -> Case:
    """The table's nn.MultiheadAttention in_proj."""
    module = randomized(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    w, b, o = module.in_proj_weight, module.in_proj_bias, module.out_proj.weight
    x = randn(2, 5, WIDTH)
    q, k, v = (
        Factor(w, axis=0, rank=RANK, blocks=HEADS, start=p * WIDTH, bias=b) for p in range(3)
    )

    def members(of: Of) -> list[list[Member]]:
        qk, vo = one_head_a_member(
            lambda p, h: rows(w, b, p * WIDTH + h * RANK, of),
            lambda h: columns(o, None, h * RANK, of),
        )
        return [qk, vo]

    def output() -> Tensor:
        mixed, attention = module(x, x, x, average_attn_weights=False)
        return torch.cat([mixed.flatten(), attention.flatten()])

    grids = [Grid(q, k, groups=HEADS), Grid(Factor(o, axis=1, blocks=HEADS), v, groups=HEADS)]
    return Case(module, output, grids, members)


def gpt2() -> Case:
    """The table's GPT-2 Conv1D, whose weights are (in, out)."""
    config = GPT2Config(n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS, **VOCABULARY)
    module = randomized(causal_lm(config))
    layers = [
        (block.attn.c_attn.weight, block.attn.c_attn.bias, block.attn.c_proj.weight)
        for block in module.transformer.h
    ]
    grids = []
    for w, b, o in layers:
        q, k, v = (
            Factor(w, axis=1, rank=RANK, blocks=HEADS, start=p * WIDTH, bias=b) for p in range(3)
        )
        grids.append(Grid(q, k, groups=HEADS))
        grids.append(Grid(Factor(o, axis=0, blocks=HEADS), v, groups=HEADS))

    def members(of: Of) -> list[list[Member]]:
        found: list[list[Member]] = []
        for w, b, o in layers:
            found += one_head_a_member(
                lambda p, h, w=w, b=b: columns(w, b, p * WIDTH + h * RANK, of),  # type: ignore[misc]
                lambda h, o=o: rows(o, None, h * RANK, of),  # type: ignore[misc]
            )
        return found

    return Case(module, lambda: module(TOKENS).logits, grids, members)


def gpt_neox() -> Case:
    """The table's GPT-NeoX, q/k/v interleaved per head.

    Without rotary embeddings (rotary_pct=0): they would stand between queries and keys, and the
    scores would not be a function of the products.
    """
    options = {"rotary_pct": 0.0, "intermediate_size": 16, **VOCABULARY}
    config = GPTNeoXConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, **options
    )
    module = randomized(causal_lm(config))
    layer = module.gpt_neox.layers[0].attention
    w, b, o = layer.query_key_value.weight, layer.query_key_value.bias, layer.dense.weight
    q, k, v = (
        Factor(w, axis=0, rank=RANK, blocks=HEADS, start=p * RANK, stride=3 * RANK, bias=b)
        for p in range(3)
    )

    def members(of: Of) -> list[list[Member]]:
        qk, vo = one_head_a_member(
            lambda p, h: rows(w, b, (3 * h + p) * RANK, of),
            lambda h: columns(o, None, h * RANK, of),
        )
        return [qk, vo]

    grids = [Grid(q, k, groups=HEADS), Grid(Factor(o, axis=1, blocks=HEADS), v, groups=HEADS)]
    return Case(module, lambda: module(TOKENS).logits, grids, members)


# Pairs of whole matrices, stacks and lists -------------------------------------------------------


def lora() -> Case:
    """The table's LoRA B, A."""
    base = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    module = randomized(peft.LoraModel(base, config, "default"))
    layers = [module.model[k] for k in (0, 2)]
    pairs = [(x.lora_B["default"].weight, x.lora_A["default"].weight) for x in layers]
    inputs = randn(4, 7)
    return Case(
        module,
        lambda: module(inputs),
        [Grid(b, Factor(a, axis=0)) for b, a in pairs],
        lambda of: [[Member([[of(b)]], [[of(a).T]])] for b, a in pairs],
    )


class Experts(nn.Module):
    """Two by three low-rank experts with two output heads each, and three plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(2, 3, RANK, 5))
        self.up = nn.Parameter(torch.empty(2, 3, 7, 2 * RANK))
        self.a = nn.Parameter(torch.empty(3, 6, 2))
        self.b = nn.Parameter(torch.empty(3, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.einsum("efrn,n->efr", self.down, x[:5])
        outer = torch.einsum("efmhr,efr->efhm", self.up.view(2, 3, 7, 2, RANK), inner)
        return torch.cat([outer.flatten(), (self.a @ (self.b.mT @ x[:, None])).flatten()])


def experts() -> Case:
    """Three- and four-dimensional parameters: leading dimensions are further blocks."""
    module = randomized(Experts())
    down, up, a, b = module.down, module.up, module.a, module.b
    x = randn(8)

    def members(of: Of) -> list[list[Member]]:
        experts = [
            Member([[of(up)[e, f, :, :RANK]], [of(up)[e, f, :, RANK:]]], [[of(down)[e, f].T]])
            for e, f in itertools.product(range(2), range(3))
        ]
        return [experts, [Member([[of(a)[e]]], [[of(b)[e]]]) for e in range(3)]]

    grids = [Grid(Factor(up, blocks=2), Factor(down, axis=2), groups=6), Grid(a, b, groups=3)]
    return Case(module, lambda: module(x), grids, members)


def ragged() -> Case:
    """Lists of factors of different heights: two members of 2×3 plain or sliced matrices."""
    module: Any = nn.Module()
    module.left = nn.ParameterList([torch.empty(m, 3) for m in (6, 4, 5, 4)])
    module.right = nn.ParameterList([torch.empty(n, 3) for n in (5, 3, 4, 3, 7, 4)])
    module.left[1] = nn.Parameter(torch.empty(5, 4))  # rows 1 to 3, transposed
    module.right[4] = nn.Parameter(torch.empty(3, 7).T)  # not contiguous
    randomized(module)
    lefts: list[Factor | Tensor] = list(module.left)
    lefts[1] = Factor(module.left[1], axis=0, start=1, rank=3)

    def members(of: Of) -> list[list[Member]]:
        left = [[of(p)] for p in module.left]
        left[1] = [of(module.left[1])[1:4].T]
        return [deal(left, [[of(p)] for p in module.right], 2)]

    def output() -> Tensor:
        pairs = members(lambda p: p)[0]
        return torch.cat([(a @ b.T).flatten() for x, y in pairs for (a,) in x for (b,) in y])

    return Case(module, output, [Grid(lefts, list(module.right), groups=2)], members)


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: linears(3, 3, False),
    "linear-bias": lambda: linears(3, 3, True),
    "linear-grouped": lambda: linears(4, 2, False),
    "linear-grouped-bias": lambda: linears(4, 2, True),
    "multihead": lambda: multihead(False),
    "multihead-bias": lambda: multihead(True),
    "gpt2": gpt2,
    "gpt-neox": gpt_neox,
    "lora": lora,
    "experts": experts,
    "ragged": ragged,
}
