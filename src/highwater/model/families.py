"""Families: a row of ``catalog/families.json`` for each family that trains exactly, and the reason
why every other causal family of transformers does not.

A family counts as trained if tests/dist/test_trained_families.py finds its loss and every gradient
equal to those of its own class, in each layout. Its row describes its layers, and the defaults of
its class for fields that ``config.json`` leaves out. This needs no torch, so that every command can
refuse a model before anything starts.

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
    """How a family's mixture of experts is read: config fields, and their defaults."""

    experts: int
    """Number of experts in one layer."""
    per_token: int
    width: int | None = None
    """Default of ``moe_intermediate_size``; None if experts always have ``intermediate_size``."""
    shared: tuple[str | None, int] = (None, 0)
    """Number of experts that every token goes through, or the width of all of them; without a field
    if the class has a fixed number."""
    dense_layers: tuple[str | None, int] = (None, 0)
    """Number of layers without experts, at the front."""
    may_be_none: bool = False
    """True if 0 experts are allowed: then the class has the shared MLP alone."""
    lists_per_token: bool = False
    """True if experts per token may be a list, a number for each layer."""
    switch: str | None = None
    """The field that switches experts on, beside the one MLP that the class has without it; then
    the sizes of experts are required."""


class Window(Record, frozen=True, kw_only=True):
    """Which layers of a family attend within ``sliding_window``, and by which config field."""

    layers: str
    """Name of a rule in model/layer_kind.py, for configs without ``layer_types``."""
    every: int | str | None = None
    """The number that the rule counts by, or the field that holds it."""
    reads_layer_types: bool = True
    """False: every layer has the window, whatever ``layer_types`` says."""
    has_mask_if_layers_slide: bool = False
    """True if the class makes the window's mask only if a layer slides; other classes always make
    it, and cannot run without a window, whatever their layers are."""
    is_switched: bool = False
    """True if the window needs ``use_sliding_window``."""
    ends_full: bool = False
    """True if the last layer attends in full, whatever ``layer_types`` says."""


class LogitField(Record, frozen=True, kw_only=True):
    """The config field by which a family scales or caps logits, and what it does."""

    field: str
    does: Literal["times", "over", "cap"]
    """Multiplies logits, divides them, or caps them."""
    usual: float | None = None
    """Default of the class, if the config leaves the field out; None: no cap."""
    takes_whole: bool = False
    """True if the class accepts an integer."""


class Family(Record, frozen=True, kw_only=True):
    """One model type: which layers it has, and its class's defaults for missing fields."""

    is_trained: bool = True
    """False: the family is refused."""
    defaults: Mapping[str, Any] = {}
    """Fields whose default differs from the usual: as many key/value heads as query heads, heads
    that share the hidden size, untied embeddings, no window, plain RoPE on a base of 10,000."""
    needs: tuple[str, ...] = ()
    """Fields whose default is null in the class, and without which no model can be built."""
    other_names: Mapping[str, str] = {}
    """Other names of fields that the class also reads, by field."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Fields that change the head, norms or gates from those that were compared, and the values,
    besides null, that change nothing."""
    not_zero: tuple[str, ...] = ()
    """Fields that must not be 0: the scale of attention, sizes of experts' weights."""
    experts: Experts | None = None
    """Defaults of the experts; None if the class reads no field about experts."""
    width_field: str = "intermediate_size"
    dense_width_field: str | None = None
    """The field for the width of layers without experts, if not ``width_field``."""
    is_gated: bool = True
    """True if the MLP has a gate."""
    window: Window | None = None
    """Rules for windows; None if no layer has a window, whatever the config says."""
    delta: Literal["apart", "joined"] | None = None
    """Product of the gates of the gated delta rule that layers of ``linear_attention`` have: apart,
    or joined with queries, keys and values; other layers attend with gates. None: neither."""
    has_unlike_layers: bool = False
    """True if layers of full attention have another head size, the last layers read keys and values
    of earlier layers, and each layer may have its own embedding of every token."""
    caps_scores: bool = False
    """True if attention caps its scores at ``attn_logit_softcapping``."""
    other_layers: Mapping[str, str] = {}
    """Kinds of layers that the class may have besides full attention, without windows, in words."""
    has_sinks: bool = False
    """True if every layer has learned sinks beside the keys."""
    dropout_field: str | None = None
    """The field of attention dropout that is above 0 by default."""
    logits: LogitField | None = None
    """The field that scales or caps logits; None if the softmax takes the head's product as is."""
    has_rope: bool = True
    """False: positions are learned, fixed or absent, which ``config.json`` does not say."""
    has_rope_by_layer: bool = False
    """True if each kind of layer has its own RoPE, even if the config leaves it out."""
    rope_types: Mapping[str, tuple[str, ...]] | None = None
    """Types of RoPE that the class supports, and the fields that each needs; None: all types."""
    reads_rope_scaling: bool = True
    """False: the class reads only ``rope_parameters``, without filling in defaults."""
    saves_yarn: bool = True
    """False: the config class refuses YaRN, so that a model trains but cannot be loaded again."""
    unscalable: str | None = None
    """In words: a treatment of positions that YaRN cannot express; None: there is none."""
    parts: Mapping[str, int] = {}
    """Small parts in every layer, by their names in model/layer_kind.py, and the number of each;
    below 0 for norms that the layer lacks."""
    parts_outside: int = 0
    """Parameters outside the layers, in hidden sizes: the last norm's bias; below 0: no weight."""
    more_positions: int | None = None
    """Number of learned positions beyond the native length; None: positions are not learned."""
    switches: Mapping[str, Mapping[str, int]] = {}
    """Fields that switch parts of every layer on, and these ``parts``."""
    switched_on: tuple[str, ...] = ()
    """Fields of ``switches`` that are on by default."""


