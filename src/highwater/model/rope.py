"""RoPE: how far a model's positions reach, and the YaRN block for a length beyond that.

Both follow from ``config.json``, without transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.model.families import family_row, value_of
from highwater.model.model import Model
from highwater.model.model_config import read_config
from highwater.model.rope_block import BEFORE_SCALING, rope_block
from highwater.nouns.codec import Record
from highwater.nouns.settings import Rope

_KEPT = ("rope_theta", "partial_rotary_factor")
YARN_IN_USE = 8
"""Largest YaRN factor of published models: Qwen's is 4, OLMo 3's 8. gpt-oss has 32, but was trained
with it from the beginning."""
_ROPE_THETA = 10_000.0
"""The base of RoPE in families without their own default."""


def yarn_parameters(factor: float | str, *, native_length_tokens: int) -> dict[str, str | float]:
    """YaRN's block in transformers' names, to be written, printed or emitted."""
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": native_length_tokens,
    }


def kept_parameters(own: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model's own RoPE block that remain when YaRN replaces the others."""
    return {name: own[name] for name in _KEPT if own.get(name) is not None}


def grows(own: Mapping[str, Any]) -> bool:
    """True if a model's own scaling reaches past its native length: ``dynamic``, whose frequencies
    follow each document's length; but not with Hunyuan's ``alpha``, which fixes them.
    """
    return own.get("rope_type", own.get("type")) == "dynamic" and not own.get("alpha")


def unscalable(model: Model) -> str | None:
    """Reason why YaRN cannot scale the model past its native length, in words; None: it can."""
    family, row = model.shape.model_type, family_row(model.shape.model_type)
    if not model.rope:
        return f"{family} has no RoPE to scale"
    blocks = _own(model).values()
    if row.has_rope_by_layer or any(isinstance(value, Mapping) for value in blocks):
        return f"{family} has a RoPE for each kind of layer, which one scaling does not fit"
    return row.unscalable and f"{family} {row.unscalable}, which YaRN does not say"


def ends_at_native(model: Model, rope: Rope) -> bool:
    """True if no scaling, YaRN or the model's own, reaches past the native length."""
    if unscalable(model) is not None:
        return True
    return model.own_rope_scaling and rope == "auto" and not grows(_own(model))


class Yarn(Record, frozen=True, kw_only=True):
    """YaRN's parameters with which a model's positions reach a length."""

    factor: float
    """Length over native length."""
    rope_parameters: dict[str, str | float]
    """YaRN's block, by its name in transformers 5; ``rope_scaling`` in earlier versions."""
    max_position_embeddings: int

    @property
    def block(self) -> dict[str, Any]:
        """The fields to set in the model's ``config.json``."""
        return {
            "rope_parameters": dict(self.rope_parameters),
            "max_position_embeddings": self.max_position_embeddings,
        }


def yarn(model: Model, *, length_tokens: int, rope: Rope = "auto") -> Yarn | None:
    """YaRN's block for a length, as ``engine/models/rope.py`` writes it; None if positions are not
    scaled. ``nouns/plan.py`` refuses lengths that YaRN cannot reach.
    """
    config, own = read_config(Path(model.directory, "config.json")), _own(model)
    native = model.shape.native_length_tokens
    if unscalable(model) is not None or (
        length_tokens <= native and not (model.own_rope_scaling and rope == "yarn")
    ):
        return None
    if model.own_rope_scaling:
        if rope == "auto" and grows(own):
            return None
        # If the class has the field outside the block, that overrides the block's.
        beside = BEFORE_SCALING in family_row(model.shape.model_type).defaults
        before = value_of(config, BEFORE_SCALING) if beside else own.get(BEFORE_SCALING)
        native = int(before or native)
    if length_tokens <= native:
        return None
    factor = length_tokens / native
    return Yarn(
        factor=factor,
        rope_parameters={
            **kept_parameters({**_beside(config), **own}),
            **yarn_parameters(factor, native_length_tokens=native),
        },
        max_position_embeddings=length_tokens,
    )


def _beside(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters that a config or its class has outside the block."""
    names = family_row(config["model_type"]).other_names
    values = {name: value_of(config, names.get(name, name)) for name in _KEPT}
    found = {name: value for name, value in values.items() if value is not None}
    return {"rope_theta": _ROPE_THETA} | found


def _own(model: Model) -> dict[str, Any]:
    path = Path(model.directory, "config.json")
    return rope_block(read_config(path), str(path))
