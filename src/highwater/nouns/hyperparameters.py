"""Hyperparameters: the numbers of the optimizer and of the objectives. A step's loss depends on
them, its memory does not.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from msgspec.structs import fields

from highwater.errors import UsageError
from highwater.nouns.declaration import NUMBER, TRAINED, DeclaredRecord, flag_of, setting
from highwater.nouns.settings import Settings

KlEstimator = Literal["k1", "k2", "k3"]


class NumberRange(NamedTuple):
    """What a number may be."""

    words: str
    holds: Callable[[float], bool]


_NOT_NEGATIVE = NumberRange("0 or more", lambda value: value >= 0)
_POSITIVE = NumberRange("above 0", lambda value: value > 0)
_SHARE = NumberRange("between 0 and 1", lambda value: 0 <= value <= 1)
_BETA = NumberRange("0 or more and below 1", lambda value: 0 <= value < 1)
_ABOVE_1 = NumberRange("above 1, or 0 for none", lambda value: value == 0 or value > 1)


class LossPart(NamedTuple):
    """A part of a loss."""

    absent: str
    """Words for a loss without this part."""
    is_in: Callable[[Settings], bool]


_RATIO = LossPart(
    "no ratio to an old policy", lambda settings: settings.traits.advantages != "none"
)
_DIVERGENCE = LossPart(
    "no divergence from a reference", lambda settings: settings.traits.reference == "divergence"
)
_MARGIN = LossPart(
    "no margin over a reference", lambda settings: settings.traits.reference == "margin"
)
_ENTROPY = LossPart("no entropy", lambda settings: settings.entropy != "none")
_VALUES = LossPart("no critic", lambda settings: settings.critic)
_TOKEN_ADVANTAGES = LossPart(
    "no advantages of single tokens", lambda settings: settings.traits.advantages == "tokens"
)


_OPTIMIZER: dict[str, Any] = {"kind": NUMBER, "topic": "optimizer", "commands": TRAINED}
_OBJECTIVE: dict[str, Any] = {**_OPTIMIZER, "topic": "objective"}


class Hyperparameters(DeclaredRecord, frozen=True, kw_only=True):
    """What every rung of a search trains with. Rungs differ in memory, which none of these
    changes.
    """

    learning_rate: float = setting(
        1e-5, "AdamW's learning rate", metavar="RATE", range=_NOT_NEGATIVE, **_OPTIMIZER
    )
    """The same at every step."""
    adam_beta1: float = setting(
        0.9,
        "AdamW's beta of the gradients' running mean",
        metavar="BETA",
        range=_BETA,
        **_OPTIMIZER,
    )
    adam_beta2: float = setting(
        0.999,
        "AdamW's beta of the squares' running mean",
        metavar="BETA",
        range=_BETA,
        **_OPTIMIZER,
    )
    adam_epsilon: float = setting(
        1e-8, "AdamW's epsilon", metavar="EPSILON", range=_POSITIVE, **_OPTIMIZER
    )
    """Added to the root of the squared gradients' mean before the mean is divided by it."""
    weight_decay: float = setting(
        0.01,
        "AdamW's weight decay; norms and biases have none",
        metavar="RATE",
        range=_NOT_NEGATIVE,
        **_OPTIMIZER,
    )
    """Decoupled; without norms and biases as in transformers' Trainer."""
    max_grad_norm: float = setting(
        1.0,
        "norm that gradients are clipped to; 0: no clipping",
        metavar="NORM",
        range=_NOT_NEGATIVE,
        **_OPTIMIZER,
    )
    clip_ratio_low: float = setting(
        0.2,
        "grpo, ppo: how far below 1 a ratio of probabilities counts (TRL's epsilon)",
        metavar="SHARE",
        range=_SHARE,
        part=_RATIO,
        **_OBJECTIVE,
    )
    """Below it a token's gradient stops."""
    clip_ratio_high: float = setting(
        0.2,
        "grpo, ppo: how far above 1 a ratio of probabilities counts (TRL's epsilon_high)",
        metavar="SHARE",
        range=_NOT_NEGATIVE,
        part=_RATIO,
        **_OBJECTIVE,
    )
    dual_clip: float = setting(
        3.0,
        "grpo, ppo: largest ratio of a token with a negative advantage (verl's clip_ratio_c, "
        "TRL's delta); 0: none",
        metavar="RATIO",
        range=_ABOVE_1,
        part=_RATIO,
        **_OBJECTIVE,
    )
    """Above it the loss of such a token grows no more."""
    kl_estimator: KlEstimator = setting(
        "k2",
        "grpo: estimator of the divergence from the reference (k3: verl's low_var_kl, and TRL's)",
        part=_DIVERGENCE,
        topic="objective",
        commands=TRAINED,
    )
    """How it is estimated from one sampled token."""
    kl_coefficient: float = setting(
        0.001,
        "grpo: weight of that divergence (verl's kl_loss_coef, TRL's beta)",
        metavar="WEIGHT",
        range=_NOT_NEGATIVE,
        part=_DIVERGENCE,
        **_OBJECTIVE,
    )
    entropy_coefficient: float = setting(
        0.001,
        "grpo, ppo: weight of the entropy, where there is one",
        metavar="WEIGHT",
        range=_NOT_NEGATIVE,
        part=_ENTROPY,
        **_OBJECTIVE,
    )
    """The entropy lowers the loss."""
    dpo_beta: float = setting(
        0.1,
        "dpo: weight of a pair's margin over the reference's (TRL's beta)",
        metavar="WEIGHT",
        range=_POSITIVE,
        part=_MARGIN,
        **_OBJECTIVE,
    )
    """Lower values let the policy go further from the reference."""
    value_clip: float = setting(
        0.5,
        "ppo with a critic: how far a value may move (verl's cliprange_value)",
        metavar="CHANGE",
        range=_POSITIVE,
        part=_VALUES,
        **_OBJECTIVE,
    )
    """How far from the one before the update before its gradient stops."""
    value_coefficient: float = setting(
        0.5,
        "ppo with a critic: weight of its squared error",
        metavar="WEIGHT",
        range=_NOT_NEGATIVE,
        part=_VALUES,
        **_OBJECTIVE,
    )
    discount: float = setting(
        1.0,
        "ppo: discount of rewards (gamma)",
        metavar="SHARE",
        range=_SHARE,
        part=_TOKEN_ADVANTAGES,
        **_OBJECTIVE,
    )
    gae_lambda: float = setting(
        0.95,
        "ppo: lambda of the generalized advantages",
        metavar="SHARE",
        range=_SHARE,
        part=_TOKEN_ADVANTAGES,
        **_OBJECTIVE,
    )
    """Lower values trust the critic more."""

    def __post_init__(self) -> None:
        """Raise UsageError for a number out of its range."""
        for name in NAMES:
            why = out_of_range(name, getattr(self, name))
            if why is not None:
                raise UsageError(why, hint=f"for example `{flag_of(name)} {DEFAULTS[name]}`")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that name whatever is not the default."""
        return tuple(
            word for name in self._changed for word in (flag_of(name), str(getattr(self, name)))
        )

    def refuse_unused(self, settings: Settings) -> None:
        """Raise UsageError for a changed number that the settings' loss does not have in it."""
        for name in self._changed:
            part = _ROWS[name].part
            if part is not None and not part.is_in(settings):
                raise UsageError(
                    f"{name.replace('_', ' ')} {getattr(self, name)} would change nothing: the "
                    f"loss of {settings.objective} "
                    f"has {part.absent} here",
                    hint=f"leave `{flag_of(name)}` out",
                )

    @property
    def _changed(self) -> list[str]:
        return [name for name in NAMES if getattr(self, name) != DEFAULTS[name]]


def out_of_range(name: str, value: Any) -> str | None:
    """Why a hyperparameter cannot have this value, in words; None where it can."""
    bounds = _ROWS[name].range
    if bounds is None or (math.isfinite(value) and bounds.holds(value)):
        return None
    return f"{name.replace('_', ' ')} is {value}, and has to be {bounds.words}"


NAMES: tuple[str, ...] = Hyperparameters.__struct_fields__
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Hyperparameters)}
_ROWS = {row.name: row for row in Hyperparameters.declared}
