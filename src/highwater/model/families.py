"""Families: what transformers' config classes take for a field that ``config.json`` leaves out.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23;
tests/unit/test_families.py compares with those that are installed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {
        "head_dim": 128,
        "intermediate_size": 6144,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
    },
    "apertus": {
        "intermediate_size": 14336,
        "rope_theta": 12e6,
        "rope_parameters": {**_LLAMA3, "factor": 8.0, "rope_theta": 12e6},
    },
    "arcee": {"intermediate_size": 18432},
    "aria_text": {"intermediate_size": 4096},
    "bitnet": {"num_key_value_heads": 5, "intermediate_size": 6912, "rope_theta": 5e5},
    "cohere": {"intermediate_size": 22528, "tie_word_embeddings": True, "rope_theta": 5e5},
    "cohere2": {
        "intermediate_size": 22528,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "cohere2_moe": {
        "head_dim": 128,
        "intermediate_size": 22528,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "prefix_dense_sliding_window_pattern": 1,
    },
    "cwm": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "sliding_window": 8192,
        "rope_theta": 1e6,
        "rope_parameters": {**_LLAMA3, "factor": 16.0, "rope_theta": 1e6},
    },
    "diffllama": {"intermediate_size": 8192},
    "dots1": {
        "num_key_value_heads": 32,
        "intermediate_size": 10944,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    "ernie4_5": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
    },
    "ernie4_5_moe": {
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
    },
    "exaone4": {
        "num_key_value_heads": 32,
        "intermediate_size": 16384,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "exaone_moe": {
        "num_key_value_heads": 32,
        "intermediate_size": 16384,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "flex_olmo": {"intermediate_size": 11008, "rope_theta": 5e5},
    "gemma": {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
    },
    "glm": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "partial_rotary_factor": 0.5,
    },
    "glm4": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe": {
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "partial_rotary_factor": 0.5,
    },
    "gpt_neox": {"intermediate_size": 24576, "rotary_pct": 0.25},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "granite": {"intermediate_size": 11008},
    "granite_swa": {
        "num_key_value_heads": 4,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    "granitemoe": {"intermediate_size": 11008},
    "granitemoe_swa": {"intermediate_size": 11008, "sliding_window": 128},
    "granitemoeshared": {"intermediate_size": 11008},
    "helium": {
        "num_key_value_heads": 20,
        "head_dim": 128,
        "intermediate_size": 7040,
        "rope_theta": 1e5,
    },
    "hunyuan_v1_dense": {"intermediate_size": 11008},
    "hunyuan_v1_moe": {"intermediate_size": 11008},
    "hy_v3": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 13312,
        "rope_theta": 11158840.0,
    },
    "hyperclovax": {"intermediate_size": 11008},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 10240},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648},
    "jais2": {"intermediate_size": 26624},
    "kolibri1": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513},
    "laguna": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "sliding_window": 512,
    },
    "llama": {"intermediate_size": 11008},
    "mellum": {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 7168,
        "sliding_window": 1024,
    },
    "minimax_m2": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "rope_theta": 5e6,
    },
    "ministral": {"num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096},
    "ministral3": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "rope_parameters": {**_YARN, "rope_theta": 1e6},
    },
    "mistral": {"num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "intermediate_size": 14336, "rope_theta": 1e6},
    "nanochat": {"intermediate_size": 8192},
    "olmo": {"intermediate_size": 11008},
    "olmo2": {"intermediate_size": 11008},
    "olmo3": {"intermediate_size": 11008, "sliding_window": 4096},
    "olmoe": {"intermediate_size": 2048},
    "opt": {"ffn_dim": 3072, "tie_word_embeddings": True},
    "persimmon": {"intermediate_size": 16384, "partial_rotary_factor": 0.5},
    "phi3": {
        "intermediate_size": 8192,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    "phimoe": {"num_key_value_heads": 8, "intermediate_size": 6400, "rope_theta": 1e6},
    "qwen2": {
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "intermediate_size": 6144, "sliding_window": 4096},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648},
    "smollm3": {
        "num_key_value_heads": 4,
        "intermediate_size": 11008,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
    },
    "solar_open": {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6},
    "starcoder2": {
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "tie_word_embeddings": True,
    },
}
"""Fields whose default is not what their absence says elsewhere: as many key/value heads as query
heads, heads that share the hidden size, untied embeddings, no window, plain RoPE on a base of
10,000."""


class Experts(NamedTuple):
    """What the class of a mixture of experts takes for a field that ``config.json`` leaves out;
    beside a number, its field.
    """

    experts: int
    """Experts of one layer."""
    per_token: int
    width: int | None = None
    """``moe_intermediate_size``; None where an expert is as wide as ``intermediate_size``, whatever
    the config says."""
    shared: tuple[str | None, int] = (None, 0)
    """Experts that every token goes through, or the width of them all; of no field where the class
    has always so many."""
    dense_layers: tuple[str | None, int] = (None, 0)
    """Layers without experts, at the front."""


_FIRST_DENSE, _SHARED, _SHARED_WIDTH = (
    "first_k_dense_replace",
    "num_shared_experts",
    "shared_expert_intermediate_size",
)
EXPERTS: Mapping[str, Experts] = {
    "afmoe": Experts(64, 6, width=1408, shared=(_SHARED, 2), dense_layers=("num_dense_layers", 1)),
    "aria_text": Experts(8, 2, shared=("moe_num_shared_experts", 2)),
    "cohere2_moe": Experts(8, 2, shared=(_SHARED, 0), dense_layers=(_FIRST_DENSE, 0)),
    "dots1": Experts(
        1, 1, width=1408, shared=("n_shared_experts", 0), dense_layers=(_FIRST_DENSE, 0)
    ),
    "ernie4_5_moe": Experts(
        64,
        6,
        width=1536,
        shared=("moe_num_shared_experts", 2),
        dense_layers=("moe_layer_start_index", 1),
    ),
    "exaone_moe": Experts(64, 8, width=1024, shared=(_SHARED, 1), dense_layers=(_FIRST_DENSE, 1)),
    "flex_olmo": Experts(7, 5),
    "glm4_moe": Experts(
        128, 8, width=1408, shared=("n_shared_experts", 1), dense_layers=(_FIRST_DENSE, 1)
    ),
    "gpt_oss": Experts(128, 4),
    "granitemoe": Experts(8, 2),
    "granitemoe_swa": Experts(8, 2, shared=("shared_intermediate_size", 0)),
    "granitemoeshared": Experts(8, 2, shared=("shared_intermediate_size", 0)),
    "hunyuan_v1_moe": Experts(1, 1, shared=(None, 1)),
    "hy_v3": Experts(192, 8, width=1536, shared=(_SHARED, 1), dense_layers=(None, 1)),
    "kolibri1": Experts(384, 6, width=512, shared=(_SHARED_WIDTH, 512)),
    "laguna": Experts(256, 8, width=512, shared=(_SHARED_WIDTH, 512), dense_layers=(None, 1)),
    "mellum": Experts(64, 8, width=896),
    "minimax_m2": Experts(256, 8),
    "mixtral": Experts(8, 2),
    "olmoe": Experts(64, 8),
    "phimoe": Experts(16, 2),
    "qwen2_moe": Experts(60, 4, width=1408, shared=(_SHARED_WIDTH, 5632)),
    "qwen3_moe": Experts(128, 8, width=768),
    "solar_open": Experts(128, 8, width=1280, shared=("n_shared_experts", 1)),
}
"""Families with experts; what the config of any other says of experts is read by no class."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Names that families give the same thing: experts of a layer, of a token."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "dots1": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")
}
"""Fields that a family's class leaves at null, of which no model can be built."""
MLP_WIDTHS: Mapping[str, str] = {"opt": "ffn_dim"}
"""What a family calls its ``intermediate_size``."""
WITH_CAPS = frozenset(("gemma2",))
"""Families whose attention caps its scores at ``attn_logit_softcapping``."""
WITH_SINKS = frozenset(("gpt_oss", "granite_swa", "granitemoe_swa"))
"""Families whose every layer has sinks, learned numbers beside the keys."""
DENSE_WIDTHS: Mapping[str, str] = {"cohere2_moe": "prefix_dense_intermediate_size"}
"""What a family calls the width of its layers without experts, where it is not their
``intermediate_size``."""
UNGATED = frozenset(
    ("apertus", "arcee", "gpt_neox", "jais2", "nanochat", "opt", "persimmon", "starcoder2")
)
"""Families whose MLP has no gate."""

