"""``highwater report``, ``profile`` and ``guide``: a study, a snapshot, each length's settings."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from highwater.cli import console
from highwater.cli.commands import newest_study
from highwater.cli.flags import words_without
from highwater.errors import (
    EXIT_ANSWERED,
    EXIT_ANSWERED_NO,
    EXIT_INCONCLUSIVE,
    SnapshotError,
    UsageError,
)
from highwater.memory.snapshot.memory_profile import MemoryProfile, memory_profile
from highwater.memory.snapshot.snapshot import HOW_TO_MAKE_ONE
from highwater.nouns.trainer import TRAINERS
from highwater.pages import guide as guiding
from highwater.pages import study_page as reporting
from highwater.pages.guide import UNKNOWN
from highwater.pages.guide_page import (
    PAGE,
    check_guide_file,
    guide_markdown,
    guide_rows,
    summary,
    write_guide,
)
from highwater.pages.profile import category_table, place_table
from highwater.pages.study_answer import answer_table, study_answer
from highwater.pages.study_commands import resumed
from highwater.pages.study_report import StudyReport, study_report
from highwater.store.directory import check_new_file, free_name, write_new_file
from highwater.store.journal import read_study
from highwater.store.logs import ranks_snapshots
from highwater.units import format_bytes


def report(arguments: argparse.Namespace) -> int:
    """Print the report, or write it and print the answers."""
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        reporting.check_report_file(output)
    named, log_directory = arguments.study, Path(arguments.log_dir)
    study = read_study(Path(named)) if named else newest_study(log_directory)
    console.notes(study.notes)
    made = study_report(study)
    if output is not None:
        console.talk(f"the report: {reporting.write_report(output, made)}")
    if arguments.json:
        return console.answer_json(made)
    if output is None:
        console.answer(reporting.report_text(made, ".md").rstrip("\n"))
    else:
        console.answer_page(study_answer(study), answer_table(study))
    console.next_command(_after_report(made, output))
    return EXIT_ANSWERED


def _after_report(made: StudyReport, output: Path | None) -> str:
    """The next command: to finish the search, write the report as a page, or show the study."""
    study = made.study
    if not study.complete and study.command:
        return f"{shlex.join(resumed(study))}  (answers the rest)"
    path = shlex.quote(study.path or "")
    if output is None:
        return f"highwater report {path} -o {free_name('report.html')}"
    return f"highwater show {path} --as published"


_MOST_PATHS = 2
_MOST_RANKS = 8
"""Most ranks that are named besides the one that is shown."""


def profile(arguments: argparse.Namespace) -> int:
    """Print the live bytes of a snapshot, or of two side by side; write the requested page."""
    paths: list[str] = arguments.paths
    if len(paths) > _MOST_PATHS:
        raise UsageError(
            f"{len(paths)} snapshots do not go side by side",
            hint=f"name two: `highwater profile {shlex.join(paths[:_MOST_PATHS])}`",
        )
    output = None if arguments.html is None else Path(arguments.html)
    if output is not None:
        check_new_file(output, flag="--html", name="profile.html")
    profiles = [  # os.path.isdir raises nothing for a name too long
        _fullest(Path(path)) if os.path.isdir(path) else memory_profile(path)  # noqa: PTH112
        for path in paths
    ]
    paths = [each.path for each in profiles]
    if output is not None:
        # imported here: only the page needs templates
        from highwater.pages.profile import profile_page

        write_new_file(output, profile_page(profiles).encode(), flag="--html")
        console.talk(f"the page: {output}")
    if arguments.json:
        return console.answer_json({"schema_version": 1, "profiles": profiles})
    console.answer_page("", category_table(profiles), *map(place_table, profiles))
    then = f"--html {free_name('profile.html')}" if output is None else "--json"
    console.next_command(f"highwater profile {shlex.join(paths)} {then}")
    return EXIT_ANSWERED


def _fullest(folder: Path) -> MemoryProfile:
    """Profile of the rank with the highest peak, with a note that names the other ranks."""
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
    named = [
        f"{Path(each.path).name} {format_bytes(_needed_bytes(each))}"
        for each in others[:_MOST_RANKS]
    ]
    rest = len(others) - len(named)
    return f"the others: {', '.join(named)}{f', and {rest} that needed less' if rest else ''}"


_FILES = (".csv", ".jsonl", ".json")


def guide(arguments: argparse.Namespace) -> int:
    """Print the guide, or write it to a file and print the longest length of each model."""
    for flag in (arguments.predict, arguments.cluster):
        # `--gpus KIND FILE`: argparse gives both to the flag
        arguments.sources += [word for word in flag if word.endswith(_FILES)]
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        check_guide_file(output)
    made = guiding.guide(
        *arguments.sources,
        predict=[word for word in arguments.predict if not word.endswith(_FILES)],
        gpus=[word for word in arguments.cluster if not word.endswith(_FILES)],
        trainer=arguments.predicted_for,
        gpu_memory=arguments.gpu_memory,
    )
    console.notes(made.notes)
    if output is not None:
        is_replayed = TRAINERS[arguments.predicted_for].traces == "bundled"
        if output.suffix == PAGE and arguments.predict and is_replayed:
            console.talk(
                "the page's chooser: a quarter of a minute for each model and number of GPUs "
                "whose traces are replayed"
            )
        console.talk(f"the guide: {write_guide(output, made)}")
    is_open = any(choice.label == UNKNOWN for choice in made.choices)
    code = EXIT_INCONCLUSIVE if is_open else EXIT_ANSWERED_NO
    if any(choice.capacity is not None for choice in made.choices):
        code = EXIT_ANSWERED
    if arguments.json:
        return console.answer_json(guide_rows(made), code)
    if output is None:
        console.answer(guide_markdown(made).rstrip("\n"))
    else:
        reached = (
            f"{t.device_name}, {t.gpus_in_words}, {t.training}: {summary(t)}" for t in made.tables
        )
        console.answer("\n".join(reached))
    words = arguments.command_line
    if output is None:
        words = (*words, "-o", free_name("guide.md"))
    else:
        words = (*words_without(words, "-o", "--output"), "--json")
    console.next_command(shlex.join(words))
    return code
