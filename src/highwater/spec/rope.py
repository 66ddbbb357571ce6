"""Rope: the YaRN block that a length past the native one needs, read off a model's ``config.json`` without transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.spec.codec import Noun
from highwater.spec.model import Model, read_config, rope_block
from highwater.spec.settings import Rope

_KEPT = ("rope_theta", "partial_rotary_factor")


def yarn_parameters(factor: float | str, *, native_length_tokens: int) -> dict[str, str | float]:
    """YaRN's block, by the names of transformers: what this package writes, prints or emits of it begins here."""
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": native_length_tokens}


def kept_parameters(own: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of a model's own parameters where YaRN takes their place."""
    return {name: own[name] for name in _KEPT if own.get(name) is not None}


class Yarn(Noun, frozen=True, kw_only=True):
    """What to write into a config so that its positions reach a length."""

    factor: float
    """Length over native length."""
    rope_parameters: dict[str, str | float]
    """As transformers 5 names them; ``rope_scaling`` before."""
    max_position_embeddings: int

    @property
    def block(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        return {"rope_parameters": dict(self.rope_parameters), "max_position_embeddings": self.max_position_embeddings}


def yarn(model: Model, *, length_tokens: int, rope: Rope = "auto") -> Yarn | None:
    """The block that ``engine/rope.py`` writes for a length; None where positions stay as they are.

    A length that cannot be reached is refused before: see ``spec/plan.py``.
    """
    path = Path(model.directory, "config.json")
    config = read_config(path)
    own = rope_block(config, str(path))
    native = model.shape.native_length_tokens
    if not model.rope or (length_tokens <= native and not (model.own_rope_scaling and rope == "yarn")):
        return None
    if model.own_rope_scaling:
        native = int(own.get("original_max_position_embeddings") or native)
    if length_tokens <= native:
        return None
    factor = length_tokens / native
    return Yarn(
        factor=factor,
        rope_parameters={**kept_parameters({**config, **own}), **yarn_parameters(factor, native_length_tokens=native)},
        max_position_embeddings=length_tokens,
    )
