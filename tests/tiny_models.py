"""Configs of small models, as their folders have them."""

import json
from pathlib import Path
from typing import Any

from highwater.model.model import Model, load_model


def sized(
    vocabulary: int, width: int, layers: int, heads: tuple[int, int], **fields: Any
) -> dict[str, Any]:
    """The fields of these sizes, with heads of queries and of keys; others go by their own name."""
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], **fields}


TINY = {"model_type": "qwen3", "head_dim": 16, "intermediate_size": 192}
TINY |= {"max_position_embeddings": 4096, "tie_word_embeddings": True, **sized(1000, 64, 2, (4, 2))}
SMALLEST = TINY | sized(512, 32, 1, (2, 1), intermediate_size=64, max_position_embeddings=32_768)
"""Its training steps take no time."""
SIZES = sized(64, 32, 2, (4, 2), intermediate_size=48, head_dim=8, max_position_embeddings=64)
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
WIDE_HEADS = TINY | sized(1000, 1024, 2, (8, 4), head_dim=128, intermediate_size=4096)
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
