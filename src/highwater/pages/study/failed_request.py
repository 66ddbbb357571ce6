"""The line of a trial that ran out of memory: where the step was, what had no room, what was alive,
and which setting to try first.
"""

import re
from collections.abc import Mapping

from highwater.memory.snapshot.attribution import Category, category_of
from highwater.memory.snapshot.memory_profile import Advice, advice_of
from highwater.memory.snapshot.snapshot import Frame
from highwater.nouns.layout import Layout
from highwater.nouns.profiling import coordinates
from highwater.nouns.settings import Settings
from highwater.nouns.trial import AliveMemory, Failure, Outcome, TrialResult
from highwater.pages.profile.profile_tables import WORDS
from highwater.pages.text import plain
from highwater.units import format_bytes, parse_bytes

_SHORT: Mapping[Category, str] = {
    **WORDS,
    "activations": "activations and temporaries",
    "logits": "logits",
    "backward_pass": "the backward pass",
}
"""The categories in a line's words."""
_PLACE = re.compile(r"(\S+\.py):(\d{1,9}) (.+)")
_TRIED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMG]iB)")
"""The caching allocator's own words."""
_ADVICE = re.compile(r"(Tried to allocate \d+(?:\.\d+)? [KMG]iB)\. .*", re.DOTALL)
"""What follows them: other figures, and what to set, which the log has."""
_LEAST_FRAGMENTED = 50
"""Memory in pieces is told where it is more than this part of what was reserved: a fiftieth."""


def request_line(result: TrialResult, settings: Settings, layout: Layout) -> str | None:
    """``forward: no room for 17.97 GiB of logits; ...``, of the rank that ran out first; None where
    none did, or where nobody knows what was alive.
    """
    first = result.first_failed
    failure = None if first is None else first.failure
    if failure is None or failure.alive is None:
        return None
    alive = failure.alive
    sizes = sizes_of(alive)
    asked = _category(alive.requested_by)
    told = [_asked(alive, asked)]
    largest = max(sizes, key=lambda category: sizes[category])
    if sizes[largest]:
        told.append(f"{_SHORT[largest]} {format_bytes(sizes[largest])} alive")
    fragmented = alive.fragmented_bytes
    if fragmented is not None and fragmented * _LEAST_FRAGMENTED > (alive.reserved_bytes or 0):
        told.append(f"{format_bytes(fragmented)} fragmented")
    advice = setting_of(alive, settings, layout)
    return f"{_where(failure)}: {'; '.join(told)}{f' → {advice}' if advice else ''}"


def brief(reason: str) -> str:
    """A reason without what the allocator says after what it had no room for."""
    return _ADVICE.sub(r"\1", reason)


def requested_bytes(result: TrialResult) -> int | None:
    """The request that had no room, as the engine counted it; of older studies, which did not, as
    the allocator's message has it. None where no rank ran out of a GPU's memory.
    """
    first = result.first_failed
    failure = None if first is None else first.failure
    if failure is None or result.outcome is not Outcome.OUT_OF_MEMORY:
        return None
    if failure.alive is not None and failure.alive.requested_bytes is not None:
        return failure.alive.requested_bytes
    said = _TRIED.search(failure.text)
    return None if said is None else parse_bytes(said[1])


def setting_of(alive: AliveMemory, settings: Settings, layout: Layout) -> Advice | None:
    """The setting to try first that is not there already."""
    sizes = sizes_of(alive)
    asked = _category(alive.requested_by)
    if asked is not None:
        sizes[asked] = sizes.get(asked, 0) + max(0, alive.requested_bytes or 0)
    # on the CPU states are all that is counted, and would always be most of it
    is_whole = alive.allocated_bytes is not None
    has: dict[Advice, bool] = {
        "expandable segments": settings.allocator == "expandable",
        "chunked loss": settings.loss == "chunked",
        "recompute": settings.recompute != "none",
        "fewer copies": not is_whole or layout.replicate_degree == 1,
        "one-micro-batch": not is_whole or not settings.keeps_gradients,
        "offload": not is_whole or settings.offloads_model,
    }
    return advice_of(
        sizes,
        requested_bytes=alive.requested_bytes,
        free_bytes=alive.fragmented_bytes,
        tried=[advice for advice, is_set in has.items() if is_set],
    )


def sizes_of(alive: AliveMemory) -> dict[Category, int]:
    """What was alive by category, as far as it is known."""
    return {
        "parameters": alive.parameters_bytes,
        "gradients": alive.gradients_bytes,
        "optimizer_states": alive.optimizer_states_bytes,
        "activations": alive.activations_bytes or 0,
        "logits": alive.logits_bytes or 0,
        "communication": alive.communication_bytes or 0,
        "unattributed": alive.unattributed_bytes or 0,
    }


def alive_rows(result: TrialResult, layout: Layout) -> Mapping[str, str]:
    """What each rank that ran out had allocated, by the rank and its place in the mesh."""
    rows: dict[str, str] = {}
    for rank in result.ranks:
        alive = None if rank.failure is None else rank.failure.alive
        if alive is not None:
            parts = [
                f"{_SHORT[category]} {format_bytes(size)}"
                for category, size in sizes_of(alive).items()
                if size
            ]
            if alive.fragmented_bytes is not None:
                parts.append(f"fragmented {format_bytes(alive.fragmented_bytes)}")
            place = f", {coordinates(layout, rank.rank)}" if layout.gpus > 1 else ""
            rows[f"alive on rank {rank.rank}{place}"] = ", ".join(parts)
    return rows


def _where(failure: Failure) -> str:
    layer = "" if failure.layer is None else f" of layer {failure.layer}"
    return f"{plain(failure.phase)}{layer}"


def _asked(alive: AliveMemory, category: Category | None) -> str:
    if alive.requested_bytes is None:
        return "no room"
    of = f" of {_SHORT[category]}" if category else ""
    return f"no room for {format_bytes(alive.requested_bytes)}{of}"


def _category(requested_by: str | None) -> Category | None:
    """What the line that asked allocates."""
    place = None if requested_by is None else _PLACE.fullmatch(requested_by)
    if place is None:
        return None
    return category_of(Frame(file=place[1], line=int(place[2]), name=place[3]))
