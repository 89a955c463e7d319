"""The paper's decoder-only language model, with the options of later models to study."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ..factors import Factor, Grid
from ..orthonormal import orthonormalize_

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Given, and not left to torch, which ties it to the input's type: the mean square of a fresh
# embedding is only 1/(3·vocabulary), so a larger epsilon would keep it from being normalized.
_NORM_EPSILON = 2.0**-23
_ROPE_BASE = 10000.0
_NO_TARGET = -100
_ALIGNED = 64


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a `Decoder`; the defaults are the paper's MHA model.

    Args:
        layers: attention and feed-forward blocks, one of each a layer.
        heads: query heads of a layer.
        kv_heads: key and value heads of a layer; 1 is the paper's GQA model.
        width: of the residual stream.
        head_width: of one head; ``heads * head_width`` need not be the width.
        feedforward: width inside a feed-forward block.
        rope: rotary positions on queries and keys.
        qk_norm: RMS norm of each head's queries and keys.
        biases: on query, key, value, output and feed-forward maps.
        final_norm: RMS norm before the unembedding.
        learned_norms: give every norm a learned scale.
        weights: type of parameters and arithmetic, ``"bfloat16"`` or ``"float32"``.
    """

    layers: int = 6
    heads: int = 8
    kv_heads: int = 8
    width: int = 512
    head_width: int = 64
    feedforward: int = 2048
    rope: bool = False
    qk_norm: bool = False
    biases: bool = False
    final_norm: bool = False
    learned_norms: bool = False
    weights: str = "bfloat16"

    def __post_init__(self) -> None:
        for size in ("layers", "heads", "kv_heads", "width", "head_width", "feedforward"):
            if getattr(self, size) < 1:
                raise ValueError(f"{size} must be at least 1, got {getattr(self, size)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got kv_heads={self.kv_heads}, heads={self.heads}"
            )
        if self.head_width > self.width:
            raise ValueError(
                "head_width must be at most width, or the products of a head cannot have that "
                f"rank, got head_width={self.head_width}, width={self.width}"
            )
        if self.rope and self.head_width % 2:
            raise ValueError(f"rope needs an even head_width, got {self.head_width}")
        if self.weights not in _DTYPES:
            raise ValueError(f"weights must be one of {', '.join(_DTYPES)}, got {self.weights!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The type that ``weights`` names."""
        return _DTYPES[self.weights]


_TINY = ModelConfig(
    layers=2,
    heads=4,
    kv_heads=4,
    width=64,
    head_width=16,
    feedforward=256,
    final_norm=True,
    weights="float32",
)

MODEL_PRESETS = {
    "paper-mha": ModelConfig(),
    "paper-gqa": ModelConfig(kv_heads=1),
    "tiny": _TINY,
    "tiny-gqa": replace(_TINY, kv_heads=1),
    "small": replace(_TINY, layers=4, width=256, head_width=64, feedforward=1024),
}


class Attention(nn.Module):
    """Causal attention with query heads in groups, one group a key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, bias = config.width, config.biases
        inner, shared = (n * config.head_width for n in (config.heads, config.kv_heads))
        self.q = nn.Linear(width, inner, bias=bias)
        self.k = nn.Linear(width, shared, bias=bias)
        self.v = nn.Linear(width, shared, bias=bias)
        self.o = nn.Linear(inner, width, bias=bias)
        self.q_norm = _norm(config, config.head_width, wanted=config.qk_norm)
        self.k_norm = _norm(config, config.head_width, wanted=config.qk_norm)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rope:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def grids(self, name: str) -> list[Grid]:
        """The query·key and value·output grids, ``name.qk`` and ``name.vo``."""
        heads, groups = self.config.heads, self.config.kv_heads
        q = Factor(self.q.weight, axis=0, blocks=heads, bias=self.q.bias)
        k = Factor(self.k.weight, axis=0, blocks=groups, bias=self.k.bias)
        v = Factor(self.v.weight, axis=0, blocks=groups, bias=self.v.bias)
        o = Factor(self.o.weight, axis=1, blocks=heads)
        return [
            Grid(q, k, groups=groups, name=f"{name}.qk"),
            Grid(o, v, groups=groups, name=f"{name}.vo"),
        ]


class Layer(nn.Module):
    """An attention block and a feed-forward block, each with a norm before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config, config.width)
        self.attention = Attention(config)
        self.feedforward_norm = _norm(config, config.width)
        self.up = nn.Linear(config.width, config.feedforward, bias=config.biases)
        self.down = nn.Linear(config.feedforward, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        inner = F.relu(self.up(self.feedforward_norm(x))).square()
        out: Tensor = x + self.down(inner)
        return out


class Decoder(nn.Module):
    """The paper's model: squared ReLU, RMS norms on block inputs, untied embeddings.

    Every matrix starts uniform in ±1/√(dimension of its domain) and every bias at zero; the
    factors of query, key, value and output are then made orthonormal. All of this happens in
    float32 on the CPU, so a seed gives the same weights on every device and, but for rounding, in
    every type.

    Args:
        config: sizes and options.
        vocabulary: number of tokens.
        seed: of the initial weights; the global random state is left alone.
        device: where the parameters go; the CPU by default.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if vocabulary < 1:
            raise ValueError(f"vocabulary must be at least 1, got {vocabulary}")
        self.config = config
        with torch.device("meta"):  # torch's own initialization would draw from the global state
            self.embedding = nn.Embedding(vocabulary, config.width)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.final_norm = _norm(config, config.width, wanted=config.final_norm)
            self.unembedding = nn.Linear(config.width, vocabulary, bias=False)
        self.to_empty(device="cpu")
        self._initialize(torch.Generator("cpu").manual_seed(seed))
        self.to(device=device, dtype=config.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each next token: (batch, tokens) int64 to a float32 scalar.

        The prediction for the token past the end of a sample is ignored.
        """
        if tokens.shape[1] < 2:
            raise ValueError(
                f"give samples of 2 or more tokens, got {tokens.shape[1]}: the first is given, "
                "not predicted"
            )
        # Marked, and not cut off, which would copy the logits: the largest tensor of a step.
        targets = F.pad(tokens[:, 1:], (0, 1), value=_NO_TARGET)
        x = self._unread(tokens)
        # Not compiled, the wider logits would be copied once more.
        wider = x.is_cuda and torch.compiler.is_compiling()
        predicted = aligned_logits(x, self.unembedding.weight) if wider else self.unembedding(x)
        predicted = predicted.flatten(0, 1).float()
        return F.cross_entropy(predicted, targets.flatten(), ignore_index=_NO_TARGET)

    def logits(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) int64 to (batch, tokens, vocabulary), in the type of the weights."""
        out: Tensor = self.unembedding(self._unread(tokens))
        return out

    def _unread(self, tokens: Tensor) -> Tensor:
        """What the unembedding reads, (batch, tokens, width)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.final_norm(x)
        return out

    def grids(self) -> list[Grid]:
        """The grids of all layers: ``layer0.qk``, ``layer0.vo``, ``layer1.qk`` and so on.

        Biases of query, key and value are one more row of their factors; the output's bias is no
        part of a product. ``rope`` and ``qk_norm`` stand between queries and keys, so that with
        them the loss does not depend on the query·key products alone. Those grids are returned
        all the same, to study what an optimizer that assumes so makes of them.
        """
        attentions = [m for m in self.modules() if isinstance(m, Attention)]
        return [grid for i, m in enumerate(attentions) for grid in m.grids(f"layer{i}")]

    def attention_parameters(self) -> list[nn.Parameter]:
        """Every parameter that `grids` covers."""
        covered = self._covered()
        return [p for p in self.parameters() if id(p) in covered]

    def other_parameters(self) -> list[nn.Parameter]:
        """Every parameter that `grids` does not cover."""
        covered = self._covered()
        return [p for p in self.parameters() if id(p) not in covered]

    def _covered(self) -> set[int]:
        return {id(p) for grid in self.grids() for p in grid.params()}

    def _initialize(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                _draw(module.weight, module.num_embeddings, generator)
            elif isinstance(module, nn.Linear):
                _draw(module.weight, module.in_features, generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        with warnings.catch_warnings():  # of changing a trained model, which this is not
            warnings.filterwarnings("ignore", message="orthonormalize_ set all singular values")
            orthonormalize_(self.grids())


def aligned_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits (..., width) to (..., vocabulary or more), with -inf in each column that is added.

    Their rows begin at multiples of 64 numbers, which a GPU multiplies and reads faster. What is
    added has neither probability nor gradient.
    """
    vocabulary = len(weight)
    logits = F.linear(x, F.pad(weight, (0, 0, 0, -vocabulary % _ALIGNED)))
    added = torch.arange(logits.shape[-1], device=x.device) >= vocabulary
    return logits.masked_fill(added, float("-inf"))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, tokens, head_width), which must be even.

    Coordinates i and i + head_width/2 are turned together, by an angle that grows with the token's
    position, so that the product of two rotated vectors depends on the distance of their tokens.
    """
    tokens, half = x.shape[-2], x.shape[-1] // 2
    frequencies = _ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(tokens, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _norm(config: ModelConfig, width: int, *, wanted: bool = True) -> nn.Module:
    if not wanted:
        return nn.Identity()
    return nn.RMSNorm(width, eps=_NORM_EPSILON, elementwise_affine=config.learned_norms)


def _draw(weight: Tensor, domain: int, generator: torch.Generator) -> None:
    bound = domain**-0.5
    nn.init.uniform_(weight, -bound, bound, generator=generator)
