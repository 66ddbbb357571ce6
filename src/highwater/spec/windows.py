"""Windows: which layers of a family attend within ``sliding_window``, as transformers builds them.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23;
tests/unit/test_families.py compares layer by layer with those that are installed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from highwater.spec.families import value_of

Config = Mapping[str, Any]
"""A parsed ``config.json``."""
Slides = Callable[[Config, int], bool]
"""Whether the layer of this number, counted from 0, attends within the window."""


def slides(config: Config, layer: int) -> bool:
    """Whether a layer, counted from 0, attends within ``sliding_window``, if the config has one."""
    family = config["model_type"]
    if family in _SWITCHED_ON and not config.get("use_sliding_window"):
        return False
    if family not in _WINDOW_BY_LAYER:
        return family in _WINDOW_IN_EVERY_LAYER
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "sliding_attention"
    return _WINDOW_BY_LAYER[family](config, layer)


def _every_layer(config: Config, layer: int) -> bool:  # noqa: ARG001 (the others read them)
    return True


def _no_layer(config: Config, layer: int) -> bool:  # noqa: ARG001
    return False


def _all_but_every(number: int | str) -> Slides:
    """All layers but every n-th one; n, or the field that holds it."""

    def slides_between(config: Config, layer: int) -> bool:
        every = value_of(config, number) if isinstance(number, str) else number
        # Of anything that is no number transformers builds no model; the window holds everywhere.
        return not isinstance(every, (int, float)) or every <= 0 or (layer + 1) % every != 0

    return slides_between


def _all_but_the_first_of_four(config: Config, layer: int) -> bool:  # noqa: ARG001
    return layer % 4 != 0


def _from_max_window_layers(config: Config, layer: int) -> bool:
    first = value_of(config, "max_window_layers")
    return not isinstance(first, int) or layer >= first


def _every_second_up_to_max_window_layers(config: Config, layer: int) -> bool:
    end = value_of(config, "max_window_layers")
    return layer % 2 == 0 and (not isinstance(end, int) or layer < end)


def _without_rope(config: Config, layer: int) -> bool:
    rotated, interval = config.get("no_rope_layers"), value_of(config, "no_rope_layer_interval")
    if isinstance(rotated, list):
        return layer < len(rotated) and rotated[layer] == 0
    return isinstance(interval, int) and (interval == 0 or (layer + 1) % interval == 0)


_WINDOW_IN_EVERY_LAYER = frozenset(
    (
        "ministral3",
        "mistral",
        "mixtral",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen3_moe",
        "starcoder2",
    )
)
"""Families whose attention takes ``sliding_window`` as it is, whatever ``layer_types`` says."""
_WINDOW_BY_LAYER: Mapping[str, Slides] = {
    "afmoe": _all_but_every("global_attn_every_n_layers"),
    "cwm": _all_but_the_first_of_four,
    "dots1": _from_max_window_layers,
    "exaone4": _all_but_every("sliding_window_pattern"),
    "exaone_moe": _all_but_every("sliding_window_pattern"),
    "gemma3_text": _all_but_every("sliding_window_pattern"),
    "gemma2": _all_but_every(2),
    "gpt_oss": _all_but_every(2),
    "granite_swa": _all_but_the_first_of_four,
    "granitemoe_swa": _all_but_the_first_of_four,
    "kolibri1": _all_but_every(5),
    "laguna": _no_layer,
    "mellum": _no_layer,
    "ministral": _every_layer,
    "olmo3": _all_but_every(4),
    "qwen2": _from_max_window_layers,
    "qwen2_moe": _every_second_up_to_max_window_layers,
    "qwen3": _from_max_window_layers,
    "smollm3": _without_rope,
}
"""Families whose window is in the layers that ``layer_types`` names, and the layers that their
class names where the config has none. A family in neither list has no window, whatever its config
says."""
_SWITCHED_ON = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"))
"""Families whose window is there only with ``use_sliding_window``."""
