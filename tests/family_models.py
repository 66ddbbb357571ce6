"""Tiny models of every causal family of the installed transformers, with random weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tables import table

VOCABULARY = 128
WINDOW = 64
"""Of families that have one: longer than every document, so that it is full attention."""
MOST_PARAMETERS = 2_000_000
TINY: dict[str, Any] = table("families", "tiny")
"""A value for each field of that name; a family without the field does not get it."""
WINDOWS = (
    *(
        *("sliding_window", "window_size", "attention_window_size", "local_attention"),
        *("keep_window_size", "sliding_window_size"),
    ),
    *("attention_chunk_size", "index_topk", "index_block_size"),
)
"""Fields that say how many tokens a layer attends to."""
OWN: dict[str, dict[str, Any]] = table("families", "own")
"""Fields of one family that the generic way gets wrong; None leaves a field at its default."""
WRAPPED: dict[str, dict[str, Any]] = table("families", "wrapped")
"""Classes that read images, too: the family of the text model in it, and what is its own."""


def families() -> list[str]:
    """Every model type that ``AutoModelForCausalLM`` builds, by name."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, *, window: int = WINDOW) -> Any:
    """The family's config, every known size of it small."""
    if family in WRAPPED:
        text, own = WRAPPED[family]["text"], WRAPPED[family]["own"]
        inner = tiny_config(text, window=window).to_dict() | WRAPPED[family].get("fields", {})
        return CONFIG_MAPPING[own.get("model_type", family)](
            **{**{k: v for k, v in own.items() if k != "model_type"}, "text_config": inner}
        )
    kind = CONFIG_MAPPING[OWN.get(family, {}).get("model_type", family)]
    usual = kind().to_dict()
    known = set(usual) | set(getattr(kind, "attribute_map", {}))
    windows = dict.fromkeys(WINDOWS, window)
    fields = {
        **{name: value for name, value in (TINY | windows).items() if name in known},
        **_layers(usual),
        **OWN.get(family, {}),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return kind(**{name: value for name, value in given.items() if name != "model_type"})


def _layers(usual: dict[str, Any]) -> dict[str, Any]:
    """A layer or two of every kind that a family's usual config has."""
    kinds = list(dict.fromkeys(usual.get("layer_types") or ()))
    if kinds == ["full_attention"] and usual.get("sliding_window") is not None:
        kinds.append("sliding_attention")
    if len(kinds) < 2 and kinds in ([], ["full_attention"]):
        return {}
    return {
        "layer_types": kinds * (2 // len(kinds)) or kinds,
        "num_hidden_layers": max(2, len(kinds)),
    }


def save_tiny(family: str, folder: Path, *, window: int = WINDOW) -> None:
    """A tiny model of the family, in a directory of its name."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
        with torch.device("meta"):
            tiny = kind.from_config(tiny_config(family, window=window))
            parameters = sum(p.numel() for p in tiny.parameters())
        if parameters > MOST_PARAMETERS:
            raise ValueError(f"{parameters:,} parameters are not tiny")
        model = kind.from_config(tiny_config(family, window=window), dtype=torch.float32)
        randomise(model)
        model.save_pretrained(folder / family)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Values that tell every parameter from a constant: matrices keep the size of what they
    multiply, the rest moves a little.

    What a checkpoint saves of buffers moves too, where it is not a whole number.
    """
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer) * 0.2)


def read(folder: Path, family: str) -> dict[str, Any]:
    return json.loads((folder / family / "config.json").read_text())
