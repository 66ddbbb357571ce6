"""Rope: how far a model's positions reach, and the YaRN block of a length past them, from ``config.json``, without transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.spec.codec import Noun
from highwater.spec.families import CLASS_DEFAULTS, ROPE_BY_LAYER, value_of
from highwater.spec.model import Model, read_config, rope_block
from highwater.spec.settings import Rope

WITHOUT_YARN_IN_FILES = ("phi3",)
"""Families whose config class takes no YaRN: it trains, and what is saved of it cannot be loaded."""
_KEPT = ("rope_theta", "partial_rotary_factor")
_OLD_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""What families call them beside ``rope_parameters``."""
_ROPE_THETA = 10_000.0
"""The base of a family that has none of its own."""
_BEFORE_SCALING = "original_max_position_embeddings"


def yarn_parameters(factor: float | str, *, native_length_tokens: int) -> dict[str, str | float]:
    """YaRN's block, by the names of transformers: what this package writes, prints or emits of it begins here."""
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": native_length_tokens}


def kept_parameters(own: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of a model's own parameters where YaRN takes their place."""
    return {name: own[name] for name in _KEPT if own.get(name) is not None}


def grows(own: Mapping[str, Any]) -> bool:
    """Whether a model's own scaling goes on past its native length: ``dynamic``, whose frequencies follow each document's length.

    Not with Hunyuan's ``alpha``, which fixes them.
    """
    return own.get("rope_type", own.get("type")) == "dynamic" and not own.get("alpha")


def unscalable(model: Model) -> str | None:
    """Why no YaRN takes the model's positions past its native length, in words; None where it can."""
    family = model.shape.model_type
    if not model.rope:
        return f"{family} has no RoPE to scale"
    if family in ROPE_BY_LAYER or any(isinstance(value, Mapping) for value in _own(model).values()):
        return f"{family} has a RoPE for each kind of layer, which one scaling does not fit"
    if family == "ministral3":
        return "ministral3 scales its queries by their positions, which YaRN does not say"
    if family == "phimoe":
        return "phimoe scales cosines by the length, which YaRN does not say"
    return None


def ends_at_native(model: Model, rope: Rope) -> bool:
    """Nothing scales the positions past the native length: nothing can, or the model brings its own scaling, up to there."""
    return unscalable(model) is not None or (model.own_rope_scaling and rope == "auto" and not grows(_own(model)))


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
    config, own = read_config(Path(model.directory, "config.json")), _own(model)
    native = model.shape.native_length_tokens
    if unscalable(model) is not None or (length_tokens <= native and not (model.own_rope_scaling and rope == "yarn")):
        return None
    if model.own_rope_scaling:
        if rope == "auto" and grows(own):
            return None
        beside = _BEFORE_SCALING in CLASS_DEFAULTS[model.shape.model_type]  # a field of the class, which then overrides the block's
        native = int((value_of(config, _BEFORE_SCALING) if beside else own.get(_BEFORE_SCALING)) or native)
    if length_tokens <= native:
        return None
    factor = length_tokens / native
    return Yarn(
        factor=factor,
        rope_parameters={**kept_parameters({**_beside(config), **own}), **yarn_parameters(factor, native_length_tokens=native)},
        max_position_embeddings=length_tokens,
    )


def _beside(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a config has beside its block, or else its class: what the block leaves out."""
    names = _OLD_NAMES.get(config["model_type"], {})
    found = {name: value_of(config, names.get(name, name)) for name in _KEPT}
    return {"rope_theta": _ROPE_THETA} | {name: value for name, value in found.items() if value is not None}


def _own(model: Model) -> dict[str, Any]:
    path = Path(model.directory, "config.json")
    return rope_block(read_config(path), str(path))