class Wrapper(Record, frozen=True, kw_only=True):
    """A multimodal class, which also reads images, whose text model is of a family that trains."""

    texts: Mapping[str, str]
    """``model_type`` of the text model, and the family whose class computes the same on text."""
    usual: str | None = None
    """``model_type`` of the text model if ``text_config`` names none."""
    is_flat: bool = False
    """True if files may have the text model's fields at the top level, without a text_config."""
    is_tied: bool = False
    """True if the class ties head and embedding by default."""
    defaults: Mapping[str, Any] = {}
    """Fields of the text model's class whose default differs from the family's."""
    unread: tuple[str, ...] = ()
    """Fields that the family's class reads, but not the text model's."""


class _Refused(Record, frozen=True, kw_only=True):
    """Families that cannot be trained exactly, with the reason and a hint."""

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
"""Families whose loss and gradients were found equal to their own class's."""
REFUSED: Mapping[str, tuple[str, str]] = {
    name: (row.why, row.instead) for row in _TABLE.refused for name in row.families
}
"""The reason why a family cannot be trained exactly, and a hint that works, by family."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names of two fields in different families: experts of a layer, and experts of a token."""
_NULL_SAYS = ("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping")
"""Fields whose null is a value and not a missing field: as many as query heads, the hidden size
over the heads, no window, no cap."""
_PLAIN = Family()
UNCOMPARED = ("nobody has compared it with its own class", _TABLE.refused[0].instead)
_LEAST_FAMILY = 4
"""Least letters of a family that ``family_by_name`` finds: shorter ones begin other names, too."""


def family_by_name(name: str) -> str | None:
    """The family that a model's name begins with; None if there is none, or if models of several
    families have that beginning: ``Llama-3.2-11B-Vision``.
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
    """What is known of a family; a row of defaults if nothing is."""
    return FAMILY_ROWS.get(name, _PLAIN)


def value_of(config: Mapping[str, Any], field: str) -> Any:
    """Value of a config's field, else the default of the family's class; None without both."""
    if config.get(field) is not None or (field in config and field in _NULL_SAYS):
        return config[field]
    return family_row(config["model_type"]).defaults.get(field)


def refuse_untrained(family: str, source: str, *, has_own_code: bool = False) -> None:
    """Raise ModelError for a family that does not train exactly, or that was never compared."""
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
"""Range of factors and caps: no model has others, and float32 would not tell its logits apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """The transform of a logit x before the softmax: ``scale * x`` or, with a cap, ``cap * tanh(
    scale * x / cap)``. It grows with x: the smallest and the largest logit stay so.
    """

    scale: float = 1.0
    """Factor above 0."""
    soft_cap: float | None = None
    """Bound of a logit's magnitude, above 0. None: no cap."""

    @property
    def is_plain(self) -> bool:
        """True if logits are neither scaled nor capped."""
        return self == PLAIN


PLAIN = LogitTransform()
"""The transform that changes nothing."""


def transforms(family: str, field: str) -> bool:
    """True if a family's class reads this field of its config to scale or cap logits."""
    rule = family_row(family).logits
    return rule is not None and rule.field == field


def logit_transform_of(config: Mapping[str, Any], source: str) -> LogitTransform:
    """The logit transform that a config sets; ``source`` names the config in errors.

    Raises ModelError for a value with which the class makes no model, or no usable logits.
    """
    rule = family_row(config["model_type"]).logits
    if rule is None:
        return PLAIN
    value = config.get(rule.field, rule.usual)
    if value is None and rule.does == "cap":
        return PLAIN
    number = None
    if isinstance(value, int | float) and not isinstance(value, bool) and _LEAST <= value <= _MOST:
        number = float(value)
    if number is None or (isinstance(value, int) and not rule.takes_whole):
        usual = 30.0 if rule.does == "cap" else rule.usual
        raise ModelError(
            f"{source}, of the family {config['model_type']}, has {rule.field} = {value!r}",
            hint=f"set {rule.field} to a number from {_LEAST:g} to {_MOST:g}, with a decimal "
            f"point, for example {usual if number is None else number}",
        )
    if rule.does == "cap":
        return LogitTransform(soft_cap=number)
    return LogitTransform(scale=number if rule.does == "times" else 1 / number)
