"""Hyperparameters: the numbers of the optimizer and of the objectives. A step's loss depends on
them, its memory does not.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from msgspec.structs import fields

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import flag_of
from highwater.nouns.settings import Settings

KlEstimator = Literal["k1", "k2", "k3"]


class Hyperparameters(Record, frozen=True, kw_only=True):
    """What every rung of a search trains with. Rungs differ in memory, which none of these
    changes.
    """

    learning_rate: float = 1e-5
    """AdamW's learning rate, the same at every step."""
    adam_beta1: float = 0.9
    """Share of the running mean of gradients that a step keeps."""
    adam_beta2: float = 0.999
    """Share of the running mean of squared gradients that a step keeps."""
    adam_epsilon: float = 1e-8
    """Number added to the root of the squared gradients' mean before the mean is divided by it."""
    weight_decay: float = 0.01
    """AdamW's weight decay, decoupled. Norms and biases never decay, as in transformers'
    Trainer."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm; 0: none is."""
    clip_ratio_low: float = 0.2
    """``grpo``, ``ppo``: how far below 1 the ratio of new to old probability may go before a
    token's gradient stops."""
    clip_ratio_high: float = 0.2
    """``grpo``, ``ppo``: how far above 1."""
    dual_clip: float = 3.0
    """``grpo``, ``ppo``: the ratio at which the loss of a token with a negative advantage stops
    growing; 0: it never does."""
    kl_estimator: KlEstimator = "k2"
    """``grpo``: how the divergence from the reference is estimated from one sampled token."""
    kl_coefficient: float = 0.001
    """``grpo``: weight of that divergence in the loss."""
    entropy_coefficient: float = 0.001
    """``grpo``, ``ppo``, where the settings have an entropy: its weight in the loss, which it
    lowers."""
    dpo_beta: float = 0.1
    """``dpo``: weight of the margin by which the policy prefers the chosen document of a pair more
    than the reference does. Lower values let the policy go further from the reference."""
    value_clip: float = 0.5
    """``ppo`` with a critic: how far a value may go from the one before the update before its
    gradient stops."""
    value_coefficient: float = 0.5
    """``ppo`` with a critic: weight of its squared error."""
    discount: float = 1.0
    """``ppo``: what a reward is worth one token earlier."""
    gae_lambda: float = 0.95
    """``ppo``: share of the next token's advantage that counts for this one; lower values trust the
    critic more."""

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
            part = _PARTS.get(name)
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
    bounds = _RANGES.get(name)
    if bounds is None or (math.isfinite(value) and bounds.holds(value)):
        return None
    return f"{name.replace('_', ' ')} is {value}, and has to be {bounds.words}"


NAMES: tuple[str, ...] = Hyperparameters.__struct_fields__
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Hyperparameters)}


class _NumberRange(NamedTuple):
    words: str
    holds: Callable[[float], bool]


_NOT_NEGATIVE = _NumberRange("0 or more", lambda value: value >= 0)
_POSITIVE = _NumberRange("above 0", lambda value: value > 0)
_SHARE = _NumberRange("between 0 and 1", lambda value: 0 <= value <= 1)
_BETA = _NumberRange("0 or more and below 1", lambda value: 0 <= value < 1)
_RANGES = {
    "learning_rate": _NOT_NEGATIVE,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "clip_ratio_low": _SHARE,
    "clip_ratio_high": _NOT_NEGATIVE,
    "dual_clip": _NumberRange("above 1, or 0 for none", lambda value: value == 0 or value > 1),
    "kl_coefficient": _NOT_NEGATIVE,
    "entropy_coefficient": _NOT_NEGATIVE,
    "dpo_beta": _POSITIVE,
    "value_clip": _POSITIVE,
    "value_coefficient": _NOT_NEGATIVE,
    "discount": _SHARE,
    "gae_lambda": _SHARE,
}


class _Part(NamedTuple):
    """A part of a loss."""

    absent: str
    """Words for a loss without this part."""
    is_in: Callable[[Settings], bool]


_RATIO = _Part("no ratio to an old policy", lambda settings: settings.traits.advantages != "none")
_DIVERGENCE = _Part(
    "no divergence from a reference", lambda settings: settings.traits.reference == "divergence"
)
_MARGIN = _Part(
    "no margin over a reference", lambda settings: settings.traits.reference == "margin"
)
_ENTROPY = _Part("no entropy", lambda settings: settings.entropy != "none")
_VALUES = _Part("no critic", lambda settings: settings.critic)
_TOKEN_ADVANTAGES = _Part(
    "no advantages of single tokens", lambda settings: settings.traits.advantages == "tokens"
)
_PARTS = {
    "clip_ratio_low": _RATIO,
    "clip_ratio_high": _RATIO,
    "dual_clip": _RATIO,
    "kl_estimator": _DIVERGENCE,
    "kl_coefficient": _DIVERGENCE,
    "entropy_coefficient": _ENTROPY,
    "dpo_beta": _MARGIN,
    "value_clip": _VALUES,
    "value_coefficient": _VALUES,
    "discount": _TOKEN_ADVANTAGES,
    "gae_lambda": _TOKEN_ADVANTAGES,
}
"""The part of the loss that each hyperparameter belongs to, by its name. The optimizer's are not
here: they belong to every step."""
