"""Hyperparameters of the optimizer and the objectives. No memory depends on them."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from msgspec.structs import fields

from highwater.errors import UsageError
from highwater.nouns.declaration import NUMBER, TRAINED, DeclaredRecord, flag_of, setting, words_of
from highwater.nouns.settings import Settings

KlEstimator = Literal["k1", "k2", "k3"]


class NumberRange(NamedTuple):
    """The allowed values of a number, in words for an error and as a test."""

    words: str
    holds: Callable[[float], bool]


_NOT_NEGATIVE = NumberRange("0 or more", lambda value: value >= 0)
_POSITIVE = NumberRange("above 0", lambda value: value > 0)
_SHARE = NumberRange("between 0 and 1", lambda value: 0 <= value <= 1)
_BETA = NumberRange("0 or more and below 1", lambda value: 0 <= value < 1)
_ABOVE_1 = NumberRange("above 1, or 0 for none", lambda value: value == 0 or value > 1)


class LossPart(NamedTuple):
    """A part of an objective's loss, such as the clipping of GRPO, with numbers of its own."""

    absent: str
    """Words for a loss without this part."""
    is_in: Callable[[Settings], bool]


_RATIO = LossPart("no ratio to an old policy", lambda it: it.traits.advantages != "none")
_DIVERGENCE = LossPart(
    "no divergence from a reference", lambda it: it.traits.reference == "divergence"
)
_MARGIN = LossPart("no margin over a reference", lambda it: it.traits.reference == "margin")
_ENTROPY = LossPart("no entropy", lambda it: it.entropy != "none")
_VALUES = LossPart("no critic", lambda it: it.critic)
_TOKEN_ADVANTAGES = LossPart(
    "no advantages of single tokens", lambda it: it.traits.advantages == "tokens"
)


def _number(
    default: float, metavar: str, bounds: NumberRange, help_: str, part: LossPart | None = None
) -> float:
    """Declare a hyperparameter of the optimizer, or of a ``part`` of the objective's loss."""
    return NUMBER(
        default,
        help_,
        TRAINED,
        metavar=metavar,
        range=bounds,
        part=part,
        topic="optimizer" if part is None else "objective",
    )


