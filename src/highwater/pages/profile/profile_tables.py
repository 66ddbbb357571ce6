"""A memory profile as text: the answer in a sentence, then what was alive by category and by place;
of two profiles side by side.
"""

from collections.abc import Iterator, Mapping, Sequence

from highwater.memory.snapshot.attribution import CATEGORIES, Category
from highwater.memory.snapshot.memory_profile import (
    ADVICE,
    NOT_IN_A_SNAPSHOT,
    Advice,
    InStack,
    MemoryProfile,
    advice_of,
)
from highwater.pages.text import plain
from highwater.pages.text_table import TextTable
from highwater.units import counted, format_bytes

WORDS: Mapping[Category, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "backward_pass": "backward pass",
    "logits": "logits, loss",
    "communication": "communication",
    "workspaces": "workspaces",
    "unattributed": "unattributed",
}
"""The categories in words."""
_PLACES = 12
"""Places that a terminal shows; a page and JSON have more."""


def answer(profile: MemoryProfile) -> str:
    """What was alive, in a sentence."""
    largest = sorted(
        (each for each in profile.categories if each.bytes), key=lambda each: -each.bytes
    )
    parts = ", ".join(
        f"{WORDS[each.category]} {format_bytes(each.bytes)} ({share(each.bytes, profile)})"
        for each in largest[:2]
    )
    alive = f"{format_bytes(profile.allocated_bytes)} were allocated"
    if profile.moment == "peak":
        return f"{plain(profile.name)}: {alive} at the peak{_in(profile)}: {parts or 'nothing'}"
    return (
        f"{plain(profile.name)}: out of memory{_in(profile)}: no room for "
        f"{format_bytes(profile.requested_bytes)}; {alive}: {parts or 'nothing'}"
    )


def total(profile: MemoryProfile) -> str:
    """How much was alive, and when."""
    when = "at the peak" if profile.moment == "peak" else "when memory ran out"
    return f"{plain(profile.name)}: {format_bytes(profile.allocated_bytes)} {when}"


def _in(profile: MemoryProfile) -> str:
    return f", in {plain(profile.phase)}" if profile.phase else ""


def share(size: int, profile: MemoryProfile) -> str:
    """A size as a part of all that was allocated: ``56 %``."""
    return f"{100 * size / max(1, profile.allocated_bytes):.0f} %"


def category_table(profiles: Sequence[MemoryProfile]) -> TextTable:
    """What was alive by category, a row each; of two profiles with the difference."""
    first = profiles[0]
    if len(profiles) == 1:
        columns = ("category", "allocated", "share", "tensors")
        rows = [
            (
                WORDS[each.category],
                format_bytes(each.bytes),
                share(each.bytes, first),
                f"{each.count:,}",
            )
            for each in first.categories
            if each.bytes
        ]
        title = answer(first)
    else:
        columns = ("category", *_names(profiles), "difference")
        rows = [
            (
                WORDS[category],
                *(format_bytes(profile.bytes_of(category)) for profile in profiles),
                _difference(*(profile.bytes_of(category) for profile in profiles[:2])),
            )
            for category in CATEGORIES
            if any(profile.bytes_of(category) for profile in profiles)
        ]
        sizes = [profile.allocated_bytes for profile in profiles]
        rows.append(("all of it", *map(format_bytes, sizes), _difference(*sizes[:2])))
        title = "; ".join(map(total, profiles))
    notes = [line for profile in profiles for line in _notes(profile, named=len(profiles) > 1)]
    return TextTable(
        title=title, columns=columns, rows=tuple(rows), footnotes=tuple(notes), left_columns=1
    )


def _names(profiles: Sequence[MemoryProfile]) -> Iterator[str]:
    """A heading for each, never twice the same."""
    names = [plain(profile.name) for profile in profiles]
    for number, name in enumerate(names, 1):
        yield name if names.count(name) == 1 else f"{name} ({number})"


def _difference(one: int, other: int) -> str:
    sign = "+" if other > one else "-" if other < one else ""
    return f"{sign}{format_bytes(abs(other - one))}"


def memory_lines(profile: MemoryProfile) -> Iterator[str]:
    """Reserved, free and the largest free block, as far as they were recorded."""
    if profile.reserved_bytes is not None:
        free = (
            ""
            if profile.free_bytes is None
            else f", of which {format_bytes(profile.free_bytes)} were free, the largest block "
            f"{format_bytes(profile.largest_free_bytes)}"
        )
        yield f"{format_bytes(profile.reserved_bytes)} were reserved by the allocator{free}"
    if profile.device_free_bytes is not None:
        yield f"{format_bytes(profile.device_free_bytes)} were free on the device"


def advice(profile: MemoryProfile) -> Advice | None:
    """The setting to try first."""
    is_expandable = profile.allocator_settings.get("expandable_segments") == "True"
    return advice_of(
        {each.category: each.bytes for each in profile.categories},
        requested_bytes=profile.requested_bytes,
        free_bytes=profile.free_bytes,
        tried=[*NOT_IN_A_SNAPSHOT, *(["expandable segments"] if is_expandable else [])],
    )


def _notes(profile: MemoryProfile, *, named: bool) -> Iterator[str]:
    lines = list(memory_lines(profile))
    found = advice(profile)
    if found is not None:
        lines.append(f"try first: {found}: {ADVICE[found]}")
    lines += what_is_not_known(profile)
    for line in lines:
        yield f"{plain(profile.name)}: {line}" if named else line


def what_is_not_known(profile: MemoryProfile) -> Iterator[str]:
    """What the file does not tell, and why."""
    if profile.is_traced:
        yield (
            "predicted: traced, nothing was trained; gradients that stay are counted with the "
            "optimizer states, from which a trace does not tell them"
        )
    if profile.before_bytes:
        yield (
            f"{format_bytes(profile.before_bytes)} were there before the first of "
            f"{counted(profile.events, 'event')}: a longer history (`max_entries`) names them"
        )
    if not profile.events:
        yield "no events were recorded: this is what was alive when the snapshot was taken"
    if profile.devices > 1:
        yield f"device {profile.device} is shown, of {profile.devices} in the file: the busiest"


def place_table(profile: MemoryProfile, *, most: int = _PLACES) -> TextTable:
    """What was alive by the line that asked for it, the largest first."""
    places = profile.places[:most]
    rest = profile.allocated_bytes - sum(each.bytes for each in places)
    return TextTable(
        title=f"{plain(profile.name)}: who asked for it",
        columns=("place", "category", "allocated", "tensors"),
        rows=tuple(
            (
                plain(each.place) or "no stack",
                WORDS[each.category],
                format_bytes(each.bytes),
                f"{each.count:,}",
            )
            for each in places
        ),
        footnotes=(f"{format_bytes(rest)} elsewhere",) if rest > 0 else (),
        left_columns=2,
    )


def stack_heading(stack: InStack, profile: MemoryProfile) -> str:
    """What a stack asked for, and its innermost frame."""
    innermost = plain(stack.frames[0]) if stack.frames else "no stack"
    count = counted(stack.count, "tensor")
    return (
        f"{format_bytes(stack.bytes)} ({share(stack.bytes, profile)}), {count}, "
        f"{WORDS[stack.category]}: {innermost}{f', in {plain(stack.phase)}' if stack.phase else ''}"
    )
