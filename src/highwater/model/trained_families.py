"""Which families train exactly, and what stands in the way of every other causal family of
transformers.

A family is here once tests/dist/test_trained_families.py has found its loss and every gradient
equal to its own class's, in each layout. Fields of a config that switch on what the engine does not
compute are refused by their values. Both are known without torch, so that every command refuses
before anything starts.

Source: ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`` of transformers 5.23, and its ``modeling_*.py``.
"""

from collections.abc import Mapping
from typing import Any

from highwater.errors import ModelError
from highwater.model.families import WITH_CAPS, value_of
from highwater.model.logit_transform import logit_transform_of, transforms

TRAINED = frozenset(
    (
        *(
            "afmoe",
            "apertus",
            "arcee",
            "aria_text",
            "bitnet",
            "cohere",
            "cohere2",
            "cohere2_moe",
            "cwm",
            "diffllama",
            "dots1",
            "ernie4_5",
            "ernie4_5_moe",
            "exaone4",
        ),
        *(
            "exaone_moe",
            "flex_olmo",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
            "glm4_moe",
            "gpt_neox",
            "gpt_oss",
            "granite",
            "granite_swa",
            "granitemoe",
            "granitemoe_swa",
        ),
        *(
            "granitemoeshared",
            "helium",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hy_v3",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
        ),
        *(
            "jais2",
            "kolibri1",
            "laguna",
            "llama",
            "mellum",
            "minimax_m2",
            "ministral",
            "ministral3",
            "mistral",
            "mixtral",
            "nanochat",
        ),
        *(
            "olmo",
            "olmo2",
            "olmo3",
            "olmoe",
            "opt",
            "persimmon",
            "phi3",
            "phimoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
        ),
        *("seed_oss", "smollm3", "solar_open", "starcoder2"),
    )
)
"""Families whose training equals their own class's."""

_COMPARED = "use a model of a family that was compared, for example `highwater find Qwen3-0.6B`"
OF_TEXT = "use a decoder-only language model of text, for example `highwater find Qwen3-0.6B`"
"""What works in the place of a model that reads more than text, or has an encoder."""
_PLAIN_HEAD = "use a family with plain logits, for example `highwater find Qwen3-0.6B`"

_FEATURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "layers of this family may carry a state along the sequence (linear attention or a state "
        "space), which would run on from one packed document into the next; nobody has compared "
        "its models whose layers only attend",
        _COMPARED,
        (
            *(
                "bailing_hybrid",
                "bamba",
                "falcon_h1",
                "falcon_mamba",
                "granitemoehybrid",
                "jamba",
                "kimi_linear",
                "mamba",
            ),
            *(
                "mamba2",
                "minimax",
                "nemotron_h",
                "olmo_hybrid",
                "qwen3_5",
                "qwen3_5_moe",
                "qwen3_5_moe_text",
                "qwen3_5_text",
            ),
            *(
                "qwen3_next",
                "qwen4_exp",
                "qwen4_exp_text",
                "recurrent_gemma",
                "rwkv",
                "xlstm",
                "zamba",
                "zamba2",
            ),
        ),
    ),
    (
        "layers of this family may have convolutions along the sequence, which would run on from "
        "one packed document into the next; nobody has compared its models without them",
        _COMPARED,
        ("inkling2_text", "inkling_text", "lfm2", "lfm2_moe", "lfm3", "zaya"),
    ),
    (
        "its attention is latent (MLA): keys and values of other sizes than its heads, whose "
        "parameters and memory are not counted",
        _COMPARED,
        (
            *(
                "axk1",
                "deepseek_v2",
                "deepseek_v3",
                "dots3_note",
                "dots3_note_text",
                "glm4_moe_lite",
                "longcat_flash",
            ),
            *("minicpm3", "youtu"),
        ),
    ),
    (
        "its attention chooses which tokens to read (sparse, hashed or masked by what it "
        "learned), which is no full attention",
        _COMPARED,
        (
            *(
                "axk2",
                "big_bird",
                "bigbird_pegasus",
                "deepseek_v32",
                "deepseek_v4",
                "doge",
                "glm_moe_dsa",
                "hy_v4",
            ),
            *("minimax_m3_vl_text", "reformer"),
        ),
    ),
    (
        "its layers without experts, or its heads, are read of fields that are not read here "
        "(mlp_only_layers, swa_num_key_value_heads)",
        _COMPARED,
        ("flint", "mimo_v2_flash"),
    ),
    ("its layers attend in chunks, not to the whole document", _COMPARED, ("llama4_text",)),
    (
        "it attends by code of its own, or in positions (ALiBi, relative ones, ones it counts "
        "itself) that no attention of ours "
        "is told, so that packed documents would see each other",
        _COMPARED,
        (
            *(
                "biogpt",
                "bloom",
                "codegen",
                "cpmant",
                "ctrl",
                "dbrx",
                "falcon",
                "gpt_neo",
                "gpt_neox_japanese",
                "gptj",
                "mpt",
            ),
            *("nemotron", "openai-gpt", "stablelm", "xglm", "xlm", "xlnet"),
        ),
    ),
    (
        "its config names its sizes in a way that is not read here (n_embd, n_layer, n_head)",
        _COMPARED,
        ("gpt-sw3", "gpt2", "gpt_bigcode"),
    ),
    (
        "its attention caps its scores, which the fused kernels do not",
        _COMPARED,
        ("vaultgemma",),
    ),
    (
        "its attention has gates, and scales of queries by their positions: nobody has compared "
        "how they train",
        _COMPARED,
        ("beam",),
    ),
    (
        "its head is not one product with the last hidden states: it has a bias, or layers of its "
        "own",
        _PLAIN_HEAD,
        (
            *(
                "bert",
                "bert-generation",
                "camembert",
                "data2vec-text",
                "electra",
                "ernie",
                "megatron-bert",
                "modernbert-decoder",
            ),
            *(
                "phi",
                "rembert",
                "roberta",
                "roberta-prelayernorm",
                "roc_bert",
                "roformer",
                "xlm-roberta",
                "xlm-roberta-xl",
                "xmod",
            ),
        ),
    ),
    (
        "it is the decoder of an encoder-decoder model",
        OF_TEXT,
        (
            *(
                "bart",
                "blenderbot",
                "blenderbot-small",
                "marian",
                "mbart",
                "musicgen",
                "musicgen_melody",
                "mvp",
                "pegasus",
            ),
            *("plbart", "prophetnet", "trocr", "whisper"),
        ),
    ),
    (
        "it reads more than text",
        OF_TEXT,
        (
            *(
                "blt",
                "emu3",
                "fuyu",
                "gemma3",
                "gemma3n",
                "gemma4",
                "gemma4_unified",
                "git",
                "got_ocr2",
                "llama4",
                "mllama",
                "moshi",
            ),
            *("moss_transcribe_diarize", "phi4_multimodal"),
        ),
    ),
    (
        "its layers differ in their sizes, or share keys and values with each other",
        _COMPARED,
        (
            "gemma3n_text",
            "gemma4_assistant",
            "gemma4_text",
            "gemma4_unified_assistant",
            "gemma4_unified_text",
        ),
    ),
    (
        "its attention heads are experts too, whose parameters and memory are not counted",
        _COMPARED,
        ("jetmoe",),
    ),
    ("it goes through its layers several times", _COMPARED, ("hrm_text",)),
    (
        "it embeds texts: no tiny model of it could be built to compare with",
        _COMPARED,
        ("cohere_compass_text",),
    ),
)
REFUSED: Mapping[str, tuple[str, str]] = {
    family: (why, hint) for why, hint, families in _FEATURES for family in families
}
"""What stands in the way of a family, in words, and what would work."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (),
    "output_multiplier_scale": (1,),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "alibi": (False,),
    "lm_head_bias": (False,),
}
_NOT_ZERO: Mapping[str, tuple[str, ...]] = {
    "attention_multiplier": (
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hyperclovax",
    ),
    "n_shared_experts": ("dots1", "glm4_moe", "solar_open"),
    "num_shared_experts": ("afmoe", "exaone_moe"),
    "moe_num_shared_experts": ("aria_text",),
    "shared_expert_intermediate_size": ("kolibri1", "laguna", "qwen2_moe"),
}
"""Fields that no kernel computes with a value of 0, by family: the scale of attention, experts
whose weights would be empty."""
"""Fields that change logits or attention, and the values, beside null, that change nothing."""
_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ernie4_5_moe": {"use_bias": (False,)},
    "laguna": {"gating": (True, "per-head")},
    "opt": {
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
}
"""Fields by which a family has another head, other norms or other gates than its class was compared
with, and the values, beside null, that change nothing."""
ATTENTION_LAYERS = frozenset(("full_attention", "sliding_attention"))
"""Kinds of layers that only attend, to whole documents or within a window."""


def refuse_untrained(family: str, source: str, *, has_own_code: bool = False) -> None:
    """Raise ModelError for a family that does not train exactly, or that nobody has compared."""
    if family in TRAINED:
        return
    if family in REFUSED:
        why, hint = REFUSED[family]
        raise ModelError(
            f"{source} is of the family {family}, which cannot be trained exactly: {why}", hint=hint
        )
    own_code = "; its own code (auto_map) is not run" if has_own_code else ""
    raise ModelError(
        f"{source} is of the family {family}, which nobody has compared with its own class: it "
        f"may train, and wrongly{own_code}",
        hint=f"use a family that was compared ({', '.join(sorted(TRAINED))}), for example "
        f"`highwater find Qwen3-0.6B`",
    )


def _reads(family: str, field: str) -> bool:
    """Whether the engine computes what a family makes of this field."""
    is_cap = field == "attn_logit_softcapping" and family in WITH_CAPS
    return is_cap or transforms(family, field)


def _refuse_projections(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for matrices between the hidden size and another one: before an OPT's
    embedding and head, and where Helium's heads together are of another size.
    """
    family, hidden = config["model_type"], config.get("hidden_size")
    heads, head_dim = config.get("num_attention_heads"), value_of(config, "head_dim")
    sizes: dict[str, Any] = {}
    if family == "opt":
        sizes = {"word_embed_proj_dim": config.get("word_embed_proj_dim")}
    elif family == "helium" and isinstance(heads, int) and isinstance(head_dim, int):
        sizes = {"num_attention_heads times head_dim": heads * head_dim}
    for field, size in sizes.items():
        if size is not None and size != hidden:
            raise ModelError(
                f"{source}, of the family {family}, has {field} = {size!r} beside a hidden_size of "
                f"{hidden!r}, which is not supported",
                hint="use a model where they are the same, for example `highwater find Qwen3-0.6B`",
            )


