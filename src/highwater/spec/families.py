"""Families: what transformers' config classes take for a field that ``config.json`` leaves out, and which window a model has.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23; tests/unit/test_families.py compares with those that are
installed.
"""

from collections.abc import Mapping
from typing import Any

_MISTRAL = {"num_key_value_heads": 8, "intermediate_size": 14336}
_QWEN = {"num_key_value_heads": 32, "intermediate_size": 22016}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"intermediate_size": 11008},
    "ministral": {**_MISTRAL, "sliding_window": 4096},
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {"intermediate_size": 11008},
    "phi3": {"intermediate_size": 8192},
    "qwen2": {**_QWEN, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {**_QWEN, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
    },
    "smollm3": {"num_key_value_heads": 4, "intermediate_size": 11008, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
}
"""Fields whose default is not what their absence says elsewhere: as many key/value heads as query heads, untied embeddings."""

MIXTURES = frozenset(
    (
        *("afmoe", "aria_text", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared"),
        *("hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe"),
        *("qwen2_moe", "qwen3_moe", "solar_open"),
    )
)
"""Families with experts; what the config of any other says of experts is read by no class."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Names that families give the same thing: experts of a layer, of a token; what all tokens share; layers without, at the front."""
UNGATED = frozenset(("apertus", "arcee", "gpt_neox", "jais2", "opt", "persimmon", "starcoder2"))
"""Families whose MLP has no gate."""

ROPE_BY_LAYER = frozenset(
    (
        *("beam", "deepseek_v4", "dots3_note_text", "gemma3_text", "gemma3n_text", "gemma4_assistant", "gemma4_text"),
        *("gemma4_unified_text", "laguna", "lfm3", "mellum", "mimo_v2_flash", "modernbert-decoder", "olmo3", "zaya"),
    )
)
"""Families with RoPE of its own for each kind of layer, whatever their config leaves out."""

_WITHOUT_WINDOW = ("llama", "olmo2")
"""Families whose attention takes no window, whatever their config says."""
_WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "phi3")
"""Families whose attention takes ``sliding_window`` as it is, whatever else their config says."""
_SWITCHED_ON = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families whose window is there only with ``use_sliding_window``."""


_NULL_SAYS = ("num_key_value_heads", "head_dim", "sliding_window")
"""Fields where null is not the same as nothing: as the query heads, as they share the hidden size, no window."""


def value_of(config: Mapping[str, Any], field: str) -> Any:
    """What a config says of a field, or where it does not, its class; None where neither does."""
    if config.get(field) is not None or (field in config and field in _NULL_SAYS):
        return config[field]
    return CLASS_DEFAULTS.get(config["model_type"], {}).get(field)


def has_sliding_layers(config: Mapping[str, Any]) -> bool:
    """Whether any layer attends within ``sliding_window``, where the config has one."""
    family = config["model_type"]
    if family in _WITHOUT_WINDOW or (family in _SWITCHED_ON and not config.get("use_sliding_window")):
        return False
    if family in _WINDOW_IN_EVERY_LAYER or family == "qwen3_moe":
        return True
    if family not in CLASS_DEFAULTS and config.get("use_sliding_window") is False:
        return False
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if isinstance(kinds, list):
        return "sliding_attention" in kinds
    if family == "smollm3":  # in the layers without RoPE
        rotated, interval = config.get("no_rope_layers"), value_of(config, "no_rope_layer_interval")
        return 0 in rotated if isinstance(rotated, list) else isinstance(interval, int) and interval <= layers
    first = value_of(config, "max_window_layers") if family in _SWITCHED_ON else None
    return not isinstance(first, int) or first < layers


_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_LAYER_DROPOUT = ("layerdrop", "decoder_layerdrop")
DROPOUT_BY_DEFAULT: Mapping[str, str] = {
    **dict.fromkeys(("gpt_neox_japanese", "plbart", "prophetnet", "seed_oss", "xglm", "xlm"), "attention_dropout"),
    **dict.fromkeys(("gpt-sw3", "gpt2", "gpt_bigcode", "openai-gpt"), "attn_pdrop"),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "biogpt", "camembert", "data2vec-text", "electra", "ernie", "git"),
            *("megatron-bert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        "attention_probs_dropout_prob",
    ),
}
"""Families whose attention has dropout where their config does not say otherwise, and the field that does."""


def unsupported_dropout(config: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The field that asks for dropout which the engine does not have, its value, and what it does; None where there is none."""
    nested = config.get("attn_config")
    for block in (config, nested if isinstance(nested, Mapping) else {}):
        for fields, what in ((_ATTENTION_DROPOUT, "drops attention weights"), (_LAYER_DROPOUT, "leaves layers out")):
            for field in fields:
                if block.get(field):
                    return field, block[field], what
    field = DROPOUT_BY_DEFAULT.get(config["model_type"])
    if field is not None and field not in config:
        return field, "left out", "drops attention weights by default"
    return None
