"""Small models of real classes, and an output of each to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.speecht5 import modeling_speecht5

from .layout_cases import TOKENS, VOCABULARY, randn

SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 12,
}
GROUPED: dict[str, Any] = {**SIZES, **VOCABULARY, "num_key_value_heads": 2}
SINGLE: dict[str, Any] = {**SIZES, **VOCABULARY, "num_key_value_heads": 1, "head_dim": 8}
LATENT: dict[str, Any] = {
    **SIZES,
    **VOCABULARY,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,  # no experts, whose choice is not continuous
}
GPT2: dict[str, Any] = {**VOCABULARY, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 8}
T5: dict[str, Any] = {
    "vocab_size": 10,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 4,
    "relative_attention_max_distance": 5,
}


@dataclass(frozen=True)
class Family:
    """A model, and which of its pairs are not products alone, with a word of the reason."""

    build: Callable[[], Any]
    bent: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> list[str]:
        """The pairs that are."""
        return [pair for pair in ("qk", "vo") if pair not in self.bent]


def transformer(kind: str, sizes: dict[str, Any], **options: Any) -> Callable[[], Any]:
    """Builds a model of this class of transformers."""

    def build() -> Any:
        model: Any = getattr(transformers, kind)
        return model(model.config_class(**sizes, **options))

    return build


def speech_encoder() -> Any:
    """SpeechT5's, on tokens."""
    kind: Any = modeling_speecht5.SpeechT5EncoderWithTextPrenet
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 12}
    positions = {"encoder_max_relative_position": 4}
    return kind(kind.config_class(vocab_size=10, hidden_size=16, **sizes, **positions))


def encoder() -> nn.Module:
    """torch's own."""
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TURNED = {"qk": "rotary embeddings between"}
PARTLY = {"qk": "rotary embeddings on 50% of each head"}
HALF = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}

FAMILIES: dict[str, Family] = {
    "multihead": Family(lambda: nn.MultiheadAttention(12, 3, batch_first=True)),
    "encoder": Family(encoder),
    "llama": Family(transformer("LlamaForCausalLM", GROUPED, attention_bias=True), TURNED),
    "mistral": Family(transformer("MistralForCausalLM", GROUPED, head_dim=6), TURNED),
    "qwen2": Family(transformer("Qwen2ForCausalLM", GROUPED), TURNED),
    "qwen3": Family(
        transformer("Qwen3ForCausalLM", GROUPED, head_dim=4), {"qk": "rotary.*q_norm.*k_norm"}
    ),
    "gemma": Family(transformer("GemmaForCausalLM", SINGLE), TURNED),
    "gemma2": Family(transformer("Gemma2ForCausalLM", SINGLE), TURNED),
    "gemma3": Family(transformer("Gemma3ForCausalLM", SINGLE), {"qk": "rotary.*q_norm"}),
    "phi": Family(transformer("PhiForCausalLM", {**SIZES, **VOCABULARY}, **HALF), PARTLY),
    "phi-norm": Family(
        transformer("PhiForCausalLM", {**SIZES, **VOCABULARY}, **HALF, qk_layernorm=True),
        {"qk": "rotary.*qk_layernorm.*q_layernorm"},
    ),
    "phi3": Family(transformer("Phi3ForCausalLM", GROUPED, pad_token_id=0), TURNED),
    "gpt2": Family(transformer("GPT2LMHeadModel", GPT2)),
    "gpt2-cross": Family(transformer("GPT2LMHeadModel", GPT2, add_cross_attention=True)),
    "gpt-neox": Family(transformer("GPTNeoXForCausalLM", {**SIZES, **VOCABULARY}, **HALF), PARTLY),
    "gpt-oss": Family(
        transformer("GptOssForCausalLM", GROUPED, head_dim=4, num_local_experts=1,
                    num_experts_per_tok=1, pad_token_id=0, experts_implementation="eager"), TURNED
    ),
    "bloom": Family(
        transformer("BloomForCausalLM", VOCABULARY, hidden_size=12, n_layer=2, n_head=3)
    ),
    "opt": Family(
        transformer("OPTForCausalLM", {**SIZES, **VOCABULARY}, ffn_dim=12, word_embed_proj_dim=16)
    ),
    "bert": Family(transformer("BertModel", SIZES)),
    "albert": Family(transformer("AlbertModel", SIZES, embedding_size=8)),
    "distilbert": Family(
        transformer("DistilBertModel", {"vocab_size": 10}, dim=12, n_layers=2, n_heads=3,
                    hidden_dim=12)
    ),
    "roformer": Family(transformer("RoFormerModel", SIZES), TURNED),
    "roformer-values": Family(
        transformer("RoFormerModel", SIZES, rotary_value=True),
        {"qk": "rotary", "vo": "rotary embeddings on values"},
    ),
    "yoso": Family(
        transformer("YosoModel", SIZES, use_expectation=True, hash_code_len=3),
        {"qk": "calls normalize", "vo": "calls normalize"},
    ),
    "vit": Family(
        transformer("ViTModel", {k: v for k, v in SIZES.items() if k != "vocab_size"},
                    image_size=8, patch_size=4)
    ),
    "speecht5": Family(speech_encoder, {"qk": "relative positions"}),
    "t5": Family(transformer("T5Model", T5)),
    "deepseek-v2": Family(transformer("DeepseekV2ForCausalLM", LATENT, q_lora_rank=6)),
    "deepseek-v2-lite": Family(transformer("DeepseekV2ForCausalLM", LATENT, q_lora_rank=None)),
    "deepseek-v3": Family(transformer("DeepseekV3ForCausalLM", LATENT, q_lora_rank=6)),
    "bitnet": Family(
        transformer("BitNetForCausalLM", GROUPED),
        {"qk": "rotary", "vo": r"attn_sub_norm .* values and output"},
    ),
}  # fmt: skip


def output_of(model: Any) -> Callable[[], Tensor]:
    """The model's output on a fixed input."""
    if isinstance(model, nn.MultiheadAttention):
        q, k, v = (randn(2, 5, model.embed_dim, seed=s) for s in range(3))
        return lambda: model(q, k, v)[0]
    if isinstance(model, nn.TransformerEncoder):
        return lambda: model(randn(2, 5, 12))
    inputs: dict[str, Tensor] = {"input_ids": TOKENS}
    if model.main_input_name == "input_values":
        inputs = {"input_values": TOKENS}
    elif model.main_input_name == "pixel_values":
        inputs = {"pixel_values": randn(2, 3, 8, 8)}
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS.flip(1)
    if getattr(model.config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = randn(2, 5, model.config.hidden_size)
    return lambda: model(**inputs)[0]
