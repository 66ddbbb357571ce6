"""Identity: the digest by which a question or a trial is known again.

It stays the same whatever settings are added after it was recorded (docs/decisions/026).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from highwater.nouns.codec import digest, to_builtins

_IN_EVERY_KEY: Mapping[str, frozenset[str]] = {
    "Settings": frozenset(
        (
            *("strategy", "allocator", "loss", "entropy", "offload", "objective", "critic"),
            *("sequences_per_micro_batch", "token_budget_tokens"),
            *("recompute", "mlp_tiles", "rope", "save_hf", "checkpoint"),
        )
    ),
    "Layout": frozenset(("gpus", "ulysses_degree", "ring_degree", "replicate_degree")),
    "Model": frozenset(("rope",)),
    "ModelShape": frozenset(("experts", "experts_per_token")),
    "Question": frozenset(
        (
            *("method", "confirm", "margin_bytes", "steps", "micro_batches", "data"),
            *("simulated", "proof", "timeout_s"),
        )
    ),
    "TrialSpec": frozenset(
        ("memory_budget_bytes", "steps", "micro_batches", "seed", "data", "attention_depth")
    ),
}
"""Fields that are in a key at their defaults too, by record.

They are those that were there when the first keys were written down. Nothing is ever added: a field
that came later is in a key only where it says something else than its default, so that what was
asked before it came is still the same question. For the same reason the default of a recorded field
never changes.
"""


def key_of(value: msgspec.Struct, *, without: tuple[str, ...], blank: tuple[str, ...] = ()) -> str:
    """The digest of a record: equal records, equal keys, on any machine and in any later version.

    Two kinds of fields, of this record or of any within it, are no part of its identity: those
    ``without`` which keys were always made, and ``blank`` ones, which stand in every key as null.
    """
    return digest(_identified(value, without, blank))


def _identified(value: Any, without: tuple[str, ...], blank: tuple[str, ...]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_identified(each, without, blank) for each in value]
    if not isinstance(value, msgspec.Struct):
        return to_builtins(value)
    names = (kind.__name__ for kind in type(value).__mro__)
    always = next((_IN_EVERY_KEY[name] for name in names if name in _IN_EVERY_KEY), frozenset())
    identified: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        own = getattr(value, field.name)
        if field.name not in without and (field.name in always or not _is_default(own, field)):
            said = None if field.name in blank else _identified(own, without, blank)
            identified[field.encode_name] = said
    return identified


def _is_default(own: Any, field: msgspec.structs.FieldInfo) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return own == field.default_factory()
    return field.default is not msgspec.NODEFAULT and own == field.default
