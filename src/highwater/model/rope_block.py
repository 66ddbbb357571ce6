"""Read RoPE's block in a ``config.json``, or the block of each kind of layer; refuse a block that
transformers ignores or cannot build a model with.

Source: ``modeling_rope_utils.py`` and ``configuration_*.py`` of transformers 5.23;
tests/numeric/test_configs_as_their_classes.py compares with those that are installed.
"""

from collections.abc import Mapping
from typing import Any

from highwater.errors import ModelError
from highwater.model.families import family_row, value_of
from highwater.model.model_config import whole_number

BEFORE_SCALING = "original_max_position_embeddings"
"""Field for the length that a model had before its RoPE was scaled."""
Types = Mapping[str, tuple[str, ...]]
"""Types of RoPE, and the fields that each type needs."""
TYPES: Types = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "yarn": ("factor",),
}
_AS_WRITTEN: Types = {
    kind: (
        *("rope_type", "rope_theta", *fields),
        *((BEFORE_SCALING,) if kind in ("llama3", "longrope", "yarn") else ()),
    )
    for kind, fields in TYPES.items()
}
"""Fields that each type needs if the class has no defaults."""


def rope_block(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """RoPE's parameters in a ``config.json``, else the class's; empty if neither has any.
    ``rope_scaling`` comes before ``rope_parameters``, as in transformers.

    Raises ModelError for a value that is no block, and for a block that no model can be built with.
    """
    family, row, found = config["model_type"], family_row(config["model_type"]), {}
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if rope is None or rope == {}:
            continue
        if not isinstance(rope, dict):
            raise ModelError(
                f"{field} is {rope!r} in {source}, not a block of fields",
                hint=f'remove {field}, or write for example {{"rope_type": "yarn", "factor": 4.0}}',
            )
        if field == "rope_scaling" and not row.reads_rope_scaling:
            raise ModelError(
                f"{source} has rope_scaling = {rope!r}, which the class of {family} does not read",
                hint="call it rope_parameters, and give it a rope_theta; or remove rope_scaling",
            )
        if field == "rope_parameters" and row.has_rope_by_layer:
            kinds = config.get("layer_types")
            needed = {*map(str, kinds)} if isinstance(kinds, list) else {"full_attention"}
            missing = sorted(needed - {*rope})
            if missing:
                raise ModelError(
                    f"rope_parameters in {source} has no block for {', '.join(missing)}, which the "
                    f"class of {family} needs",
                    hint=f'write one for each kind of layer, for example "{missing[0]}": '
                    '{"rope_type": "default", "rope_theta": 10000.0}',
                )
        blocks = [each for each in rope.values() if isinstance(each, dict)]
        for block in blocks or [rope]:
            _refuse_unknown(block, field, family, source)
        found = found or rope
    return found or dict(value_of(config, "rope_parameters") or {})


def own_rope_scaling(config: Mapping[str, Any], source: str) -> bool:
    """True if the config has RoPE scaling of its own."""
    return _type_of(rope_block(config, source)) != "default"


def _type_of(block: Mapping[str, Any]) -> Any:
    return block.get("rope_type", block.get("type", "default"))


def _refuse_unknown(block: Mapping[str, Any], field: str, family: str, source: str) -> None:
    """Raise ModelError for a type that transformers does not know, and for missing fields."""
    kind, row = _type_of(block), family_row(family)
    types = row.rope_types or (TYPES if row.reads_rope_scaling else _AS_WRITTEN)
    if not isinstance(kind, str) or kind not in types:
        raise ModelError(
            f"{field} in {source} has the rope_type {kind!r}, which transformers does not know for "
            f"the family {family}",
            hint=f"set rope_type there to one that it knows: {', '.join(types)}",
        )
    if block.get(BEFORE_SCALING) is not None:
        whole_number(block[BEFORE_SCALING], BEFORE_SCALING, source)
    missing = [name for name in types[kind] if block.get(name) is None]
    if missing:
        raise ModelError(
            f"{field} in {source} has the rope_type {kind} and no {', '.join(missing)}",
            hint=f"add {', '.join(missing)} there, as the model was trained with",
        )
