"""ModelShape and Model: what a Hugging Face ``config.json`` says about memory and time, read without transformers."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from highwater.errors import ModelError
from highwater.spec.codec import Noun, digest
from highwater.spec.families import (
    EXPERT_COUNTS,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    MLP_WIDTHS,
    NEEDED,
    UNGATED,
    Experts,
    has_sliding_layers,
    unsupported_dropout,
    value_of,
)
from highwater.spec.files import CONFIG_BYTES, read_file
from highwater.spec.trained_families import refuse_features, refuse_untrained
from highwater.spec.weight_files import refuse_quantised, unties

_LONGEST_NAME = 120
"""Characters of a name that an error repeats."""
MIN_FIELDS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")

WITHOUT_ROPE = frozenset(("opt",))
"""Trained families whose positions are no RoPE: learned, fixed or none. A config.json tells nothing of it."""

_LARGEST_SIZE = 2**31 - 1
_MOST_PARAMETERS = 10**15
"""No model has a size or a count beyond these, and bytes of one that had would not fit into the 64 bits of a document."""
_BEFORE_SCALING = "original_max_position_embeddings"
STATE_BYTES_PER_PARAMETER = 16
"""float32: parameter, gradient and both moments of AdamW."""


class ModelShape(Noun, frozen=True, kw_only=True):
    """The sizes of a decoder-only transformer. Source: the fields of the same meaning in ``config.json``."""

    model_type: str
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP; of one expert in a mixture of experts."""
    vocab_size: int
    native_length_tokens: int
    """``max_position_embeddings``: the longest length the model was made for."""
    tied_embeddings: bool
    """The head is the embedding: as the config says, unless the files hold both, and different ones."""
    experts: int = 1
    experts_per_token: int = 1
    balanced_experts: bool = False
    """The config asks for the routers' auxiliary loss, which keeps their probabilities."""
    shared_expert_size: int = 0
    """Width of the MLP that every token goes through beside its experts; 0 where there is none."""
    dense_layers: int = 0
    """Layers of a mixture of experts that have one MLP in the place of experts."""
    dense_intermediate_size: int = 0
    """Width of that MLP."""
    mlp_matrices: int = 3
    """Weights of an MLP: gate, up and down, or 2 where there is no gate."""

    @property
    def parameters(self) -> int:
        """Parameters of a decoder of this shape, norms included, biases not; within 0.1 % for the catalog."""
        router = self.hidden_size * self.experts if self.experts > 1 else 0
        per_layer = self._attention_parameters + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        in_mlps = self._mlp_parameters(self.experts, router=router)
        return self.layers * per_layer + in_mlps + embeddings + self.hidden_size

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: layers (the routed experts only) and the head, no embedding."""
        in_mlps = self._mlp_parameters(self.experts_per_token, router=0)
        return self.layers * self._attention_parameters + in_mlps + self.vocab_size * self.hidden_size

    def _mlp_parameters(self, experts: int, *, router: int) -> int:
        """Of the MLPs of all layers, with so many experts in each that has them."""
        widths = (self.layers - self.dense_layers) * (self.intermediate_size * experts + self.shared_expert_size)
        widths += self.dense_layers * self.dense_intermediate_size
        return self.mlp_matrices * self.hidden_size * widths + (self.layers - self.dense_layers) * router

    @property
    def _attention_parameters(self) -> int:
        return 2 * self.hidden_size * self.head_dim * (self.query_heads + self.kv_heads)


class Model(Noun, frozen=True, kw_only=True):
    """A model that can be trained: its name, its directory and its shape."""

    name: str
    """Last component of the path, or the catalog name; the name in tables and log paths."""
    directory: str
    """Absolute path that holds ``config.json``, and maybe ``*.safetensors``."""
    config_digest: str
    """Digest of the parsed ``config.json``: two paths with one digest are one model."""
    shape: ModelShape
    own_rope_scaling: bool
    """The config brings RoPE scaling of its own."""
    rope: bool = True
    """Its positions are RoPE, which can be scaled past the native length."""


def load_model(name_or_path: str) -> Model:
    """The model in a directory with ``config.json``, or of a catalog name such as ``Qwen3-0.6B``.

    Raises ModelError when there is none, when the config lacks a field that training needs, or when the weights beside it are
    quantised, incomplete or no model's (spec/weight_files.py). What is read of them is their headers.
    """
    try:
        directory = Path(name_or_path).expanduser()
        if not (directory / "config.json").is_file():
            directory = _catalog_directory(name_or_path, directory)
        directory = directory.resolve()
    except (OSError, RuntimeError) as error:  # a name too long, a folder without rights; a home that nobody has
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"no model {name_or_path[:_LONGEST_NAME]!r}: {said}", hint="give a directory that can be read, or `Qwen3-0.6B`"
        ) from error
    if not _is_utf_8(str(directory)):
        raise ModelError(f"the directory {directory} is not named in UTF-8", hint="rename it: a study has to name it")
    source = str(directory / "config.json")
    config = read_config(directory / "config.json")
    shape = shape_of(config, source=source)
    refuse_quantised(directory, config)
    _refuse_dropout(config, source)
    if shape.tied_embeddings and unties(directory):
        shape = msgspec.structs.replace(shape, tied_embeddings=False)
    return Model(
        name=directory.name,
        directory=str(directory),
        config_digest=_digest(config, source),
        shape=shape,
        own_rope_scaling=_own_rope_scaling(config, source),
        rope=shape.model_type not in WITHOUT_ROPE,
    )


def _refuse_dropout(config: dict[str, Any], source: str) -> None:
    """Raise ModelError for dropout that no fused attention computes, or that would leave other ranks waiting."""
    dropout = unsupported_dropout(config)
    if dropout is not None:
        field, value, what = dropout
        raise ModelError(f"{field} is {value} in {source}, which {what}: that is not supported", hint=f"set {field} to 0.0 there")


def window_tokens(model: Model) -> int | None:
    """The longest document that every layer of a model attends to whole: its sliding window; None where it has none.

    Read off its config, as transformers reads it, and no field of the model: what a study asked stays what it was.
    """
    path = Path(model.directory, "config.json")
    config = read_config(path)
    return _optional_size(config, "sliding_window", str(path)) if has_sliding_layers(config) else None


def catalog_names() -> list[str]:
    """Names of the models whose shapes ship with the package, smallest name first."""
    return sorted(entry.name for entry in (files("highwater.spec") / "catalog" / "models").iterdir() if entry.is_dir())


def shape_of(config: dict[str, Any], *, source: str) -> ModelShape:
    """The shape in a parsed ``config.json``; ``source`` names it in errors. What it lacks is as its class in transformers has it.

    Raises ModelError for missing fields, sizes that cannot be, encoder-decoder models, and those that read more than text.
    """
    family = _family(config, source)
    heads, hidden = _size(config, "num_attention_heads", source), _size(config, "hidden_size", source)
    kv_heads = _optional_size(config, "num_key_value_heads", source) or heads
    head_dim = _optional_size(config, "head_dim", source) or hidden // heads
    if head_dim < 1 or heads % kv_heads:
        raise ModelError(
            f"{heads} query heads do not go with {kv_heads} key/value heads and a hidden size of {hidden} in {source}",
            hint="set num_key_value_heads to a divisor of num_attention_heads, and head_dim to a whole number, 1 or more",
        )
    width = _optional_size(config, MLP_WIDTHS.get(family, "intermediate_size"), source) or 4 * hidden
    mixture = _mixture(config, EXPERTS[family], width, source) if family in EXPERTS else _Mixture(width)
    shape = ModelShape(
        model_type=family,
        hidden_size=hidden,
        layers=_size(config, "num_hidden_layers", source),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mixture.width,
        vocab_size=_size(config, "vocab_size", source),
        native_length_tokens=_size(config, "max_position_embeddings", source),
        tied_embeddings=_tied_embeddings(config, source),
        experts=mixture.experts,
        experts_per_token=mixture.experts_per_token,
        balanced_experts=mixture.experts > 1
        and config.get("output_router_logits") is True
        and config.get("router_aux_loss_coef") != 0,
        shared_expert_size=mixture.shared_size,
        dense_layers=mixture.dense_layers,
        dense_intermediate_size=width if mixture.dense_layers else 0,
        mlp_matrices=2 if family in UNGATED else 3,
    )
    if shape.experts_per_token > shape.experts > 1:
        raise ModelError(
            f"each token goes to {shape.experts_per_token} experts of {shape.experts} in {source}",
            hint=f"set num_experts_per_tok to {shape.experts} or less",
        )
    if shape.parameters > _MOST_PARAMETERS:
        raise ModelError(f"{source} describes {shape.parameters} parameters, more than any model has", hint="check its sizes")
    return shape


class _Mixture(NamedTuple):
    """What a config says of experts; of a family without, one expert."""

    width: int
    """Of one expert."""
    experts: int = 1
    experts_per_token: int = 1
    shared_size: int = 0
    dense_layers: int = 0


def _mixture(config: dict[str, Any], usual: Experts, mlp_width: int, source: str) -> _Mixture:
    """The experts of a family that has them, by whichever of the fields its config has; else the usual ones of its class."""

    def first(fields: Sequence[str]) -> int | None:
        return next((size for field in fields if (size := _optional_size(config, field, source)) is not None), None)

    width = mlp_width
    if usual.width is not None:
        width = _optional_size(config, "moe_intermediate_size", source) or usual.width
    shared_field, _ = usual.shared
    shared = _count(config, usual.shared, source)
    is_width = shared_field is not None and shared_field.endswith("intermediate_size")
    kinds, layers = config.get("mlp_layer_types"), _size(config, "num_hidden_layers", source)
    dense = kinds.count("dense") if isinstance(kinds, list) else _count(config, usual.dense_layers, source)
    return _Mixture(
        width=width,
        experts=first(EXPERT_COUNTS) or usual.experts,
        experts_per_token=first(EXPERTS_PER_TOKEN) or usual.per_token,
        shared_size=shared if is_width else width * shared,
        dense_layers=min(dense, layers),
    )


def _count(config: dict[str, Any], usual: tuple[str | None, int], source: str) -> int:
    """What a config says of a field, a whole number that may be 0, or else the usual one."""
    field, number = usual
    value = None if field is None else config.get(field)
    if field is None or value is None:
        return number
    return 0 if value == 0 else _checked(value, field, source)


def _family(config: dict[str, Any], source: str) -> str:
    """The config's ``model_type``; raises ModelError, by that name, for a family whose shape this package does not read."""
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        said = "has no model_type" if family is None else f"has the model_type {family!r}"
        raise ModelError(f"{source} {said}", hint="set model_type to the name of a family, for example llama or qwen3")
    if isinstance(config.get("text_config"), dict):
        raise ModelError(
            f"{source} is of the family {family}, which reads more than text: its text model is in text_config",
            hint="save the text model alone, and give its directory: a config.json without text_config",
        )
    if "text_config" in config:
        raise ModelError(
            f"{source}, of the family {family}, has the text_config {config['text_config']!r}",
            hint="remove text_config, or use the config.json that the model came with",
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{source} is of the family {family}: an encoder-decoder model", hint="use a decoder-only causal language model"
        )
    refuse_untrained(family, source)
    missing = [field for field in (*MIN_FIELDS, *NEEDED.get(family, ())) if config.get(field) is None]
    if missing:
        raise ModelError(
            f"{source}, of the family {family}, has no {', '.join(missing)}",
            hint="use the config.json of a decoder-only causal language model, or `highwater find Qwen3-0.6B`",
        )
    if family in ("qwen2_moe", "qwen3_moe"):
        _refuse_dense_layers(config, source)
    refuse_features(config, source)
    return family


