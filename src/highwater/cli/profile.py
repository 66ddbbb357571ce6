"""``highwater profile``: what was alive in a memory snapshot, at its peak or when memory ran
out.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, SnapshotError, UsageError
from highwater.memory.snapshot.memory_profile import MemoryProfile, memory_profile
from highwater.memory.snapshot.snapshot import HOW_TO_MAKE_ONE
from highwater.pages.profile.profile_tables import category_table, place_table
from highwater.store.directory import check_new_file, free_name, write_new_file
from highwater.store.logs import ranks_snapshots
from highwater.units import format_bytes

_MOST_PATHS = 2
_MOST_RANKS = 8
"""Ranks that are named besides the one that is shown."""


def profile(arguments: argparse.Namespace) -> int:
    """Print what was alive in a snapshot, or in two side by side; write the page that is named."""
    paths: list[str] = arguments.paths
    if len(paths) > _MOST_PATHS:
        raise UsageError(
            f"{len(paths)} snapshots do not go side by side",
            hint=f"name two: `highwater profile {shlex.join(paths[:_MOST_PATHS])}`",
        )
    output = None if arguments.html is None else Path(arguments.html)
    if output is not None:
        check_new_file(output, flag="--html", name="profile.html")
    profiles = [
        _fullest(Path(path)) if _is_folder(path) else memory_profile(path) for path in paths
    ]
    paths = [each.path for each in profiles]
    if output is not None:
        # here, so that no other form waits for the templates
        from highwater.pages.profile.profile_page import profile_page

        write_new_file(output, profile_page(profiles).encode(), flag="--html")
        console.talk(f"the page: {output}")
    if arguments.json:
        console.answer_json({"schema_version": 1, "profiles": profiles})
        return EXIT_ANSWERED
    console.answer_table(category_table(profiles))
    for each in profiles:
        console.answer("")
        console.answer_table(place_table(each))
    if output is None:
        page = free_name("profile.html")
        console.next_command(f"highwater profile {shlex.join(paths)} --html {page}")
    else:
        console.next_command(f"highwater profile {shlex.join(paths)} --json")
    return EXIT_ANSWERED


def _is_folder(path: str) -> bool:
    # which knows no name too long, and no folder without rights
    return os.path.isdir(path)  # noqa: PTH112


def _fullest(folder: Path) -> MemoryProfile:
    """Of the ranks of one step the profile of the one that needed most, with a note that names the
    others.
    """
    paths = ranks_snapshots(folder)
    if not paths:
        raise SnapshotError(f"{folder} has no memory snapshot", hint=HOW_TO_MAKE_ONE)
    if len(paths) > 1:
        console.talk(f"reading {len(paths)} snapshots in {paths[0].parent}")
    profiles: list[MemoryProfile] = []
    problems: list[SnapshotError] = []
    for path in paths:
        try:
            profiles.append(memory_profile(path))
        except SnapshotError as error:
            problems.append(error)
    if not profiles:
        raise problems[0]
    first, *others = sorted(profiles, key=_needed_bytes, reverse=True)
    if others:
        console.notes([f"{Path(first.path).name} is shown, which needed most; {_named(others)}"])
    console.notes([f"not shown: {each.problem}" for each in problems])
    return first


def _needed_bytes(profile: MemoryProfile) -> int:
    return profile.allocated_bytes + (profile.requested_bytes or 0)


def _named(others: Sequence[MemoryProfile]) -> str:
    """What other ranks needed, by their files."""
    named = [
        f"{Path(each.path).name} {format_bytes(_needed_bytes(each))}"
        for each in others[:_MOST_RANKS]
    ]
    rest = len(others) - len(named)
    return f"the others: {', '.join(named)}{f', and {rest} that needed less' if rest else ''}"
