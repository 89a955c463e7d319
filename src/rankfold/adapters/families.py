"""The table: rules for the attention of torch.nn and transformers, and those users register."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .rules import AttentionRule, Joined, PerHead, qualified_name

_MULTIHEAD_BIAS = (
    "add_bias_kv appends a learned key and value that are not in the products; build its grids by "
    "hand with rankfold.Grid"
)
_SPLIT_BIAS = (
    "kdim or vdim with a bias keeps separate weights and one fused bias, which a factor cannot "
    "read; use bias=False"
)

_IN_PROJ = Joined("in_proj_weight", bias="in_proj_bias")
_MULTIHEAD = (
    AttentionRule(_IN_PROJ, _IN_PROJ, _IN_PROJ, "out_proj", refuse={"bias_k": _MULTIHEAD_BIAS}),
    AttentionRule(
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "out_proj",
        refuse={"bias_k": _MULTIHEAD_BIAS, "in_proj_bias": _SPLIT_BIAS},
    ),
)

_C_ATTN, _C_ATTN_CROSS = Joined("c_attn"), Joined("c_attn", "kv")
_GPT2 = (
    AttentionRule("q_attn", _C_ATTN_CROSS, _C_ATTN_CROSS, "c_proj"),
    AttentionRule(_C_ATTN, _C_ATTN, _C_ATTN, "c_proj"),
)

_QKV = Joined("qkv_proj")
_PHI3 = (AttentionRule(_QKV, _QKV, _QKV, "o_proj"),)


def _interleaved(size: str) -> tuple[AttentionRule, ...]:
    q, k, v = (PerHead("query_key_value", (size,) * 3, index) for index in range(3))
    return (AttentionRule(q, k, v, "dense"),)


def _latent(query: str, **never: str) -> AttentionRule:
    """DeepSeek's attention, less the segments that are rotated.

    Queries and keys have a segment without positions, "nope", whose scores are a product of the
    last linear of each; so are values with the output. Latents are normalized before that.
    """
    return AttentionRule(
        PerHead(query, ("qk_nope_head_dim", "qk_rope_head_dim")),
        PerHead("kv_b_proj", ("qk_nope_head_dim", "v_head_dim"), 0),
        PerHead("kv_b_proj", ("qk_nope_head_dim", "v_head_dim"), 1),
        "o_proj",
        between={},
        never={
            **never,
            "kv_a·kv_b": "kv_a_layernorm stands between the factors",
            "q_rope·k_rope": "rotary embeddings turn this part of queries and keys",
        },
    )


_LATENT = (
    _latent("q_b_proj", **{"q_a·q_b": "q_a_layernorm stands between the factors"}),
    _latent("q_proj"),
)

_ALBERT = (AttentionRule("query", "key", "value", "dense", beside=("LayerNorm",)),)

_SPEECHT5 = (
    AttentionRule(
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
        between={"qk": "queries are multiplied with embeddings of relative positions, too"},
    ),
)


def _transformers(family: str, kind: str) -> str:
    return f"transformers.models.{family}.modeling_{family}.{kind}"


# Fused weights do not tell by their shape how heads lie in them, so they go by class.
_BY_CLASS: dict[str, tuple[AttentionRule, ...]] = {
    qualified_name(nn.MultiheadAttention): _MULTIHEAD,
    _transformers("albert", "AlbertAttention"): _ALBERT,
    _transformers("bloom", "BloomAttention"): _interleaved("head_dim"),
    _transformers("deepseek_v2", "DeepseekV2Attention"): _LATENT,
    _transformers("deepseek_v3", "DeepseekV3Attention"): _LATENT,
    _transformers("glm4_moe_lite", "Glm4MoeLiteAttention"): _LATENT,
    _transformers("gpt2", "GPT2Attention"): _GPT2,
    _transformers("gpt_neox", "GPTNeoXAttention"): _interleaved("head_size"),
    _transformers("phi3", "Phi3Attention"): _PHI3,
    _transformers("speecht5", "SpeechT5Attention"): _SPEECHT5,
}

# Separate linears can only be read one way; what stands between them is told by names.
_BY_NAMES: tuple[AttentionRule, ...] = (
    # Llama, Mistral, Qwen, Gemma, OPT, ViT and some three hundred more; dense is Phi's.
    AttentionRule("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj", "dense")),
    # T5 and its kin.
    AttentionRule("q", "k", "v", "o"),
    # DistilBERT.
    AttentionRule("q_lin", "k_lin", "v_lin", "out_lin"),
    # BERT and its kin, whose LayerNorm comes after the output and the residual.
    AttentionRule(
        "self.query", "self.key", "self.value", "output.dense", beside=("output.LayerNorm",)
    ),
)


def register_attention(
    kind: type[nn.Module] | str, rule: AttentionRule | Sequence[AttentionRule]
) -> None:
    """Teach `attention_grids` and `inspect` a class of attention modules.

    Args:
        kind: the class, subclasses included, or its name with that of its module, as in
            ``"package.module.Class"``.
        rule: how to read it; of several, the first whose queries, keys and values are there.

    A class that is known already is read by the new rule from here on.
    """
    name = kind if isinstance(kind, str) else qualified_name(kind)
    _BY_CLASS[name] = (rule,) if isinstance(rule, AttentionRule) else tuple(rule)


def rules_for(module: nn.Module) -> tuple[AttentionRule, ...]:
    """The rules of the module's class or the nearest of its bases, or what its linears' names fit.

    Empty if the module is no attention that is known.
    """
    for kind in type(module).__mro__:
        if qualified_name(kind) in _BY_CLASS:
            return _BY_CLASS[qualified_name(kind)]
    return tuple(rule for rule in _BY_NAMES if rule.fits(module))[:1]
