"""Emitted: a recommendation in another trainer's words, and what its configurations have in common."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from highwater.spec.codec import Noun
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.units import format_bytes, format_tokens

Target = Literal["trinity", "verl"]
Value = bool | int | float | str
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"


class Emitted(Noun, frozen=True, kw_only=True):
    """One configuration."""

    schema_version: int = 1
    target: Target
    checked_with: str
    """Version of the package whose names these are."""
    values: dict[str, Value]
    """Each setting by its name, sections joined by dots."""
    environment: dict[str, str]
    """Set before any process starts, Ray's included."""
    command: str
    """What starts it."""
    text: str
    """The file, to be written as it is."""


def strategy(candidate: Candidate) -> str:
    """FSDP1, but for offload: there FSDP1 would bring everything back before the update."""
    return "fsdp2" if candidate.cell.settings.offload else "fsdp"


def heading(found: Recommendation, chosen: Candidate, *, target: str, version: str) -> list[str]:
    """What the configuration is and who says that it fits: lines of a comment."""
    rollout = f", {found.rollout_gpus} more for rollout" if found.rollout_gpus else ""
    capacity = f"up to {format_tokens(chosen.capacity_tokens)} tokens{' or more' * chosen.is_at_least} ({chosen.capacity_source})"
    headroom = "headroom unknown" if chosen.headroom_bytes is None else f"{format_bytes(chosen.headroom_bytes)} of headroom"
    return [
        f"{target} {version}: {found.model_name}, {format_tokens(found.length_tokens)} tokens, {found.gpus} x {found.device_name}"
        f"{rollout}",
        f"{chosen.label}: {headroom}, {capacity}; {chosen.source}, {found.accuracy}",
        f"{target}'s settings that hold memory; what it learns, from what and how long is yours to add",
    ]


def yarn_lines(found: Recommendation, *, why: str) -> list[str]:
    """The block for the model's config.json: lines of a comment; none up to the native length."""
    if found.yarn is None:
        return []
    block = {
        "rope_parameters": dict(found.yarn.rope_parameters),
        "max_position_embeddings": found.yarn.max_position_embeddings,
    }
    return [f"YaRN: {why}; in the model's config.json:", json.dumps(block)]


def comment(lines: list[str]) -> str:
    """The lines as a comment of YAML and of a shell, whatever a model is called: no line ends where nobody ended it."""
    return "".join(f"# {''.join(c if c.isprintable() else '?' for c in line)}\n" for line in lines)


def literal(text: str) -> str:
    r"""The text as OmegaConf's text: ``${`` begins no interpolation there, ``\${``. Backslashes count before ``${`` alone.

    Source: OmegaConf's grammar, checked with 2.3.1.
    """
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree
