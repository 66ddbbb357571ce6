"""Fields of a model's ``config.json``, read without transformers and refused by name where they
cannot be.

``source`` is the file's path in what is said.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from highwater.errors import ModelError
from highwater.model.families import (
    DENSE_WIDTHS,
    EXPERT_COUNTS,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    MLP_WIDTHS,
    NEEDED,
    WITH_CAPS,
    unsupported_dropout,
    value_of,
)
from highwater.model.layer_kind import refuse_missing_window, slides
from highwater.model.trained_families import OF_TEXT, refuse_features, refuse_untrained
from highwater.nouns.codec import digest
from highwater.nouns.files import CONFIG_BYTES, read_file

MIN_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Fields that every config has to have."""

_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 10_000
"""No model has a size or as many layers beyond these; layers are read one by one."""


def read_config(path: Path) -> dict[str, Any]:
    """A parsed ``config.json``; raises ModelError for one that cannot be read."""
    try:
        config = json.loads(read_file(path, most_bytes=CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}",
            hint="check the file, or use a catalog name such as `Qwen3-0.6B`",
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{path} is not a JSON object", hint="use the config.json of a Hugging Face model"
        )
    if config.get("model_type") == "mistral" and "layer_types" in config:
        config["model_type"] = "ministral"  # as transformers' AutoConfig has it
    return config


def config_digest(config: dict[str, Any], source: str) -> str:
    """The digest that names a config, wherever it lies; raises ModelError for what is no text."""
    try:
        return digest(config)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ModelError(
            f"{source} holds what is no text: {error}",
            hint="check the file, or use a catalog name such as `Qwen3-0.6B`",
        ) from error


def trained_family(config: dict[str, Any], source: str) -> str:
    """The config's ``model_type``; raises ModelError, by that name, for a family or for features
    that do not train exactly, and for fields that are missing.
    """
    family = _family_of_text(config, source)
    refuse_untrained(family, source, has_own_code=has_own_code(config))
    missing = [
        field for field in (*MIN_FIELDS, *NEEDED.get(family, ())) if config.get(field) is None
    ]
    if missing:
        raise ModelError(
            f"{source}, of the family {family}, has no {', '.join(missing)}",
            hint="use the config.json of a decoder-only causal language model, or `highwater find "
            "Qwen3-0.6B`",
        )
    _refuse_layers(config, source)
    return family


