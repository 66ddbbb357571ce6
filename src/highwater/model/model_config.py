"""Fields of a model's ``config.json``, read without transformers; impossible values are refused by
the field's name.

``source`` is the file's path for error messages.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from highwater.errors import ModelError
from highwater.model.families import (
    EXPERT_COUNTS,
    EXPERTS_PER_TOKEN,
    WRAPPERS,
    family_row,
    logit_transform_of,
    refuse_untrained,
    transforms,
    value_of,
)
from highwater.model.layer_kind import AttentionKind, DeltaKind, refuse_missing_window, slides
from highwater.nouns.codec import CONFIG_BYTES, digest, read_file

MIN_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Fields that every config has to have."""

TEXT_OF = "text_of"
"""Field added by ``read_config``: the multimodal family whose text model this is."""
ATTENTION_LAYERS = frozenset(("full_attention", "sliding_attention"))
"""Kinds of layers that only attend, to whole documents or within a window."""
DELTA_LAYER = "linear_attention"
"""Name of layers with a gated delta rule in ``layer_types``."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logits_scaling", "logit_scale", "output_multiplier_scale"), (1,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), ()),
    **dict.fromkeys(("use_bidirectional_attention", "alibi", "lm_head_bias"), (False,)),
}
"""Fields that change logits or attention, and their values, besides null, that change nothing."""
_DROPOUT = {
    **dict.fromkeys(
        ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
        "drops attention weights",
    ),
    **dict.fromkeys(("layerdrop", "decoder_layerdrop"), "leaves layers out"),
}
_OF_TEXT = "use a decoder-only language model of text, for example `highwater find Qwen3-0.6B`"
_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 10_000
"""Most layers of a model, which are read one by one; no model has more, or a larger size."""


def read_config(path: Path) -> dict[str, Any]:
    """Parse a ``config.json``. Raises ModelError if it cannot be read."""
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
    if str(config.get("model_type")) in WRAPPERS:
        return _text_model(config, str(path))
    if config.get("model_type") == "mistral" and "layer_types" in config:
        config["model_type"] = "ministral"  # as transformers' AutoConfig does
    kinds = config.get("layer_types")
    if isinstance(kinds, list):  # transformers renames this kind in every config
        config["layer_types"] = ["full_attention" if k == "attention" else k for k in kinds]
    return config


def _text_model(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The config of a multimodal wrapper's text model, converted to the family that computes the
    same on text: there multimodal RoPE has equal positions, and is plain RoPE.
    """
    name, row = config["model_type"], WRAPPERS[config["model_type"]]
    text = config.get("text_config", {**config, "model_type": row.usual} if row.is_flat else None)
    kind = text.get("model_type", row.usual) if isinstance(text, dict) else None
    if not isinstance(kind, str) or kind not in row.texts:
        said = f"{kind}: it trains with {', '.join(row.texts)}" if kind else "not in text_config"
        raise ModelError(
            f"{source} is of the family {name}, whose text model is {said}", hint=_OF_TEXT
        )
    tied = config.get("tie_word_embeddings")
    tied = row.is_tied if tied is None else tied
    if row.is_flat:  # a flat class forwards the field to its text model
        tied = tied or text.get("tie_word_embeddings") or False
    found = {**row.defaults, **{k: v for k, v in text.items() if k not in row.unread}}
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(field), dict):
            found[field] = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
            kinds = {k: "default" for k in ("type", "rope_type") if rope.get(k) == "mrope"}
            found[field] |= kinds if name == "qwen2_5_vl" else {}
    whole = {k: config[k] for k in ("quantization_config", "auto_map", "dtype") if k in config}
    own = {"model_type": row.texts[kind], "tie_word_embeddings": tied, TEXT_OF: name}
    return {**{k: v for k, v in found.items() if k != "vision_config"}, **whole, **own}


def config_digest(config: dict[str, Any], source: str) -> str:
    """The digest of a config's content. Raises ModelError for texts that are not Unicode."""
    try:
        return digest(config)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ModelError(
            f"{source} holds what is no text: {error}",
            hint="check the file, or use a catalog name such as `Qwen3-0.6B`",
        ) from error


