"""Cohere's layers: which of Command R7B's and of its mixture's attend within ``sliding_window``,
and where the mixture's class looks for its RoPE.

Source: ``configuration_cohere2.py`` and ``configuration_cohere2_moe.py`` of transformers 5.23;
tests/unit/test_families.py compares layer by layer with those that are installed.
"""

from collections.abc import Mapping
from typing import Any

from highwater.errors import ModelError

COHERE_WITH_WINDOWS = frozenset(("cohere2", "cohere2_moe"))
_USUAL = 4
"""One layer of so many attends to all."""


def cohere_slides(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of these families, counted from 0, attends within the window.

    As ``layer_types`` names them; else every fourth one attends to all, or every
    ``sliding_window_pattern``-th. Those without experts that stand before the others are counted by
    themselves.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "sliding_attention"
    before = _layers_before_experts(config)
    if layer < before:
        return (layer + 1) % _whole(config, "prefix_dense_sliding_window_pattern", 1) != 0
    return (layer - before + 1) % _whole(config, "sliding_window_pattern", _USUAL) != 0


def refuse_unread_rope(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for RoPE that the mixture's class passes over, or builds no model of."""
    if config.get("rope_scaling"):
        raise ModelError(
            f"{source} has rope_scaling = {config['rope_scaling']!r}, which the class of "
            f"{config['model_type']} does not read",
            hint="call it rope_parameters, and give it a rope_theta; or remove rope_scaling",
        )
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and rope and not {"rope_type", "rope_theta"} <= set(rope):
        raise ModelError(
            f"{source} has rope_parameters = {rope!r}, without the rope_type or the rope_theta "
            f"that the class of {config['model_type']} needs there",
            hint='write both, for example {"rope_type": "default", "rope_theta": 10000.0}',
        )


def _layers_before_experts(config: Mapping[str, Any]) -> int:
    if config["model_type"] != "cohere2_moe":
        return 0
    count = config.get("first_k_dense_replace", 0)
    return count if isinstance(count, int) else 0


def _whole(config: Mapping[str, Any], field: str, usual: int) -> int:
    """A field's value; 1 for what is no number of layers, with which no model is built."""
    value = config.get(field, usual)
    return value if isinstance(value, int) and value > 0 else 1
