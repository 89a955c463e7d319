"""Models small enough to train whole, with all that an optimizer for everything must sort out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

VOCABULARY, WIDTH, HEADS = 11, 12, 3


class Language(nn.Module):
    """Two attention layers between an embedding and an output layer, which may be tied.

    The loss at step ``s`` is of tokens drawn for that step, so that a run which lost its place or
    its state ends somewhere else.
    """

    def __init__(self, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            layers = [
                nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
                for _ in range(2)
            ]
            self.layers = nn.ModuleList(layers)
            self.norm = nn.LayerNorm(WIDTH)
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> logits (batch, length, vocabulary)."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def batch(step: int) -> Tensor:
    """Tokens (4, 6) of this step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (4, 6), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """How well the model turns the tokens of this step around."""
    tokens = batch(step)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flip(1).flatten())


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Take these steps, by number."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def causal(config: Any) -> Any:
    """A model of transformers with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def llama(**options: Any) -> Any:
    """Grouped-query attention with rotary embeddings."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return causal(LlamaConfig(**{**sizes, **options}))


def opt() -> Any:
    """Biases everywhere, learned positions, output layer tied to the embedding."""
    return causal(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            word_embed_proj_dim=12,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=16,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def half_frozen() -> Language:
    """The first layer, and the embedding, are not trained."""
    model = Language()
    model.layers[0].requires_grad_(False)
    model.tokens.requires_grad_(False)
    return model


def nested() -> nn.Module:
    """Self-attention and cross-attention, convolutions, and a matrix that is in no module."""
    model = nn.Module()
    model.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 16)
    model.stem = nn.Conv1d(3, WIDTH, 3)
    model.scale = nn.Parameter(torch.ones(()))
    model.pos_embedding = nn.Parameter(torch.randn(7, WIDTH))
    model.mixing = nn.Parameter(torch.randn(5, WIDTH))
    return model


def adapted() -> Any:
    """LoRA on queries and values, with everything but the adapters frozen."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(llama(), config)


def compiled() -> Any:
    """Names of its parameters begin with ``_orig_mod.``."""
    return torch.compile(Language(), backend="eager")


ZOO: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "tied": lambda: Language(tied=True),
    "half frozen": half_frozen,
    "compiled": compiled,
    "data parallel": lambda: nn.DataParallel(Language()),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 16), 2, enable_nested_tensor=False
    ),
    "nested": nested,
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "opt": opt,
}
