"""Configs of small models, as their folders have them."""

import json
from pathlib import Path
from typing import Any

from highwater.model.model import Model, load_model

TINY = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALLEST = {
    **TINY,
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 32_768,
}
"""Its training steps take no time."""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
"""Of any family, where every number of a model is compared."""
OF_OTHERS = {
    **TINY,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "intermediate_size": 128,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "hidden_act": "silu",
    "eos_token_id": 1,
}
"""As other trainers read it: nothing is left to a default."""
WIDE_HEADS = {
    **TINY,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 4096,
}
"""With heads as large models have them."""


def config_of(model: str) -> dict[str, Any]:
    return json.loads(Path(load_model(model).directory, "config.json").read_text())


def write_model(directory: Path, config: dict[str, Any] = TINY, **changes: Any) -> Path:
    """A directory with a config; a field set to None is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def written_model(directory: Path, config: dict[str, Any] = TINY, **changes: Any) -> Model:
    """The model of a directory that is written so, as it is read."""
    return load_model(str(write_model(directory, config, **changes)))
