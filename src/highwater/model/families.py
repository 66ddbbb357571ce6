"""Families: a row of ``catalog/families.json`` for each kind of model that trains exactly, and what
stands in the way of every other causal family of transformers.

A family is trained once tests/dist/test_trained_families.py has found its loss and every gradient
equal to its own class's, in each layout. Its row says what its layers are, and what its class takes
for a field that ``config.json`` leaves out. All is known without torch, so that every command
refuses before anything starts.

Source: ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``, ``configuration_*.py`` and ``modeling_*.py`` of
transformers 5.23; tests/unit/test_families.py and, of logits that a family scales and caps,
tests/numeric/test_loss.py compare with those that are installed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from highwater.errors import ModelError
from highwater.nouns.codec import Record, packaged


class Experts(Record, frozen=True, kw_only=True):
    """Defaults of a mixture's class, if ``config.json`` has none; beside a number, its field."""

    experts: int
    """Experts of one layer."""
    per_token: int
    width: int | None = None
    """``moe_intermediate_size``; None where an expert is as wide as ``intermediate_size``, whatever
    the config says."""
    shared: tuple[str | None, int] = (None, 0)
    """Experts that every token goes through, or the width of them all; of no field where the class
    has always so many."""
    dense_layers: tuple[str | None, int] = (None, 0)
    """Layers without experts, at the front."""
    may_be_none: bool = False
    """With 0 experts the class has the shared MLP alone."""
    lists_per_token: bool = False
    """Experts of a token may be a list, a number for each layer."""
    switch: str | None = None
    """The field without which the class has one MLP, and with which it needs the sizes of experts,
    that go beside this MLP."""


class Window(Record, frozen=True, kw_only=True):
    """Which layers attend within ``sliding_window``."""

    layers: str
    """A rule of model/layer_kind.py: the layers if ``layer_types`` names none."""
    every: int | str | None = None
    """The number that the rule counts by, or the field that holds it."""
    reads_layer_types: bool = True
    """False: the class takes the window for every layer, whatever ``layer_types`` says."""
    has_mask_if_layers_slide: bool = False
    """The class makes the window's mask only where a layer slides: without a window the others
    cannot run, whatever their layers are."""
    is_switched: bool = False
    """The window is there only with ``use_sliding_window``."""
    ends_full: bool = False
    """The last layer attends in full, whatever ``layer_types`` says."""


class LogitField(Record, frozen=True, kw_only=True):
    """The field by which a family's class scales or caps its logits."""

    field: str
    does: Literal["times", "over", "cap"]
    """Multiplies logits, divides them, or caps them."""
    usual: float | None = None
    """The class's number, where the config leaves the field out; None: no cap."""
    takes_whole: bool = False
    """True if the class takes a whole number."""


class Family(Record, frozen=True, kw_only=True):
    """One row."""

    is_trained: bool = True
    """False: a row of a family that is refused."""
    defaults: Mapping[str, Any] = {}
    """Fields whose default is not what their absence says elsewhere: as many key/value heads as
    query heads, heads that share the hidden size, untied embeddings, no window, plain RoPE on a
    base of 10,000."""
    needs: tuple[str, ...] = ()
    """Fields that the class leaves at null, of which no model can be built."""
    other_names: Mapping[str, str] = {}
    """Other names of fields, which the class reads too."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Fields by which the family has another head, other norms or other gates than its class was
    compared with, and the values, beside null, that change nothing."""
    not_zero: tuple[str, ...] = ()
    """Fields that no kernel computes with a value of 0: the scale of attention, experts whose
    weights would be empty."""
    experts: Experts | None = None
    """None if the class reads nothing about experts."""
    width_field: str = "intermediate_size"
    dense_width_field: str | None = None
    """The field of the width of layers without experts, where it is not ``width_field``."""
    is_gated: bool = True
    """The MLP has a gate."""
    window: Window | None = None
    """None if no layer has a window, whatever the config says."""
    delta: Literal["apart", "joined"] | None = None
    """Layers of ``linear_attention`` have a gated delta rule, whose gates have a product of their
    own, or are in that of queries, keys and values; the others attend with gates. None: neither."""
    has_unlike_layers: bool = False
    """Layers of full attention have heads of their own size, the last layers read keys and values
    of earlier ones, and each layer may have an embedding of its own of every token."""
    caps_scores: bool = False
    """Attention caps its scores at ``attn_logit_softcapping``."""
    other_layers: Mapping[str, str] = {}
    """Kinds of layers that the class may have beside full attention, and has no window beside;
    what they are in words."""
    has_sinks: bool = False
    """Every layer has learned numbers beside the keys."""
    dropout_field: str | None = None
    """The field by which attention has dropout unless the config says otherwise."""
    logits: LogitField | None = None
    """None if the softmax sees the head's product as it is."""
    has_rope: bool = True
    """False: positions are learned, fixed or none. A config.json tells nothing of it."""
    has_rope_by_layer: bool = False
    """RoPE of its own for each kind of layer, whatever the config leaves out."""
    rope_types: Mapping[str, tuple[str, ...]] | None = None
    """Types of RoPE that the class takes, and the fields that each needs; None: all."""
    reads_rope_scaling: bool = True
    """False: the class reads ``rope_parameters`` alone, and fills nothing in there."""
    saves_yarn: bool = True
    """False: the config class takes no YaRN. It trains, and its saved model cannot be loaded."""
    unscalable: str | None = None
    """A treatment of positions that YaRN cannot express."""
    parts: Mapping[str, int] = {}
    """Small parts of model/layer_kind.py in every layer, and how many of each; below 0 for norms
    that it lacks."""
    parts_outside: int = 0
    """Numbers outside the layers, in hidden sizes: the last norm's bias; below 0 where it has no
    weight."""
    more_positions: int | None = None
    """Learned positions more than the native length; None: it has none."""
    switches: Mapping[str, Mapping[str, int]] = {}
    """Fields that switch parts of every layer on."""
    switched_on: tuple[str, ...] = ()
    """Fields of ``switches`` that the class has on."""


