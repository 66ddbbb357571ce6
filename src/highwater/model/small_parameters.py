"""Small parameters: biases, norms of heads and whatever else a family has besides its matrices and
two norms a layer, so that a model has the very number of parameters of its own class.

A row for each family, and beside it the fields of a config that switch parts on or off.

Source: ``modeling_*.py`` of transformers 5.23; tests/unit/test_small_parameters.py builds every
family, each field either way, and compares whole numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from highwater.model.layer_kind import LayerKind, LayerRun

SmallPart = Callable[[LayerKind], int]
"""Parameters that one layer of a kind has of some part; less than 0 where it has fewer norms."""


def _query_key_value_biases(kind: LayerKind) -> int:
    return kind.attention.query_size + 2 * kind.attention.key_size


def _output_bias(kind: LayerKind) -> int:
    return kind.hidden_size


def _mlp_biases(kind: LayerKind) -> int:
    """Biases of one MLP, or of all experts and of their router."""
    mlp = kind.mlp
    of_one = (mlp.matrices - 1) * mlp.width + kind.hidden_size
    return of_one if mlp.experts == 1 else mlp.experts * (of_one + 1)


def _plain_mlp_biases(kind: LayerKind) -> int:
    """Biases of MLPs that every token goes through, where a family's experts have none."""
    mlp = kind.mlp
    width = mlp.width if mlp.experts == 1 else mlp.shared_width
    return (mlp.matrices - 1) * width + kind.hidden_size * (width > 0)


def _expert_biases(kind: LayerKind) -> int:
    """A number for each expert, which balances them."""
    return kind.mlp.experts if kind.mlp.experts > 1 else 0


def _lone_router(kind: LayerKind) -> int:
    """The router of a mixture of one expert."""
    return kind.hidden_size if kind.mlp.experts == 1 else 0


def _head_norms(kind: LayerKind) -> int:
    """Norms of a query head and of a key head, which all heads share."""
    return 2 * kind.attention.head_dim


def _wide_norms(kind: LayerKind) -> int:
    """Norms of all query heads together, and of all key heads."""
    return kind.attention.query_size + kind.attention.key_size


def _norm(kind: LayerKind) -> int:
    return kind.hidden_size


def _inner_norm(kind: LayerKind) -> int:
    """A norm of what goes into the MLP's last matrix."""
    return kind.mlp.width


def _head_gates(kind: LayerKind) -> int:
    return kind.hidden_size * kind.attention.query_heads


def _wide_gates(kind: LayerKind) -> int:
    return kind.hidden_size * kind.attention.query_size


_NORM_BIASES: tuple[SmallPart, ...] = (_norm, _norm)
_TWO_NORMS = _NORM_BIASES
_ATTENTION_BIASES: tuple[SmallPart, ...] = (_query_key_value_biases, _output_bias)


def _without(part: SmallPart) -> SmallPart:
    return lambda kind: -part(kind)


def _times(count: int, part: SmallPart) -> SmallPart:
    return lambda kind: count * part(kind)


class _FamilyParts(NamedTuple):
    """What a family has besides its matrices and norms."""

    layer: tuple[SmallPart, ...] = ()
    """In every layer, whatever its config says."""
    hidden: int = 0
    """Outside the layers, in numbers of the hidden size: the last norm's bias; below 0 where it has
    no weight."""
    positions: int | None = None
    """Learned positions more than the native length; None: it has none."""
    switches: Mapping[str, tuple[bool, tuple[SmallPart, ...]]] = {}
    """Fields of a config that switch parts of every layer on, and whether the class has them on."""


def _switched(
    field: str, *parts: SmallPart, usual: bool = False
) -> dict[str, tuple[bool, tuple[SmallPart, ...]]]:
    return {field: (usual, parts)}