def _refuse_dense_layers(config: dict[str, Any], source: str) -> None:
    """Raise ModelError where some layers of a mixture of experts have none: all layers of a shape are alike."""
    for field, neutral in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        value = config.get(field, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                f"{field} is {value!r} in {source}: layers without experts among those with them are not supported",
                hint=f"use a model with experts in every layer, for example Qwen3-30B-A3B, whose {field} is {neutral!r}",
            )


def _tied_embeddings(config: dict[str, Any], source: str) -> bool:
    tied = value_of(config, "tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ModelError(f"tie_word_embeddings is {tied!r} in {source}", hint="set tie_word_embeddings to true or false")
    return bool(tied)


def _catalog_directory(name: str, tried: Path) -> Path:
    if "/" not in name and name in catalog_names():
        return Path(str(files("highwater.spec") / "catalog" / "models" / name))
    known = ", ".join(catalog_names())
    base = name.rstrip("/").rpartition("/")[2]
    if not tried.is_dir() and base in catalog_names():
        raise ModelError(f"no model {name!r}: not a directory", hint=f"the catalog calls it `{base}`")
    if tried.is_dir():
        raise ModelError(f"{tried} has no config.json", hint=f"give the directory of a Hugging Face model, or one of {known}")
    raise ModelError(f"no model {name!r}: not a directory, not in the catalog", hint=f"give a directory, or one of {known}")


def read_config(path: Path) -> dict[str, Any]:
    """A parsed ``config.json``; raises ModelError for one that cannot be read."""
    try:
        config = json.loads(read_file(path, most_bytes=CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}", hint="check the file, or use a catalog name such as `Qwen3-0.6B`"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object", hint="use the config.json of a Hugging Face model")
    return config


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(config: dict[str, Any], source: str) -> str:
    try:
        return digest(config)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ModelError(
            f"{source} holds what is no text: {error}", hint="check the file, or use a catalog name such as `Qwen3-0.6B`"
        ) from error


def rope_block(config: dict[str, Any], source: str) -> dict[str, Any]:
    """RoPE's own parameters in a ``config.json``, or those of its class; empty where neither has any.

    Raises ModelError for what is no such block.
    """
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelError(
                f"{field} is {rope!r} in {source}, not a block of fields",
                hint=f'remove {field}, or write for example {{"rope_type": "yarn", "factor": 4.0}}',
            )
        if rope:
            if rope.get(_BEFORE_SCALING) is not None:
                _checked(rope[_BEFORE_SCALING], _BEFORE_SCALING, source)
            return rope
    return dict(value_of(config, "rope_parameters") or {})


def _own_rope_scaling(config: dict[str, Any], source: str) -> bool:
    rope = rope_block(config, source)
    return rope.get("rope_type", rope.get("type", "default")) != "default"


def _size(config: dict[str, Any], field: str, source: str) -> int:
    return _checked(config[field], field, source)


def _optional_size(config: dict[str, Any], field: str, source: str) -> int | None:
    value = value_of(config, field)
    return None if value is None else _checked(value, field, source)


def _checked(value: Any, field: str, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_SIZE:
        most = f", {_LARGEST_SIZE} at the most" if isinstance(value, int) and value > _LARGEST_SIZE else ""
        raise ModelError(f"{field} is {value!r} in {source}", hint=f"set {field} to a whole number, 1 or more{most}")
    return value