def _refuse_layers(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for layers, logits or attention that are not as their class has them."""
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        _refuse_dense_layers(config, source)
    refuse_features(config, source)
    layers = config.get("num_hidden_layers")
    for field in ("layer_types", "mlp_layer_types"):
        kinds = config.get(field)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
            raise ModelError(
                f"{field} names {len(kinds)} layers in {source}, where num_hidden_layers is "
                f"{layers}",
                hint=f"name each of the {layers} layers in {field}, or remove it",
            )


def has_own_code(config: Mapping[str, Any]) -> bool:
    """Whether a config names code that came with the model, which nothing here ever runs."""
    return bool(config.get("auto_map"))


def _family_of_text(config: dict[str, Any], source: str) -> str:
    """The ``model_type`` of a decoder that reads text alone."""
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        said = "has no model_type" if family is None else f"has the model_type {family!r}"
        raise ModelError(
            f"{source} {said}",
            hint="set model_type to the name of a family, for example llama or qwen3",
        )
    text = config.get("text_config")
    if isinstance(text, dict):
        alone = (
            "save the text model alone, and give its directory: a config.json without text_config"
        )
        raise ModelError(
            f"{source} is of the family {family}, which reads more than text: its text model is "
            f"in text_config",
            hint=alone if _trains(text, source) else OF_TEXT,
        )
    if "text_config" in config:
        raise ModelError(
            f"{source}, of the family {family}, has the text_config {config['text_config']!r}",
            hint="remove text_config, or use the config.json that the model came with",
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{source} is of the family {family}: an encoder-decoder model",
            hint="use a decoder-only causal language model",
        )
    return family


def _trains(text_config: dict[str, Any], source: str) -> bool:
    """Whether a text model would train if it were alone; fields that it lacks are its class's."""
    try:
        refuse_untrained(str(text_config.get("model_type")), source)
        _refuse_layers(text_config, source)
    except ModelError:
        return False
    return True


def _refuse_dense_layers(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for a Qwen mixture with layers without experts: nobody compared it."""
    for field, neutral in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        value = config.get(field, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                f"{field} is {value!r} in {source}: layers without experts among those with them "
                f"are not supported",
                hint=f"use a model with experts in every layer, for example Qwen3-30B-A3B, whose "
                f"{field} is {neutral!r}",
            )


def refuse_dropout(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for dropout that no fused attention computes or ranks would wait for."""
    dropout = unsupported_dropout(config)
    if dropout is not None:
        field, value, what = dropout
        raise ModelError(
            f"{field} is {value} in {source}, which {what}: that is not supported",
            hint=f"set {field} to 0.0 there",
        )


def size(config: dict[str, Any], field: str, source: str) -> int:
    """A field that the config has to have, a whole number from 1; raises ModelError for others."""
    return whole_number(config[field], field, source)


def optional_size(config: dict[str, Any], field: str, source: str) -> int | None:
    """A field that may be left out, a whole number from 1, by its class where it is; None where
    neither says anything. Raises ModelError for others.
    """
    value = value_of(config, field)
    return None if value is None else whole_number(value, field, source)


def layer_count(config: dict[str, Any], source: str) -> int:
    """How many layers a model has; raises ModelError for more than any has."""
    layers = size(config, "num_hidden_layers", source)
    if layers > _MOST_LAYERS:
        raise ModelError(
            f"{source} describes {layers} layers, more than any model has",
            hint="check its num_hidden_layers",
        )
    return layers


class Heads(NamedTuple):
    """The attention heads of a layer."""

    query_heads: int
    kv_heads: int
    head_dim: int


def heads_of(config: dict[str, Any], source: str) -> Heads:
    """The heads of every layer; raises ModelError for numbers that do not go together."""
    query_heads = size(config, "num_attention_heads", source)
    hidden = size(config, "hidden_size", source)
    kv_heads = optional_size(config, "num_key_value_heads", source) or query_heads
    head_dim = optional_size(config, "head_dim", source) or hidden // query_heads
    if head_dim < 1 or query_heads % kv_heads:
        raise ModelError(
            f"{query_heads} query heads do not go with {kv_heads} key/value heads and a hidden "
            f"size of {hidden} in {source}",
            hint="set num_key_value_heads to a divisor of num_attention_heads, and head_dim to a "
            "whole number, 1 or more",
        )
    return Heads(query_heads, kv_heads, head_dim)


class Mixture(NamedTuple):
    """What a config says of MLPs and experts; of a family without, one expert."""

    width: int
    """Width of one expert."""
    dense_width: int
    """Width of the MLP in layers without experts."""
    experts: int = 1
    experts_per_token: int = 1
    shared_size: int = 0
    """Width of the MLP that every token goes through beside its experts."""
    dense_layers: int = 0
    """Layers without experts, wherever they are."""


def mixture_of(config: dict[str, Any], source: str) -> Mixture:
    """MLPs and experts, by whichever of the fields the config has; else the usual ones of its
    family's class. Raises ModelError for more experts a token than there are.
    """
    family = config["model_type"]
    width = dense_width = optional_size(
        config, MLP_WIDTHS.get(family, "intermediate_size"), source
    ) or 4 * size(config, "hidden_size", source)
    usual = EXPERTS.get(family)
    if usual is None:
        return Mixture(width, dense_width)
    if family in DENSE_WIDTHS:
        dense_width = optional_size(config, DENSE_WIDTHS[family], source) or width
    if usual.width is not None:
        width = optional_size(config, "moe_intermediate_size", source) or usual.width
    shared_field, _ = usual.shared
    shared = _count(config, usual.shared, source)
    is_width = shared_field is not None and shared_field.endswith("intermediate_size")
    kinds = config.get("mlp_layer_types")
    dense = (
        kinds.count("dense")
        if isinstance(kinds, list)
        else _count(config, usual.dense_layers, source)
    )
    return Mixture(
        width=width,
        dense_width=dense_width,
        experts=_first_size(config, EXPERT_COUNTS, source) or usual.experts,
        experts_per_token=_first_size(config, EXPERTS_PER_TOKEN, source) or usual.per_token,
        shared_size=shared if is_width else width * shared,
        dense_layers=min(dense, layer_count(config, source)),
    )


def _first_size(config: dict[str, Any], fields: Sequence[str], source: str) -> int | None:
    """The first of these fields that the config or its class has."""
    sizes = (optional_size(config, field, source) for field in fields)
    return next((found for found in sizes if found is not None), None)


def _count(config: dict[str, Any], usual: tuple[str | None, int], source: str) -> int:
    """What a config says of a field, a whole number that may be 0, or else the usual one."""
    field, number = usual
    value = None if field is None else config.get(field)
    if field is None or value is None:
        return number
    return 0 if value == 0 else whole_number(value, field, source)


def layer_windows(config: dict[str, Any], source: str) -> tuple[int | None, ...]:
    """The window of every layer in their order, in tokens; None of one that attends to all.
    Raises ModelError where some are to have one, and there is none.
    """
    sliding = [slides(config, layer) for layer in range(layer_count(config, source))]
    refuse_missing_window(config, source, some_slide=any(sliding))
    window = optional_size(config, "sliding_window", source) if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding)


def score_cap(config: dict[str, Any], source: str) -> float | None:
    """What no score of attention exceeds; None: no cap. Raises ModelError for no number."""
    if config["model_type"] not in WITH_CAPS:
        return None
    cap = value_of(config, "attn_logit_softcapping")
    if cap is None:
        return None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < _LARGEST_SIZE:
        raise ModelError(
            f"attn_logit_softcapping is {cap!r} in {source}",
            hint="set attn_logit_softcapping to a number above 0, or to null",
        )
    return float(cap)


def layers_without_experts(config: dict[str, Any], mixture: Mixture) -> tuple[bool, ...]:
    """Whether each layer has one MLP and no experts, by ``mlp_layer_types`` or the first ones."""
    layers, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    if mixture.dense_layers and isinstance(kinds, list) and len(kinds) == layers:
        return tuple(kind == "dense" for kind in kinds)
    return tuple(layer < mixture.dense_layers for layer in range(layers))


def tied_embeddings(config: dict[str, Any], source: str) -> bool:
    """Whether the head is the embedding; raises ModelError for what is neither true nor false."""
    tied = value_of(config, "tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ModelError(
            f"tie_word_embeddings is {tied!r} in {source}",
            hint="set tie_word_embeddings to true or false",
        )
    return bool(tied)


def whole_number(value: Any, field: str, source: str) -> int:
    """A number from 1 that a field has; raises ModelError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_SIZE:
        most = (
            f", {_LARGEST_SIZE} at the most"
            if isinstance(value, int) and value > _LARGEST_SIZE
            else ""
        )
        raise ModelError(
            f"{field} is {value!r} in {source}",
            hint=f"set {field} to a whole number, 1 or more{most}",
        )
    return value
