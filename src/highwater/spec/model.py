"""ModelShape and Model: what a Hugging Face ``config.json`` says about memory and time, read without transformers."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from highwater.errors import ModelError
from highwater.spec.codec import Noun, digest

MIN_FIELDS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")

WITHOUT_ROPE = frozenset(
    (
        *("opt", "xglm", "biogpt", "gpt2", "gpt-sw3", "gpt_neo", "gpt_bigcode", "openai-gpt", "ctrl", "gptj", "codegen"),
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
        *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        *("jamba", "nemotron_h", "zamba"),
    )
)
"""Model types whose transformers config has no RoPE parameters: positions that are learned, fixed, rotated by a table, or none.

A list, because a config.json tells nothing: many with RoPE leave it to their type's default. Types that are not here have it.
"""

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
    experts: int = 1
    experts_per_token: int = 1

    @property
    def parameters(self) -> int:
        """Parameters of a gated-MLP decoder of this shape, norms included, biases not; within 0.1 % for the catalog."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.experts if self.experts > 1 else 0
        per_layer = self._attention_parameters + mlp * self.experts + router + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * per_layer + embeddings + self.hidden_size

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: layers (the routed experts only) and the head, no embedding."""
        mlp = 3 * self.hidden_size * self.intermediate_size * self.experts_per_token
        return self.layers * (self._attention_parameters + mlp) + self.vocab_size * self.hidden_size

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

    Raises ModelError when there is none, or when the config lacks a field that training needs.
    """
    directory = Path(name_or_path).expanduser()
    if not (directory / "config.json").is_file():
        directory = _catalog_directory(name_or_path, directory)
    directory = directory.resolve()
    if not _is_utf_8(str(directory)):
        raise ModelError(f"the directory {directory} is not named in UTF-8", hint="rename it: a study has to name it")
    config = read_config(directory / "config.json")
    return Model(
        name=directory.name,
        directory=str(directory),
        config_digest=digest(config),
        shape=shape_of(config, source=str(directory / "config.json")),
        own_rope_scaling=_own_rope_scaling(config),
        rope=config.get("text_config", config).get("model_type") not in WITHOUT_ROPE,
    )


def catalog_names() -> list[str]:
    """Names of the models whose shapes ship with the package, smallest name first."""
    return sorted(entry.name for entry in (files("highwater.spec") / "catalog" / "models").iterdir() if entry.is_dir())


def shape_of(config: dict[str, Any], *, source: str) -> ModelShape:
    """The shape in a parsed ``config.json``; ``source`` names it in errors.

    Raises ModelError for missing fields, sizes that are no positive integers, and encoder-decoder models.
    """
    config = config.get("text_config", config)
    missing = [field for field in MIN_FIELDS if config.get(field) is None]
    if missing:
        raise ModelError(
            f"{source} has no {', '.join(missing)}",
            hint="use the config.json of a decoder-only causal language model, or `highwater find Qwen3-0.6B`",
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{source} describes an encoder-decoder model", hint="use a decoder-only causal language model")
    heads = _size(config, "num_attention_heads", source)
    hidden = _size(config, "hidden_size", source)
    experts = _optional_size(config, "num_experts", source) or _optional_size(config, "num_local_experts", source) or 1
    expert_width = _optional_size(config, "moe_intermediate_size", source) if experts > 1 else None
    return ModelShape(
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        layers=_size(config, "num_hidden_layers", source),
        query_heads=heads,
        kv_heads=_optional_size(config, "num_key_value_heads", source) or heads,
        head_dim=_optional_size(config, "head_dim", source) or hidden // heads,
        intermediate_size=expert_width or _optional_size(config, "intermediate_size", source) or 4 * hidden,
        vocab_size=_size(config, "vocab_size", source),
        native_length_tokens=_size(config, "max_position_embeddings", source),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=_optional_size(config, "num_experts_per_tok", source) or 1,
    )


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
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def _own_rope_scaling(config: dict[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type", "default")) != "default"


def _size(config: dict[str, Any], field: str, source: str) -> int:
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{field} is {value!r} in {source}", hint=f"set {field} to a whole number, 1 or more")
    return value


def _optional_size(config: dict[str, Any], field: str, source: str) -> int | None:
    return None if config.get(field) is None else _size(config, field, source)
