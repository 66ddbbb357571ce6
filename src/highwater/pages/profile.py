"""A memory profile, or two side by side, as text and as a page that needs nothing else."""

from collections.abc import Sequence

from highwater.memory.snapshot.attribution import CATEGORIES, CATEGORY_WORDS
from highwater.memory.snapshot.memory_profile import (
    ADVICE,
    NOT_IN_A_SNAPSHOT,
    Advice,
    InStack,
    MemoryProfile,
    advice_of,
)
from highwater.pages.chart import WIDTHS, flame_chart, share, timeline_chart
from highwater.pages.page import drawn_page, template_lines
from highwater.pages.table import TextTable, table_of
from highwater.pages.text import plain
from highwater.units import counted, format_bytes

_PLACES = 12
"""Places that a terminal shows; a page and JSON show more."""


def answer(profile: MemoryProfile) -> str:
    """Sentence on the largest categories of live memory."""
    known = (each for each in profile.categories if each.bytes)
    largest = sorted(known, key=lambda each: -each.bytes)
    parts = ", ".join(
        f"{CATEGORY_WORDS[each.category]} {format_bytes(each.bytes)} ({share(each.bytes, profile)})"
        for each in largest[:2]
    )
    alive = f"{format_bytes(profile.allocated_bytes)} were allocated"
    if profile.moment == "peak":
        return f"{plain(profile.name)}: {alive} at the peak{_in(profile)}: {parts or 'nothing'}"
    return (
        f"{plain(profile.name)}: out of memory{_in(profile)}: no room for "
        f"{format_bytes(profile.requested_bytes)}; {alive}: {parts or 'nothing'}"
    )


def _in(profile: MemoryProfile) -> str:
    return f", in {plain(profile.phase)}" if profile.phase else ""


def category_table(profiles: Sequence[MemoryProfile]) -> TextTable:
    """Table of live bytes by category; for two profiles, with the difference."""
    notes = [
        f"{plain(profile.name)}: {line}" if len(profiles) > 1 else line
        for profile in profiles
        for line in _notes(profile)
    ]
    if len(profiles) == 1:
        (profile,) = profiles
        return table_of(
            answer(profile),
            [each for each in profile.categories if each.bytes],
            ("category", lambda each: CATEGORY_WORDS[each.category]),
            ("allocated", lambda each: format_bytes(each.bytes)),
            ("share", lambda each: share(each.bytes, profile)),
            ("tensors", lambda each: f"{each.count:,}"),
            footnotes=notes,
            names=1,
        )
    names = [plain(profile.name) for profile in profiles]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    sizes = {
        CATEGORY_WORDS[category]: [profile.bytes_of(category) for profile in profiles]
        for category in CATEGORIES
        if any(profile.bytes_of(category) for profile in profiles)
    }
    sizes["all of it"] = [profile.allocated_bytes for profile in profiles]
    return TextTable(
        title="; ".join(
            f"{plain(each.name)}: {format_bytes(each.allocated_bytes)} "
            f"{'at the peak' if each.moment == 'peak' else 'when memory ran out'}"
            for each in profiles
        ),
        columns=("category", *names, "difference"),
        rows=tuple(
            (name, *map(format_bytes, each), _difference(*each[:2])) for name, each in sizes.items()
        ),
        footnotes=tuple(notes),
        left_columns=1,
    )


def _difference(one: int, other: int) -> str:
    sign = "+" if other > one else "-" if other < one else ""
    return f"{sign}{format_bytes(abs(other - one))}"


def advice(profile: MemoryProfile) -> Advice | None:
    """The setting to try first to save memory; None if none stands out."""
    is_expandable = profile.allocator_settings.get("expandable_segments") == "True"
    return advice_of(
        {each.category: each.bytes for each in profile.categories},
        requested_bytes=profile.requested_bytes,
        free_bytes=profile.free_bytes,
        tried=[*NOT_IN_A_SNAPSHOT, *(["expandable segments"] if is_expandable else [])],
    )


def _notes(profile: MemoryProfile) -> tuple[str, ...]:
    found = advice(profile)
    said = "" if found is None else f"{found}: {ADVICE[found]}"
    return template_lines("profile.txt.j2", "notes", profile=profile, advice=said)


def place_table(profile: MemoryProfile, *, most: int = _PLACES) -> TextTable:
    """Table of live bytes at the profile's moment, by the ``most`` largest places in code."""
    places = profile.places[:most]
    rest = profile.allocated_bytes - sum(each.bytes for each in places)
    return table_of(
        f"{plain(profile.name)}: who asked for it",
        places,
        ("place", lambda each: plain(each.place) or "no stack"),
        ("category", lambda each: CATEGORY_WORDS[each.category]),
        ("allocated", lambda each: format_bytes(each.bytes)),
        ("tensors", lambda each: f"{each.count:,}"),
        footnotes=(f"{format_bytes(rest)} elsewhere",) if rest > 0 else (),
        names=2,
    )


def stack_heading(stack: InStack, profile: MemoryProfile) -> str:
    """Heading of a stack: its bytes and tensors, and its innermost frame."""
    innermost = plain(stack.frames[0]) if stack.frames else "no stack"
    phase = f", in {plain(stack.phase)}" if stack.phase else ""
    return (
        f"{format_bytes(stack.bytes)} ({share(stack.bytes, profile)}), "
        f"{counted(stack.count, 'tensor')}, {CATEGORY_WORDS[stack.category]}: {innermost}{phase}"
    )


def profile_page(profiles: Sequence[MemoryProfile]) -> str:
    """Return the page for one or two profiles; everything from a snapshot is escaped."""
    width = WIDTHS[len(profiles)]
    points = [point for profile in profiles for point in profile.timeline]
    most_bytes = max((sum(point.bytes) for point in points), default=0)
    drawn = {box.category for profile in profiles for box in profile.flame_graph}
    for point in points:
        drawn |= {category for category, size in zip(CATEGORIES, point.bytes, strict=True) if size}
    return drawn_page(
        "profile.html.j2",
        profiles=profiles,
        answer=answer,
        stack_heading=stack_heading,
        categories=category_table(profiles),
        legend=[(each, CATEGORY_WORDS[each]) for each in CATEGORIES if each in drawn],
        timelines=[timeline_chart(each, width=width, most_bytes=most_bytes) for each in profiles],
        flames=[flame_chart(each, width=width) for each in profiles],
        places=[place_table(each, most=len(each.places)) for each in profiles],
    )
