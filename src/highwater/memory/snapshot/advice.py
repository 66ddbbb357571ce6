"""Advice: the setting that helps most where memory ran out, by what was alive."""

from collections.abc import Mapping
from typing import Literal

from highwater.memory.snapshot.attribution import Category

Advice = Literal[
    "expandable segments",
    "chunked loss",
    "recompute",
    "context parallel",
    "offload",
    "smaller buckets",
]
"""Settings by the words that a rung's label has, or the field."""
ADVICE: Mapping[Advice, str] = {
    "expandable segments": "memory is there, in pieces: `--allocator expandable`, "
    "`PYTORCH_ALLOC_CONF=expandable_segments:True`",
    "chunked loss": "logits of all tokens are held at once: `--loss chunked`, or another loss that "
    "goes in chunks",
    "recompute": "activations are kept for the backward pass: `--recompute layer`, or gradient "
    "checkpointing in each layer",
    "context parallel": "activations of one sequence are most of it: `--ulysses 2`, or more GPUs "
    "for a sequence; a shorter one",
    "offload": "parameters, gradients and optimizer states are most of it: more GPUs that shard "
    "them, or `--offload`",
    "smaller buckets": "buffers of collectives are most of it: fewer parameters gathered at once, "
    "as `--strategy fsdp2` does layer by layer",
}
"""What each means, and what to type, here and elsewhere."""
_STATES: tuple[Category, ...] = ("parameters", "gradients", "optimizer_states")
_MOST_OF_IT = 4
"""Logits or buffers that are at least this part of all are what to begin with: both cost little
speed to be rid of."""


def advice_of(
    sizes: Mapping[Category, int],
    *,
    requested_bytes: int | None,
    free_bytes: int | None,
    is_expandable: bool | None,
    recomputes: bool | None = None,
) -> Advice | None:
    """The setting to try first; None where what was alive says too little.

    ``free_bytes`` is what the allocator had, and nobody used. ``recomputes``: whether layers are
    recomputed already; None where nobody knows.
    """
    total = sum(sizes.values())
    if not total:
        return None
    known = {category: size for category, size in sizes.items() if category != "unattributed"}
    if requested_bytes and not is_expandable and (free_bytes or 0) >= requested_bytes:
        return "expandable segments"
    if known.get("logits", 0) * _MOST_OF_IT >= total:
        return "chunked loss"
    if known.get("communication", 0) * _MOST_OF_IT >= total:
        return "smaller buckets"
    states, activations = sum(known.get(each, 0) for each in _STATES), known.get("activations", 0)
    if max(states, activations) * 2 < total:
        return None
    if states >= activations:
        return "offload"
    return "context parallel" if recomputes else "recompute"
