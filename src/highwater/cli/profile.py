"""``highwater profile``: what was alive in a memory snapshot, at its peak or when memory ran
out.
"""

import argparse
import shlex
from pathlib import Path

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, UsageError
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.pages.profile.profile_tables import category_table, place_table
from highwater.store.directory import check_new_file, free_name, write_new_file

_MOST_PATHS = 2


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
    profiles = [memory_profile(path) for path in paths]
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
