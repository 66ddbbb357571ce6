"""RoPE past the native length: YaRN, a model's own scaling up to its maximum, or a refusal."""

from typing import Any

from transformers import PreTrainedConfig

from highwater.errors import UsageError
from highwater.model.rope import grows, kept_parameters, yarn_parameters
from highwater.nouns.settings import Rope


def scale_rope(config: PreTrainedConfig, *, length_tokens: int, rope: Rope) -> None:
    """Set the config's RoPE for a length, in place; nothing changes up to the native length.

    YaRN's factor is length / native length; for a model that brings its own scaling and
    ``rope="yarn"``, the native length is the one its scaling started from. Scaling that grows with
    the length (``dynamic``) has no maximum. Raises UsageError past a maximum that cannot or may not
    be exceeded.
    """
    native = config.max_position_embeddings
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    own_scaling = parameters.get("rope_type", "default") != "default"
    if length_tokens <= native and not (own_scaling and rope == "yarn"):
        return
    if "rope_type" not in parameters:
        by_kind = "its RoPE for each kind of layer is not scaled"
        why = by_kind if parameters else "it has no RoPE to scale"
        raise UsageError(
            f"{length_tokens} tokens are past the {native} that {config.model_type} was made for, "
            f"and {why}",
            hint=f"use `--max-length {native}`",
        )
    if own_scaling and rope == "auto":
        if grows(parameters):
            return
        raise UsageError(
            f"{length_tokens} tokens are past the {native} up to which the model's own "
            f"{parameters['rope_type']} scaling goes",
            hint=f"use `--max-length {native}`, or `--rope yarn` to replace it",
        )
    if own_scaling:
        native = parameters.get("original_max_position_embeddings", native)
    if length_tokens <= native:
        return
    config.rope_parameters = {
        **kept_parameters(parameters),
        **yarn_parameters(length_tokens / native, native_length_tokens=native),
    }
    config.max_position_embeddings = length_tokens
