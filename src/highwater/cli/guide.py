"""``highwater guide``: the simplest settings for each length, from studies, tables and
predictions.
"""

import argparse
import shlex
from pathlib import Path

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, EXIT_INCONCLUSIVE
from highwater.nouns.settings import TRAINED_OTHERWISE
from highwater.nouns.trainer import TRAINERS
from highwater.pages.guide import build as guiding
from highwater.pages.guide.guide import UNKNOWN, Guide
from highwater.pages.guide.guide_page import guide_markdown
from highwater.pages.guide.guide_parts import gpus_heading, summary
from highwater.pages.guide.guide_rows import guide_rows
from highwater.store.directory import free_name

_FILES = (".csv", ".jsonl", ".json")


def guide(arguments: argparse.Namespace) -> int:
    """Print the guide, or write it and print how far each model gets."""
    for flag in (arguments.predict, arguments.cluster):
        # `--gpus KIND FILE`: argparse gives both to the flag
        arguments.sources += [word for word in flag if word.endswith(_FILES)]
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        guiding.check_guide_file(output)
    made = guiding.guide(
        *arguments.sources,
        predict=[word for word in arguments.predict if not word.endswith(_FILES)],
        gpus=[word for word in arguments.cluster if not word.endswith(_FILES)],
        trainer=arguments.predicted_for,
        gpu_memory=arguments.gpu_memory,
        sequences_per_micro_batch=arguments.sequences_per_micro_batch,
        ulysses=arguments.ulysses,
        ring=arguments.ring,
        copies=arguments.copies,
        trained={
            name: getattr(arguments, name)
            for name in TRAINED_OTHERWISE
            if getattr(arguments, name) is not None
        },
    )
    console.notes(made.notes)
    if output is not None:
        is_replayed = TRAINERS[arguments.predicted_for].traces == "bundled"
        if output.suffix == guiding.PAGE and arguments.predict and is_replayed:
            console.talk(
                "the page's chooser: a quarter of a minute for each model and number of GPUs "
                "whose traces are replayed"
            )
        console.talk(f"the guide: {guiding.write_guide(output, made)}")
    if arguments.json:
        console.answer_json(guide_rows(made))
        return _exit_code(made)
    console.answer(_shown(made, is_written=output is not None))
    console.next_command(_after(arguments))
    return _exit_code(made)


def _shown(made: Guide, *, is_written: bool) -> str:
    """The guide; where it is written into a file, how far each model gets."""
    if not is_written:
        return guide_markdown(made).rstrip("\n")
    return "\n".join(
        f"{t.device_name}, {gpus_heading(t)}, {t.training}: {summary(t)}" for t in made.tables
    )


def _after(arguments: argparse.Namespace) -> str:
    """The file, and then its rows."""
    words = list(arguments.command_line)
    if arguments.output is None:
        return shlex.join((*words, "-o", free_name("guide.md")))
    at = next(index for index, word in enumerate(words) if word.startswith(("-o", "--output")))
    del words[at : at + (2 if words[at] in ("-o", "--output") else 1)]
    return shlex.join((*words, "--json"))


def _exit_code(made: Guide) -> int:
    if any(choice.capacity is not None for choice in made.choices):
        return EXIT_ANSWERED
    return (
        EXIT_INCONCLUSIVE
        if any(choice.label == UNKNOWN for choice in made.choices)
        else EXIT_ANSWERED_NO
    )
