"""LogitTransform: what a family makes of its head's product before the softmax, a factor and a
soft cap, as its ``config.json`` says.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23;
tests/numeric/test_transformed_logits.py compares with those that are installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from highwater.errors import ModelError
from highwater.model.families import LogitField, family_row

_LEAST, _MOST = 1e-6, 1e6
"""Factors and caps beyond these are no model's, and float32 does not hold their logits apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """The softmax sees ``scale * x`` of a logit x, then ``cap * tanh(scale * x / cap)``. It
    grows with x: the smallest and the largest logit stay the smallest and the largest.
    """

    scale: float = 1.0
    """More than 0."""
    soft_cap: float | None = None
    """More than 0; what no logit exceeds either way. None: no cap."""

    @property
    def is_plain(self) -> bool:
        """True if the softmax sees the head's product as it is."""
        return self == PLAIN


PLAIN = LogitTransform()
"""The softmax sees the head's product as it is."""


def transforms(family: str, field: str) -> bool:
    """True if a family's class reads this field of its config to scale or cap logits."""
    rule = family_row(family).logits
    return rule is not None and rule.field == field


def reads_a_transform(family: str) -> bool:
    """True if a family's class scales or caps logits, be it by 1."""
    return family_row(family).logits is not None


def logit_transform_of(config: Mapping[str, Any], source: str) -> LogitTransform:
    """The transform that a config asks of its family's class; ``source`` names it in errors.

    Raises ModelError for a value with which the class makes no model, or no logits.
    """
    rule = family_row(config["model_type"]).logits
    if rule is None:
        return PLAIN
    value = config.get(rule.field, rule.usual)
    if value is None and rule.does == "cap":
        return PLAIN
    number = _checked(value, rule, f"{source}, of the family {config['model_type']},")
    if rule.does == "cap":
        return LogitTransform(soft_cap=number)
    return LogitTransform(scale=number if rule.does == "times" else 1 / number)


def _checked(value: Any, rule: LogitField, source: str) -> float:
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