def _refuse_heads_by_layer(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError where a Laguna's layers have other numbers of query heads than its
    ``num_attention_heads``: nobody has compared how such a model trains with its own class.
    """
    field, heads = "num_attention_heads_per_layer", config.get("num_attention_heads")
    by_layer = config.get(field) if config["model_type"] == "laguna" else None
    if isinstance(by_layer, list) and any(each != heads for each in by_layer):
        raise ModelError(
            f"{source} has {field} = {by_layer!r} beside num_attention_heads = {heads!r}: layers "
            f"that have other numbers of heads are not supported",
            hint="use a model whose layers all have as many heads, for example `highwater find "
            "Qwen3-0.6B`",
        )


def refuse_features(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for a config by which logits or attention are not the plain ones."""
    family = config["model_type"]
    _refuse_projections(config, source)
    _refuse_heads_by_layer(config, source)
    for field, neutral in {**_NEUTRAL, **_ONLY.get(family, {})}.items():
        value = config.get(field)
        if value is not None and value not in neutral and not _reads(family, field):
            allowed = " or ".join(map(repr, (*neutral, None)))
            raise ModelError(
                f"{source}, of the family {family}, has {field} = {value!r}, which is not "
                f"supported",
                hint=f"use a model whose {field} is {allowed}, for example `highwater find "
                f"Qwen3-0.6B`",
            )
    logit_transform_of(config, source)
    empty = next(
        (
            field
            for field, families in _NOT_ZERO.items()
            if family in families and config.get(field) == 0
        ),
        None,
    )
    if empty is not None:
        raise ModelError(
            f"{source}, of the family {family}, has {empty} = 0, which is not supported",
            hint=f"use a model whose {empty} is more than 0, for example `highwater find "
            f"Qwen3-0.6B`",
        )
    kinds = config.get("layer_types")
    others = (
        {str(kind) for kind in kinds} - ATTENTION_LAYERS if isinstance(kinds, list) else set[str]()
    )
    if others:
        raise ModelError(
            f"{source}, of the family {family}, has layers of {', '.join(sorted(others))}, which "
            f"are no full attention",
            hint=_COMPARED,
        )