ROPE_BY_LAYER = frozenset(("gemma3_text", "laguna", "mellum", "olmo3"))
"""Families with RoPE of its own for each kind of layer, whatever their config leaves out."""

_NULL_SAYS = ("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping")
"""Fields where null is not the same as nothing: as the query heads, as they share the hidden size,
no window, no cap."""


def value_of(config: Mapping[str, Any], field: str) -> Any:
    """What a config says of a field, or where it does not, its class; None where neither does."""
    if config.get(field) is not None or (field in config and field in _NULL_SAYS):
        return config[field]
    return CLASS_DEFAULTS.get(config["model_type"], {}).get(field)


_ATTENTION_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
)
_LAYER_DROPOUT = ("layerdrop", "decoder_layerdrop")
DROPOUT_BY_DEFAULT: Mapping[str, str] = {"seed_oss": "attention_dropout"}
"""Families whose attention has dropout where their config does not say otherwise, and the field
that does."""


def unsupported_dropout(config: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The field that asks for dropout that the engine has not, its value, and what it does."""
    nested = config.get("attn_config")
    for block in (config, nested if isinstance(nested, Mapping) else {}):
        for fields, what in (
            (_ATTENTION_DROPOUT, "drops attention weights"),
            (_LAYER_DROPOUT, "leaves layers out"),
        ):
            for field in fields:
                if block.get(field):
                    return field, block[field], what
    field = DROPOUT_BY_DEFAULT.get(config["model_type"])
    if field is not None and field not in config:
        return field, "left out", "drops attention weights by default"
    return None
