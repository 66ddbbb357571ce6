"""What the published trials of the reference trainer have in common, as fields of a request."""

from collections.abc import Mapping
from typing import Any

from highwater.nouns.published import PUBLISHED_SETTINGS
from highwater.nouns.trial import PROMPT_TOKENS

_ALWAYS = ("strategy", "objective", "entropy", "loss")


def published_fields(named: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not asked about, where ``named`` are.

    With offload it shards by FSDP2 and has expandable segments: no published rung offloads
    otherwise, and its configuration offloads by FSDP2 alone. With LoRA, of which none was
    published, FSDP2 keeps frozen and trained parameters apart.
    """
    is_offloaded = named.get("offload", False) is not False
    published = PUBLISHED_SETTINGS["env+offload" if is_offloaded else "vanilla"]
    names = (
        *_ALWAYS,
        *(("allocator",) if is_offloaded else ()),
        *(() if "token_budget" in named else ("sequences_per_micro_batch",)),
    )
    fields: dict[str, Any] = {name: getattr(published, name) for name in names}
    fields["prompt_tokens"] = PROMPT_TOKENS
    return fields if named.get("lora") is None else {**fields, "strategy": "fsdp2"}
