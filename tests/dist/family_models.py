"""Tiny models of every causal family of the installed transformers, their weights random and saved
by the family's own class.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
WINDOW = 64
"""Of families that have one: longer than every document, so that it is full attention."""
MOST_PARAMETERS = 2_000_000
TINY: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "input_embedding_size"),
        64,
    ),
    **dict.fromkeys(
        ("output_embedding_size", "word_embed_proj_dim", "attention_hidden_size", "lru_width"), 64
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "decoder_layers",
            "num_layers",
            "num_decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"),
        4,
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4
    ),
    **dict.fromkeys(
        ("num_heads", "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "qk_head_dim",
            "kv_channels",
            "d_head",
            "dim_head",
            "attention_head_dim",
            "v_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "swa_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_head_dim",
            "global_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 24),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "ffn_hidden_size",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "dff",
            "d_inner",
            "dim_ff",
            "intermediate_size_mlp",
            "feed_forward_size",
            "dense_intermediate_size",
        ),
        96,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "shared_experts_intermediate_size",
        ),
        40,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef"), 0.0),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_length",
            "context_length",
        ),
        256,
    ),
    **dict.fromkeys(
        (
            "dropout",
            "attention_dropout",
            "hidden_dropout",
            "embd_pdrop",
            "resid_pdrop",
            "attn_pdrop",
        ),
        0.0,
    ),
    **dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"),
        0.0,
    ),
    **dict.fromkeys(
        (
            "decoder_layerdrop",
            "encoder_layerdrop",
            "classifier_dropout",
            "resid_dropout",
            "embed_dropout",
        ),
        0.0,
    ),
    **dict.fromkeys(
        ("embedding_dropout", "residual_dropout", "dropout_p", "mlp_dropout", "emb_pdrop"), 0.0
    ),
    **dict.fromkeys(
        ("input_jitter_noise", "router_jitter_noise", "summary_first_dropout", "ffn_dropout"), 0.0
    ),
    "moe_layer_end_index": 1,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "unpadded_vocab_size": VOCABULARY,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "index_n_heads": 2,
}
"""A value for each field of that name; a family without the field does not get it."""
WINDOWS = (
    *(
        "sliding_window",
        "window_size",
        "attention_window_size",
        "local_attention",
        "keep_window_size",
        "sliding_window_size",
    ),
    *("attention_chunk_size", "index_topk", "index_block_size"),
)
"""Fields that say how many tokens a layer attends to."""
_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_MULTIPLIERS = {
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
"""As Granite 3's checkpoints have them, but for attention's, which follows from the head's size."""
_SWITCHED = {"use_sliding_window": True}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT
    ),
    "qwen2": {**_SWITCHED, "max_window_layers": 1},
    "qwen3": {**_SWITCHED, "max_window_layers": 1},
    # without it qwen2_moe's window is 0, and a layer that slides sees nothing
    "qwen2_moe": _SWITCHED,
    "qwen3_moe": _SWITCHED,
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {
        "logit_scale": 0.5,
        "mlp_layer_types": ["dense", "sparse"],
        "prefix_dense_intermediate_size": 80,
    },
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), _MULTIPLIERS
    ),
    "hyperclovax": {**_MULTIPLIERS, "logits_scaling": 0.5},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 2.0},
}
"""Fields of one family that the generic way gets wrong; None leaves a field at its default."""


def families() -> list[str]:
    """Every model type that ``AutoModelForCausalLM`` builds, by name."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, *, window: int = WINDOW) -> PreTrainedConfig:
    """The family's config, every known size of it small; ``window`` tokens wide where the family
    has windows.
    """
    kind = CONFIG_MAPPING[family]
    usual = kind().to_dict()
    known = set(usual) | set(getattr(kind, "attribute_map", {}))
    windows = dict.fromkeys(WINDOWS, window)
    fields = {
        **{name: value for name, value in (TINY | windows).items() if name in known},
        **_layers(usual),
        **OWN.get(family, {}),
    }
    return kind(**{name: value for name, value in fields.items() if value is not None})


def _layers(usual: dict[str, Any]) -> dict[str, Any]:
    """A layer or two of every kind that a family's usual config has."""
    kinds = list(dict.fromkeys(usual.get("layer_types") or ()))
    if kinds == ["full_attention"] and usual.get("sliding_window") is not None:
        kinds.append("sliding_attention")
    if len(kinds) < 2 and kinds in ([], ["full_attention"]):
        return {}
    return {
        "layer_types": kinds * (2 // len(kinds)) or kinds,
        "num_hidden_layers": max(2, len(kinds)),
    }


def save_tiny(family: str, folder: Path, *, window: int = WINDOW) -> None:
    """A tiny model of the family, in a directory of its name: weights in float32, their layout the
    family's own.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            parameters = sum(
                p.numel()
                for p in AutoModelForCausalLM.from_config(
                    tiny_config(family, window=window)
                ).parameters()
            )
        if parameters > MOST_PARAMETERS:
            raise ValueError(f"{parameters:,} parameters are not tiny")
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, window=window), dtype=torch.float32
        )
        randomise(model)
        model.save_pretrained(folder / family)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Values that tell every parameter from a constant: matrices keep the size of what they
    multiply, the rest moves a little.

    What a checkpoint saves of buffers moves too, where it is not a whole number.
    """
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer) * 0.2)


def read(folder: Path, family: str) -> dict[str, Any]:
    """The ``config.json`` that was saved."""
    return json.loads((folder / family / "config.json").read_text())