_ATTENTION = _switched("attention_bias", *_ATTENTION_BIASES)
_ATTENTION_AND_MLP = _ATTENTION | _switched("mlp_bias", _plain_mlp_biases)
_QKV = _switched("attention_bias", _query_key_value_biases)
_QKV_USUAL = _switched("attention_bias", _query_key_value_biases, usual=True)
_ATTENTION_USUAL = _switched("attention_bias", *_ATTENTION_BIASES, usual=True)
_LLAMA, _OF_ATTENTION = _FamilyParts(switches=_ATTENTION_AND_MLP), _FamilyParts(switches=_ATTENTION)
_HEADS_NORMED = _FamilyParts(layer=(_head_norms,), switches=_ATTENTION)
_WIDELY_NORMED = _FamilyParts(layer=(_wide_norms,), switches=_ATTENTION)
_ROWS: Mapping[str, _FamilyParts] = {
    **dict.fromkeys(
        (
            *("arcee", "aria_text", "granite", "granite_swa", "internlm3", "iquestcoder"),
            *("llama", "smollm3"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("gemma", "granitemoe", "granitemoe_swa", "granitemoeshared"), _OF_ATTENTION),
    **dict.fromkeys(("dots1", "hunyuan_v1_dense", "mellum", "qwen3", "qwen3_moe"), _HEADS_NORMED),
    **dict.fromkeys(("exaone4", "exaone_moe"), _FamilyParts(layer=(_head_norms,))),
    **dict.fromkeys(("flex_olmo", "olmo2", "olmo3", "olmoe"), _WIDELY_NORMED),
    "afmoe": _FamilyParts(
        layer=(*_TWO_NORMS, _head_norms, _wide_gates, _expert_biases), switches=_ATTENTION
    ),
    "apertus": _FamilyParts(layer=(_head_norms, lambda _: 2), switches=_ATTENTION),
    "bitnet": _FamilyParts(layer=(_norm, _inner_norm), switches=_ATTENTION),
    "cohere": _FamilyParts(
        layer=(_without(_norm),), switches=_ATTENTION | _switched("use_qk_norm", _wide_norms)
    ),
    **dict.fromkeys(
        ("cohere2", "cohere2_moe"), _FamilyParts(layer=(_without(_norm),), switches=_ATTENTION)
    ),
    "cwm": _FamilyParts(switches=_switched("mlp_bias", _plain_mlp_biases)),
    "diffllama": _FamilyParts(layer=(_times(2, _head_norms),), switches=_ATTENTION),
    "ernie4_5": _FamilyParts(switches=_switched("use_bias", *_ATTENTION_BIASES, _plain_mlp_biases)),
    "ernie4_5_moe": _FamilyParts(layer=(_expert_biases,)),
    "gemma2": _FamilyParts(layer=_TWO_NORMS, switches=_ATTENTION),
    "gemma3_text": _FamilyParts(layer=(*_TWO_NORMS, _head_norms), switches=_ATTENTION),
    "glm": _FamilyParts(switches=_QKV_USUAL),
    "glm4": _FamilyParts(layer=_TWO_NORMS, switches=_QKV_USUAL),
    "glm4_moe": _FamilyParts(switches=_QKV | _switched("use_qk_norm", _head_norms)),
    "gpt_neox": _FamilyParts(
        layer=(*_NORM_BIASES, _mlp_biases),
        hidden=1,
        switches=_ATTENTION_USUAL,
    ),
    "gpt_oss": _FamilyParts(layer=(_mlp_biases,), switches=_ATTENTION_USUAL),
    "helium": _FamilyParts(switches=_QKV | _switched("mlp_bias", _plain_mlp_biases)),
    "hunyuan_v1_moe": _FamilyParts(layer=(_head_norms, _lone_router), switches=_ATTENTION),
    "hy_v3": _FamilyParts(layer=(_head_norms,), switches=_ATTENTION_AND_MLP),
    "hyperclovax": _FamilyParts(
        switches=_ATTENTION_AND_MLP | _switched("use_post_norm", *_TWO_NORMS, usual=True)
    ),
    "jais2": _FamilyParts(
        layer=_NORM_BIASES,
        hidden=1,
        switches=_ATTENTION_USUAL | _switched("mlp_bias", _mlp_biases, usual=True),
    ),
    "kolibri1": _FamilyParts(layer=(*_TWO_NORMS, _head_norms)),
    "laguna": _FamilyParts(layer=(_head_norms, _head_gates, _expert_biases), switches=_ATTENTION),
    "minimax_m2": _FamilyParts(layer=(_wide_norms,)),
    **dict.fromkeys(
        ("nanochat", "olmo"),
        _FamilyParts(layer=(_without(_norm), _without(_norm)), hidden=-1, switches=_ATTENTION),
    ),
    "opt": _FamilyParts(
        layer=_NORM_BIASES,
        hidden=1,
        positions=2,
        switches=_switched("enable_bias", *_ATTENTION_BIASES, _mlp_biases, usual=True),
    ),
    "persimmon": _FamilyParts(
        layer=(*_NORM_BIASES, *_ATTENTION_BIASES, _mlp_biases),
        hidden=1,
        switches=_switched("qk_layernorm", _times(2, _head_norms), usual=True),
    ),
    "phimoe": _FamilyParts(layer=_NORM_BIASES, hidden=1, switches=_ATTENTION),
    "qwen2": _FamilyParts(layer=(_query_key_value_biases,)),
    "qwen2_moe": _FamilyParts(
        layer=(lambda kind: kind.hidden_size if kind.mlp.experts > 1 else 0,),
        switches=_switched("qkv_bias", _query_key_value_biases, usual=True),
    ),
    "seed_oss": _FamilyParts(
        switches=_QKV_USUAL
        | _switched("attention_out_bias", _output_bias)
        | _switched("mlp_bias", _plain_mlp_biases)
    ),
    "solar_open": _FamilyParts(switches=_QKV),
    "starcoder2": _FamilyParts(
        layer=_NORM_BIASES,
        hidden=1,
        switches=_switched("use_bias", *_ATTENTION_BIASES, _mlp_biases, usual=True),
    ),
}
"""Families without a row have nothing but matrices and two norms a layer."""
_PLAIN = _FamilyParts()
_OLD_NAMES = {"internlm3": {"attention_bias": "qkv_bias", "mlp_bias": "bias"}}
"""Other names of a family's fields, which its class reads too."""


def small_parameters(
    family: str,
    runs: Iterable[LayerRun],
    *,
    hidden_size: int,
    native_length_tokens: int,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Parameters of a model besides its matrices, two norms a layer and the last norm. They follow
    the switches of ``config``; without one, or where it leaves them out, its class.
    """
    row = _ROWS.get(family, _PLAIN)
    other = _OLD_NAMES.get(family, {})
    on = (
        parts
        for field, (usual, parts) in row.switches.items()
        if _is_on(config or {}, (field, other.get(field, field)), usual)
    )
    parts = (*row.layer, *(part for each in on for part in each))
    in_layers = sum(run.count * sum(part(run.kind) for part in parts) for run in runs)
    outside = row.hidden + learned_positions(family, native_length_tokens)
    return in_layers + outside * hidden_size


def learned_positions(family: str, native_length_tokens: int) -> int:
    """Positions that a model of the family has an embedding of; 0 where they are not learned."""
    more = _ROWS.get(family, _PLAIN).positions
    return 0 if more is None else native_length_tokens + more


def _is_on(config: Mapping[str, Any], names: tuple[str, ...], usual: bool) -> bool:
    return bool(next((config[name] for name in names if config.get(name) is not None), usual))
