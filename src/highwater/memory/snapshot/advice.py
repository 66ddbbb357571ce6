"""Advice: the setting that helps most where memory ran out, by what was alive."""

from collections.abc import Collection, Mapping
from typing import Literal

from highwater.memory.snapshot.attribution import Category

Advice = Literal[
    "expandable segments",
    "chunked loss",
    "recompute",
    "context parallel",
    "fewer copies",
    "one-micro-batch",
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
    "context parallel": "activations of one sequence are most of it: `--ulysses 2`, where heads "
    "do not divide `--ring 2`, or more GPUs for a sequence; a shorter one",
    "fewer copies": "each copy has parameters, gradients and optimizer states: `--copies 1` shards "
    "them over all GPUs",
    "one-micro-batch": "gradients lie there from the start, for micro-batches to be added to: "
    "`--micro-batches 1`",
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
_MANY_GRADIENTS = 8
"""Gradients that are at least this part of all are worth a step of one micro-batch."""
NOT_IN_A_SNAPSHOT: tuple[Advice, ...] = ("fewer copies", "one-micro-batch")
"""Settings of which a snapshot does not tell whether they are there already."""


def advice_of(
    sizes: Mapping[Category, int],
    *,
    requested_bytes: int | None,
    free_bytes: int | None,
    tried: Collection[Advice] = (),
) -> Advice | None:
    """The setting to try first; None where what was alive says too little.

    ``free_bytes`` is what the allocator had, and nobody used. ``tried`` are settings that are there
    already.
    """
    total = sum(sizes.values())
    states = sum(sizes.get(each, 0) for each in _STATES)
    activations = sizes.get("activations", 0)
    are_states = states * 2 >= total and states >= activations
    fits_in_pieces = requested_bytes is not None and (free_bytes or 0) >= requested_bytes > 0
    helps: dict[Advice, bool] = {
        "expandable segments": fits_in_pieces,
        "chunked loss": sizes.get("logits", 0) * _MOST_OF_IT >= total,
        "smaller buckets": sizes.get("communication", 0) * _MOST_OF_IT >= total,
        "fewer copies": are_states,
        "one-micro-batch": are_states and sizes.get("gradients", 0) * _MANY_GRADIENTS >= total,
        "offload": are_states,
        "recompute": activations * 2 >= total,
        "context parallel": activations * 2 >= total,
    }
    return next(
        (advice for advice, does in helps.items() if total and does and advice not in tried), None
    )
