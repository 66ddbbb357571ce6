"""A memory profile, or two side by side, as one HTML page that needs nothing else: no network, no
script.
"""

from collections.abc import Sequence

from highwater.memory.snapshot.attribution import CATEGORIES
from highwater.memory.snapshot.memory_profile import MemoryProfile
from highwater.pages.page import drawn_page
from highwater.pages.profile import profile_tables
from highwater.pages.profile.profile_tables import (
    WIDTHS,
    flame_picture,
    most_bytes,
    timeline_picture,
)


def profile_page(profiles: Sequence[MemoryProfile]) -> str:
    """Write the whole page for one or two profiles. Everything from a snapshot is escaped."""
    width = WIDTHS[len(profiles)]
    scale = most_bytes(profiles)
    shown = {category for profile in profiles for category in _categories(profile)}
    return drawn_page(
        "profile.html.j2",
        profiles=profiles,
        tables=profile_tables,
        categories=profile_tables.category_table(profiles),
        legend=[(each, profile_tables.WORDS[each]) for each in CATEGORIES if each in shown],
        timelines=[timeline_picture(each, width=width, most_bytes=scale) for each in profiles],
        flames=[flame_picture(each, width=width) for each in profiles],
        places=[profile_tables.place_table(each, most=len(each.places)) for each in profiles],
    )


def _categories(profile: MemoryProfile) -> set[str]:
    """Categories of which something is drawn."""
    drawn = {each.category for each in profile.flame_graph}
    for point in profile.timeline:
        drawn |= {category for category, size in zip(CATEGORIES, point.bytes, strict=True) if size}
    return drawn
