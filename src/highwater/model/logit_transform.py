"""LogitTransform: what a family makes of its head's product before the softmax, a factor and a
soft cap, as its ``config.json`` says.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23;
tests/numeric/test_transformed_logits.py compares with those that are installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from highwater.errors import ModelError

_LEAST, _MOST = 1e-6, 1e6
"""Factors and caps beyond these are no model's, and float32 does not hold their logits apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What the softmax sees of a logit x: ``scale * x``, then ``cap * tanh(scale * x / cap)``.

    It grows with x: the smallest and the largest logit stay the smallest and the largest.
    """

    scale: float = 1.0
    """More than 0."""
    soft_cap: float | None = None
    """More than 0; what no logit exceeds either way. None: no cap."""

    @property
    def is_plain(self) -> bool:
        """Whether the softmax sees the head's product as it is."""
        return self == PLAIN


PLAIN = LogitTransform()
"""The softmax sees the head's product as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitField:
    """What a family reads of its config."""

    field: str
    does: Literal["times", "over", "cap"]
    """Multiplies logits, divides them, or caps them."""
    usual: float | None
    """Of the class, where the config leaves the field out; None: no cap."""
    takes_whole: bool = False
    """Whether the class takes a whole number."""


_SCALE = _LogitField(field="logit_scale", does="times", usual=0.0625)
_DIVISOR = _LogitField(field="logits_scaling", does="over", usual=1.0, takes_whole=True)
_CAP = _LogitField(field="final_logit_softcapping", does="cap", usual=30.0)
_RULES: Mapping[str, _LogitField] = {
    "beam": _LogitField(field=_CAP.field, does="cap", usual=30.0, takes_whole=True),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), _SCALE),
    "gemma2": _CAP,
    "gemma3_text": _LogitField(field=_CAP.field, does="cap", usual=None),
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa"), _DIVISOR),
    "granitemoeshared": _DIVISOR,
    "hyperclovax": _LogitField(field=_DIVISOR.field, does="times", usual=1.0, takes_whole=True),
    "nanochat": _LogitField(field=_CAP.field, does="cap", usual=15.0),
    "vaultgemma": _CAP,
}
"""Families whose class scales or caps logits; HyperCLOVA X multiplies where Granite divides."""


def transforms(family: str, field: str) -> bool:
    """Whether a family's class reads this field of its config to scale or cap logits."""
    return family in _RULES and _RULES[family].field == field


def reads_a_transform(family: str) -> bool:
    """Whether a family's class scales or caps logits, be it by 1."""
    return family in _RULES


def logit_transform_of(config: Mapping[str, Any], source: str) -> LogitTransform:
    """The transform that a config asks of its family's class; ``source`` names it in errors.

    Raises ModelError for a value with which the class makes no model, or no logits.
    """
    rule = _RULES.get(config["model_type"])
    if rule is None:
        return PLAIN
    value = config.get(rule.field, rule.usual)
    if value is None and rule.does == "cap":
        return PLAIN
    number = _checked(value, rule, f"{source}, of the family {config['model_type']},")
    if rule.does == "cap":
        return LogitTransform(soft_cap=number)
    return LogitTransform(scale=number if rule.does == "times" else 1 / number)


def _checked(value: Any, rule: _LogitField, source: str) -> float:
    """The value; raises ModelError for what is no number of the kind that the class takes."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_within = (is_whole or isinstance(value, float)) and _LEAST <= value <= _MOST
    if is_within and (rule.takes_whole or not is_whole):
        return float(value)
    usual = 30.0 if rule.does == "cap" else rule.usual
    raise ModelError(
        f"{source} has {rule.field} = {value!r}",
        hint=f"set {rule.field} to a number from {_LEAST:g} to {_MOST:g}, with a decimal point, "
        f"for example {float(value) if is_within else usual}",
    )