class Wrapper(Record, frozen=True, kw_only=True):
    """A class that reads images, too, and whose text model is one of a family that trains."""

    texts: Mapping[str, str]
    """``model_type`` of its text model, and the family whose class computes the same of text."""
    usual: str | None = None
    """The text model's ``model_type`` where text_config names none."""
    is_flat: bool = False
    """Files may have the text model's fields beside the others, and no text_config."""
    is_tied: bool = False
    """The class ties head and embedding where the config does not say."""
    defaults: Mapping[str, Any] = {}
    """Fields of the text model's class whose default is not that of the family."""
    unread: tuple[str, ...] = ()
    """Fields that the family's class reads and the text model's does not."""


class _Refused(Record, frozen=True, kw_only=True):
    """Families that cannot be trained exactly, why, and a hint."""

    why: str
    instead: str = "use a model of a family that was compared, for example `highwater find " + (
        "Qwen3-0.6B`"
    )
    families: tuple[str, ...]


class _Table(Record, frozen=True, kw_only=True):
    families: Mapping[str, Family]
    wrappers: Mapping[str, Wrapper]
    names: Mapping[str, str]
    refused: tuple[_Refused, ...]


_TABLE = packaged("model/catalog/families.json", _Table)
FAMILY_ROWS = _TABLE.families
WRAPPERS = _TABLE.wrappers
TRAINED = frozenset(name for name, row in FAMILY_ROWS.items() if row.is_trained)
"""Families whose training equals their own class's."""
REFUSED: Mapping[str, tuple[str, str]] = {
    name: (row.why, row.instead) for row in _TABLE.refused for name in row.families
}
"""Why a family cannot be trained exactly, in words, and a hint that works."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names that families give the same thing: experts of a layer, of a token."""
_NULL_SAYS = ("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping")
"""Fields where null is not the same as nothing: as the query heads, as they share the hidden size,
no window, no cap."""
_PLAIN = Family()
UNCOMPARED = ("nobody has compared it with its own class", _TABLE.refused[0].instead)
_LEAST_FAMILY = 4
"""Letters of a family that a name is told by: shorter ones begin other names too."""


def family_by_name(name: str) -> str | None:
    """The family that a model's name begins as; None where that tells none, or where the names of
    several begin alike: ``Llama-3.2-11B-Vision``.
    """
    known = {**{_letters(each): each for each in (*TRAINED, *WRAPPERS, *REFUSED)}, **_TABLE.names}
    said = _letters(name.rpartition("/")[2])
    begun = (each for each in known if len(each) >= _LEAST_FAMILY and said.startswith(each))
    longest = max(begun, key=len, default="")
    is_told = longest in _TABLE.names or known.get(longest) not in TRAINED
    return known.get(longest) if is_told else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def family_row(name: str) -> Family:
    """The row of a family; one of nothing special for a family without."""
    return FAMILY_ROWS.get(name, _PLAIN)


def value_of(config: Mapping[str, Any], field: str) -> Any:
    """The value of a field in a config, or else in its class; None if neither has one."""
    if config.get(field) is not None or (field in config and field in _NULL_SAYS):
        return config[field]
    return family_row(config["model_type"]).defaults.get(field)


def refuse_untrained(family: str, source: str, *, has_own_code: bool = False) -> None:
    """Raise ModelError for a family that does not train exactly, or that nobody has compared."""
    if family in TRAINED:
        return
    if family in REFUSED:
        why, hint = REFUSED[family]
        raise ModelError(
            f"{source} is of the family {family}, which cannot be trained exactly: {why}", hint=hint
        )
    own_code = "; its own code (auto_map) is not run" if has_own_code else ""
    raise ModelError(
        f"{source} is of the family {family}, which nobody has compared with its own class: it "
        f"may train, and wrongly{own_code}",
        hint=f"use a family that was compared ({', '.join(sorted(TRAINED))}), for example "
        f"`highwater find Qwen3-0.6B`",
    )


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