def trained_family(config: dict[str, Any], source: str) -> str:
    """The config's ``model_type``. Raises ModelError for a family or for features that do not train
    exactly, and for missing fields, which it names.
    """
    family = _family_of_text(config, source)
    refuse_untrained(family, source, has_own_code=has_own_code(config))
    needed = (*MIN_FIELDS, *family_row(family).needs)
    missing = [field for field in needed if config.get(field) is None]
    if missing:
        raise ModelError(
            f"{source}, of the family {family}, has no {', '.join(missing)}",
            hint="use the config.json of a decoder-only causal language model, or `highwater find "
            "Qwen3-0.6B`",
        )
    _refuse_layers(config, source)
    return family


def _refuse_layers(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for layers, logits or attention that no test compares with the class."""
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        for field, neutral in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
            value = config.get(field, neutral)
            if value is not None and value != neutral:
                raise ModelError(
                    f"{field} is {value!r} in {source}: layers without experts among those with "
                    "them are not supported",
                    hint="use a model with experts in every layer, for example Qwen3-30B-A3B, "
                    f"whose {field} is {neutral!r}",
                )
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
    """True if a config refers to the model's own code (``auto_map``), which is never run here."""
    return bool(config.get("auto_map"))


def _family_of_text(config: dict[str, Any], source: str) -> str:
    """The ``model_type`` of a decoder that reads text alone. Raises ModelError for other models."""
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
        why = _obstacle(text, source)
        raise ModelError(
            f"{source} is of the family {family}, which reads more than text: its text model is "
            f"in text_config, and {why or 'nobody has compared it there'}",
            hint=_OF_TEXT if why else alone,
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


def _obstacle(text_config: dict[str, Any], source: str) -> str | None:
    """Reason why a text model would not train alone; None if it would."""
    try:
        refuse_untrained(str(text_config.get("model_type")), source)
        _refuse_layers(text_config, source)
    except ModelError as error:
        return error.problem.replace(source, "it")
    return None


def refuse_features(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for a config whose logits or attention have unsupported features."""
    family, row = config["model_type"], family_row(config["model_type"])
    _refuse_other_sizes(config, source)
    for field, neutral in {**_NEUTRAL, **row.only}.items():
        value = config.get(field)
        is_cap = field == "attn_logit_softcapping" and row.caps_scores
        is_computed = is_cap or transforms(family, field)
        if value is not None and value not in neutral and not is_computed:
            null = () if field in row.needs else (None,)
            allowed = " or ".join(map(repr, (*neutral, *null)))
            raise _unsupported(config, source, field, value, allowed)
    logit_transform_of(config, source)
    for field in row.not_zero:
        if config.get(field) == 0:
            raise _unsupported(config, source, field, 0, "more than 0")
    kinds = value_of(config, "layer_types")
    named = {str(kind) for kind in kinds} if isinstance(kinds, list) else set[str]()
    own = {"full_attention", DELTA_LAYER} if row.delta else ATTENTION_LAYERS
    others = named - ({"full_attention"} if row.other_layers else own)
    if others:
        words = {kind: f"{kind} ({what})" for kind, what in row.other_layers.items()}
        what = ", ".join(words.get(kind, kind) for kind in sorted(others))
        raise ModelError(
            f"{source}, of the family {family}, has layers of {what}, which are no full attention",
            hint="use a model of a family that was compared, for example `highwater find "
            "Qwen3-0.6B`",
        )


def _unsupported(
    config: Mapping[str, Any], source: str, field: str, value: Any, allowed: str
) -> ModelError:
    return ModelError(
        f"{source}, of the family {config['model_type']}, has {field} = {value!r}, which is not "
        f"supported",
        hint=f"use a model whose {field} is {allowed}, for example `highwater find Qwen3-0.6B`",
    )


def _refuse_other_sizes(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for sizes that no test compares with the family's own class: OPT's
    embeddings of a size other than the hidden size, Helium's heads with a different total size, and
    Laguna's layers with different numbers of query heads.
    """
    family, hidden = config["model_type"], config.get("hidden_size")
    heads, head_dim = config.get("num_attention_heads"), value_of(config, "head_dim")
    field, size = "word_embed_proj_dim", None
    if family == "opt":
        size = config.get(field)
    elif family == "helium" and isinstance(heads, int) and isinstance(head_dim, int):
        field, size = "num_attention_heads times head_dim", heads * head_dim
    if size is not None and size != hidden:
        raise ModelError(
            f"{source}, of the family {family}, has {field} = {size!r} beside a hidden_size of "
            f"{hidden!r}, which is not supported",
            hint="use a model where they are the same, for example `highwater find Qwen3-0.6B`",
        )
    field = "num_attention_heads_per_layer"
    by_layer = config.get(field) if family == "laguna" else None
    if isinstance(by_layer, list) and any(each != heads for each in by_layer):
        raise ModelError(
            f"{source} has {field} = {by_layer!r} beside num_attention_heads = {heads!r}: layers "
            f"that have other numbers of heads are not supported",
            hint="use a model whose layers all have as many heads, for example `highwater find "
            "Qwen3-0.6B`",
        )


def refuse_dropout(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for attention dropout, which no fused kernel computes, and for layer
    dropout, with which ranks would wait for each other forever.
    """
    nested = config.get("attn_config")
    blocks = (config, nested if isinstance(nested, Mapping) else {})
    found = ((field, block[field]) for block in blocks for field in _DROPOUT if block.get(field))
    field, value = next(found, (None, None))
    usual = family_row(config["model_type"]).dropout_field
    what = "" if field is None else _DROPOUT[field]
    if field is None and usual is not None and usual not in config:
        field, value, what = usual, "left out", f"{_DROPOUT[usual]} by default"
    if field is not None:
        raise ModelError(
            f"{field} is {value} in {source}, which {what}: that is not supported",
            hint=f"set {field} to 0.0 there",
        )


class Mixture(NamedTuple):
    """Widths and numbers of MLPs and experts; one expert for a model without experts."""

    width: int
    """Width of one expert."""
    dense_width: int
    """Width of the MLP in layers without experts."""
    experts: int = 1
    experts_per_token: int = 1
    shared_size: int = 0
    """Width of the shared MLP, which every token goes through besides its experts; 0: none."""
    dense_layers: int = 0
    """Number of layers without experts, at any place."""


class ConfigSizes(NamedTuple):
    """Sizes of a config, with its class's defaults for missing fields. Methods raise ModelError,
    with the field's name, for impossible values.
    """

    config: Mapping[str, Any]
    source: str
    """The file's path, for error messages."""

    def size(self, field: str) -> int:
        """The value of a required field: a whole number, at least 1."""
        return whole_number(self.config[field], field, self.source)

    def optional_size(self, field: str) -> int | None:
        """The value of an optional field, else its class's default; None without both."""
        value = value_of(self.config, field)
        return None if value is None else whole_number(value, field, self.source)

    def layers(self) -> int:
        """Number of layers."""
        layers = self.size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise ModelError(
                f"{self.source} describes {layers} layers, more than any model has",
                hint="check its num_hidden_layers",
            )
        return layers

    def heads(self) -> AttentionKind:
        """The heads of every layer; key/value heads must divide query heads."""
        query_heads, hidden = self.size("num_attention_heads"), self.size("hidden_size")
        kv_heads = self.optional_size("num_key_value_heads") or query_heads
        head_dim = self.optional_size("head_dim") or hidden // query_heads
        if head_dim < 1 or query_heads % kv_heads:
            raise ModelError(
                f"{query_heads} query heads do not go with {kv_heads} key/value heads and a hidden "
                f"size of {hidden} in {self.source}",
                hint="set num_key_value_heads to a divisor of num_attention_heads, and head_dim to "
                "a whole number, 1 or more",
            )
        return AttentionKind(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)

    def mixture(self) -> Mixture:
        """Widths and numbers of MLPs and experts, from the config or the defaults of its class."""
        row = family_row(self.config["model_type"])
        width = self.optional_size(row.width_field)
        width = dense_width = width or 4 * self.size("hidden_size")
        usual = row.experts
        if usual is None or (usual.switch is not None and not self.config.get(usual.switch)):
            return Mixture(width, dense_width)
        if usual.switch is not None:
            for field in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                whole_number(self.config.get(field), field, self.source)
        if row.dense_width_field is not None:
            dense_width = self.optional_size(row.dense_width_field) or width
        if usual.width is not None:
            width = self.optional_size("moe_intermediate_size") or usual.width
        shared_field, _ = usual.shared
        shared = self._count(usual.shared)
        is_width = shared_field is not None and shared_field.endswith("intermediate_size")
        if usual.may_be_none and any(self.config.get(field) == 0 for field in EXPERT_COUNTS):
            return Mixture(shared, shared)
        kinds = self.config.get("mlp_layer_types")
        dense = kinds.count("dense") if isinstance(kinds, list) else self._count(usual.dense_layers)
        return Mixture(
            width=width,
            dense_width=dense_width,
            experts=self._first_size(EXPERT_COUNTS) or usual.experts,
            experts_per_token=self._experts_per_token(usual.lists_per_token) or usual.per_token,
            shared_size=shared if is_width else width * shared,
            dense_layers=min(dense, self.layers()),
        )

    def _experts_per_token(self, is_listed: bool) -> int | None:
        """Experts per token; a list, which only some classes accept, must be uniform."""
        field = next((name for name in EXPERTS_PER_TOKEN if self.config.get(name) is not None), "")
        found = self.config.get(field)
        if not is_listed or not isinstance(found, list):
            return self._first_size(EXPERTS_PER_TOKEN)
        if len(found) != self.layers() or any(each != found[0] for each in found):
            raise ModelError(
                f"{field} is {found!r} in {self.source}: layers whose tokens go to other numbers "
                f"of experts are not supported",
                hint=f"set {field} to one number, or to a list of it for each of the "
                f"{self.layers()} layers",
            )
        return whole_number(found[0], field, self.source)

    def _first_size(self, fields: Sequence[str]) -> int | None:
        """The value of the first field that the config or its class has; None without any."""
        sizes = (self.optional_size(field) for field in fields)
        return next((found for found in sizes if found is not None), None)

    def _count(self, usual: tuple[str | None, int]) -> int:
        """The value of a field, a whole number that may be 0, else its default; ``usual``: both."""
        field, number = usual
        value = None if field is None else self.config.get(field)
        if field is None or value is None:
            return number
        return 0 if value == 0 else whole_number(value, field, self.source)

    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer in tokens; None for a layer without a window."""
        sliding = [slides(self.config, layer) for layer in range(self.layers())]
        refuse_missing_window(self.config, self.source, some_slide=any(sliding))
        window = self.optional_size("sliding_window") if any(sliding) else None
        return tuple(window if is_sliding else None for is_sliding in sliding)

    def attention(self) -> tuple[AttentionKind, ...]:
        """The attention of each layer."""
        heads, row = self.heads(), family_row(self.config["model_type"])
        how = {
            "has_sinks": row.has_sinks,
            "soft_cap": self.score_cap(),
            "is_gated": row.delta is not None,
        }
        softmax = tuple(heads.replace(window_tokens=window, **how) for window in self.windows())
        if row.has_unlike_layers:
            return self._unlike(softmax)
        if row.delta is None:
            return softmax
        delta = AttentionKind(
            query_heads=self._class_size("linear_num_value_heads"),
            kv_heads=self._class_size("linear_num_key_heads"),
            head_dim=self._class_size("linear_value_head_dim"),
            delta=DeltaKind(
                key_head_dim=self._class_size("linear_key_head_dim"),
                taps=self._class_size("linear_conv_kernel_dim"),
                joins_gate=row.delta == "joined",
            ),
        )
        if delta.query_heads % delta.kv_heads:
            raise ModelError(
                f"{delta.query_heads} value heads do not go with {delta.kv_heads} key heads in "
                f"{self.source}",
                hint="set linear_num_key_heads to a divisor of linear_num_value_heads",
            )
        kinds = self.config.get("layer_types")
        if kinds is None:
            every = self._class_size("full_attention_interval")
            numbers = range(1, self.layers() + 1)
            kinds = [DELTA_LAYER if n % every else "full_attention" for n in numbers]
        return tuple(
            delta if kind == DELTA_LAYER else attention
            for kind, attention in zip(kinds, softmax, strict=True)
        )

    def _unlike(self, layers: Sequence[AttentionKind]) -> tuple[AttentionKind, ...]:
        """The attention of layers that differ: full attention with its own head sizes, and the last
        layers without their own keys.

        Raises ModelError if the class can build no such model, or layers of one kind differ.
        """
        shared = self._count(("num_kv_shared_layers", 0))
        first = len(layers) - shared
        windowed = [layer.window_tokens is not None for layer in layers]
        if shared and {*windowed[: max(0, first)]} != {*windowed}:
            raise ModelError(
                f"the last {shared} of {len(layers)} layers in {self.source} read keys of earlier "
                "layers, which has none of each of their kinds",
                hint="set num_kv_shared_layers to as many layers as the model was trained with",
            )
        if shared and not self.layer_embedding():
            raise ModelError(
                f"{self.source} has num_kv_shared_layers = {shared} and no "
                "hidden_size_per_layer_input, with which its class does not run",
                hint="set num_kv_shared_layers to 0, or hidden_size_per_layer_input above it",
            )
        own = self._heads_of_full_layers(windowed)
        ties = bool(self.config.get("attention_k_eq_v"))
        return tuple(
            layer.replace(
                reads_earlier_keys=number >= first,
                values_are_keys=ties and not windowed[number],
                **({} if windowed[number] else own),
            )
            for number, layer in enumerate(layers)
        )

    def _heads_of_full_layers(self, windowed: Sequence[bool]) -> dict[str, int]:
        """Head sizes of full attention that differ from the window's, from their own fields or from
        ``per_layer_config``, a block for each layer, as transformers writes.
        """
        blocks, full = self.config.get("per_layer_config"), windowed.count(False)
        if blocks is None:
            own = {"head_dim": self._class_size("global_head_dim")}
            keys = self.config.get("num_global_key_value_heads")
            if keys is not None and self.config.get("attention_k_eq_v"):
                own["num_key_value_heads"] = keys
        else:
            blocks = blocks if isinstance(blocks, dict) else {"": blocks}
            # written as 05 where there are ten layers or more
            named = {str(layer).lstrip("0") or "0": block for layer, block in blocks.items()}
            found = [named.pop(str(n), None) for n, slides in enumerate(windowed) if not slides]
            own = found[0] if full and isinstance(found[0], dict) else {}
            if named or found.count(own) != full or {*own} - {"head_dim", "num_key_value_heads"}:
                raise ModelError(
                    f"per_layer_config in {self.source} has layers of one kind differ, or layers "
                    "differ by more than their heads",
                    hint="give every layer of full_attention one head_dim and num_key_value_heads "
                    "there, and no other layer any",
                )
        sizes = {name: whole_number(value, name, self.source) for name, value in own.items()}
        heads, keys = self.heads(), sizes.get("num_key_value_heads", self.heads().kv_heads)
        if heads.query_heads % keys:
            raise ModelError(
                f"{heads.query_heads} query heads do not go with {keys} key/value heads of full "
                f"attention in {self.source}",
                hint="set num_global_key_value_heads to a divisor of num_attention_heads",
            )
        return {"head_dim": sizes.get("head_dim", heads.head_dim), "kv_heads": keys}

    def layer_embedding(self) -> int:
        """Size of each layer's own embedding of a token; 0 if layers have none."""
        field = "hidden_size_per_layer_input"
        return self._count((field, value_of({"model_type": self.config["model_type"]}, field) or 0))

    def _class_size(self, field: str) -> int:
        """The value of a config field for a size that has a default in the class."""
        return whole_number(value_of(self.config, field), field, self.source)

    def score_cap(self) -> float | None:
        """Bound of the attention scores' magnitude; None: no cap."""
        caps = family_row(self.config["model_type"]).caps_scores
        cap = value_of(self.config, "attn_logit_softcapping") if caps else None
        if cap is None:
            return None
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < _LARGEST_SIZE:
            raise ModelError(
                f"attn_logit_softcapping is {cap!r} in {self.source}",
                hint="set attn_logit_softcapping to a number above 0, or to null",
            )
        return float(cap)

    def layers_without_experts(self, mixture: Mixture) -> tuple[bool, ...]:
        """For each layer, True if it has no experts: by ``mlp_layer_types``, or the first ones."""
        layers, kinds = self.config["num_hidden_layers"], self.config.get("mlp_layer_types")
        if mixture.dense_layers and isinstance(kinds, list) and len(kinds) == layers:
            return tuple(kind == "dense" for kind in kinds)
        return tuple(layer < mixture.dense_layers for layer in range(layers))

    def tied_embeddings(self) -> bool:
        """True if the head is the embedding."""
        tied = value_of(self.config, "tie_word_embeddings")
        if tied is not None and not isinstance(tied, bool):
            raise ModelError(
                f"tie_word_embeddings is {tied!r} in {self.source}",
                hint="set tie_word_embeddings to true or false",
            )
        return bool(tied)


def whole_number(value: Any, field: str, source: str) -> int:
    """Check that a field's value is a whole number from 1. Raises ModelError otherwise."""
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