class Hyperparameters(DeclaredRecord, frozen=True, kw_only=True):
    """Hyperparameters that every trial of a search trains with; none of them changes memory."""

    learning_rate: float = _number(
        *(1e-5, "RATE", _NOT_NEGATIVE),
        "AdamW's learning rate; default: 1e-05, and 1e-04 where adapters are trained",
    )
    """The same at every step of a trial; a training's schedule scales it."""
    adam_beta1: float = _number(0.9, "BETA", _BETA, "AdamW's beta of the gradients' running mean")
    adam_beta2: float = _number(0.999, "BETA", _BETA, "AdamW's beta of the squares' running mean")
    adam_epsilon: float = _number(1e-8, "EPSILON", _POSITIVE, "AdamW's epsilon")
    """Added to the root of the squares' mean, which the gradients' mean is divided by."""
    weight_decay: float = _number(
        0.01, "RATE", _NOT_NEGATIVE, "AdamW's weight decay; norms and biases have none"
    )
    """Decoupled from gradients; norms and biases have none, as in transformers' Trainer."""
    max_grad_norm: float = _number(
        1.0, "NORM", _NOT_NEGATIVE, "norm that gradients are clipped to; 0: no clipping"
    )
    clip_ratio_low: float = _number(
        *(0.2, "SHARE", _SHARE),
        "grpo, ppo: how far below 1 a ratio of probabilities counts (TRL's epsilon)",
        _RATIO,
    )
    """A token's gradient stops where its ratio is below 1 minus this."""
    clip_ratio_high: float = _number(
        *(0.2, "SHARE", _NOT_NEGATIVE),
        "grpo, ppo: how far above 1 a ratio of probabilities counts (TRL's epsilon_high)",
        _RATIO,
    )
    dual_clip: float = _number(
        *(3.0, "RATIO", _ABOVE_1),
        "grpo, ppo: largest ratio of a token with a negative advantage (verl's clip_ratio_c, "
        "TRL's delta); 0: none",
        _RATIO,
    )
    """Above it the loss of such a token grows no more."""
    kl_estimator: KlEstimator = setting(
        "k2",
        "grpo: estimator of the divergence from the reference (k3: verl's low_var_kl, and TRL's)",
        part=_DIVERGENCE,
        topic="objective",
        commands=TRAINED,
    )
    """Estimates the divergence from one sampled token."""
    kl_coefficient: float = _number(
        *(0.001, "WEIGHT", _NOT_NEGATIVE),
        "grpo: weight of that divergence (verl's kl_loss_coef, TRL's beta)",
        _DIVERGENCE,
    )
    entropy_coefficient: float = _number(
        *(0.001, "WEIGHT", _NOT_NEGATIVE),
        "grpo, ppo: weight of the entropy, where there is one",
        _ENTROPY,
    )
    """The entropy lowers the loss."""
    dpo_beta: float = _number(
        *(0.1, "WEIGHT", _POSITIVE),
        "dpo: weight of a pair's margin over the reference's (TRL's beta)",
        _MARGIN,
    )
    """Lower values let the policy go further from the reference."""
    value_clip: float = _number(
        *(0.5, "CHANGE", _POSITIVE),
        "ppo with a critic: how far a value may move (verl's cliprange_value)",
        _VALUES,
    )
    """Distance of a value from that before the update, from which on its gradient stops."""
    value_coefficient: float = _number(
        0.5, "WEIGHT", _NOT_NEGATIVE, "ppo with a critic: weight of its squared error", _VALUES
    )
    discount: float = _number(
        1.0, "SHARE", _SHARE, "ppo: discount of rewards (gamma)", _TOKEN_ADVANTAGES
    )
    gae_lambda: float = _number(
        0.95, "SHARE", _SHARE, "ppo: lambda of the generalized advantages", _TOKEN_ADVANTAGES
    )
    """Lower values trust the critic more."""

    def __post_init__(self) -> None:
        """Raise UsageError for a hyperparameter out of its range."""
        for name in NAMES:
            why = out_of_range(name, getattr(self, name))
            if why is not None:
                raise UsageError(why, hint=f"for example `{flag_of(name)} {DEFAULTS[name]}`")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for every number that is not the default."""
        return tuple(words_of({name: getattr(self, name) for name in self._changed}))

    def refuse_unused(self, settings: Settings) -> None:
        """Raise UsageError for a changed hyperparameter that the settings' loss does not use."""
        for name in self._changed:
            part = _ROWS[name].part
            if part is not None and not part.is_in(settings):
                raise UsageError(
                    f"{name.replace('_', ' ')} {getattr(self, name)} would change nothing: the "
                    f"loss of {settings.objective} has {part.absent} here",
                    hint=f"leave `{flag_of(name)}` out",
                )

    @property
    def _changed(self) -> list[str]:
        return [name for name in NAMES if getattr(self, name) != DEFAULTS[name]]


def out_of_range(name: str, value: Any) -> str | None:
    """Message that a hyperparameter's value is out of range; None if it is valid."""
    bounds = _ROWS[name].range
    if bounds is None or (math.isfinite(value) and bounds.holds(value)):
        return None
    return f"{name.replace('_', ' ')} is {value}, and has to be {bounds.words}"


ADAPTERS_RATE = 1e-4
"""Learning rate of a training of adapters, ten times that of all parameters, unless one is named.
Source: QLoRA, https://arxiv.org/abs/2305.14314, table 9 (1e-4 to 2e-4 at every size)."""
NAMES: tuple[str, ...] = Hyperparameters.__struct_fields__
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Hyperparameters)}
_ROWS = {row.name: row for row in Hyperparameters.declared}
