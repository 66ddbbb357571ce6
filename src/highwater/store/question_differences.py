"""Differences of questions: why a journal is not resumed by another question than its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from highwater.errors import StudyError
from highwater.nouns.codec import to_builtins
from highwater.nouns.study import Question
from highwater.store.journal_file import free_study

_DIFFERENCES_SHOWN = 4
_NO_PART_OF_A_QUESTION = ("model.directory", "timeout_s")


def another_question(path: Path, *, recorded: Question, asked: Question) -> StudyError:
    """The error for a journal whose question is not the one that is asked: it says what differs."""
    there, here = dict(_flat(recorded)), dict(_flat(asked))
    differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    names = [name for name in differing if name not in _NO_PART_OF_A_QUESTION]
    # Of other cells it is enough to say which there are.
    if "cells" in names:
        names = [name for name in names if not name.startswith("cells.")]
    shown = [
        f"{name} is {there.get(name)} there and {here.get(name)} here"
        for name in names[:_DIFFERENCES_SHOWN]
    ]
    more = f"; and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return StudyError(
        f"{path} asks another question: {'; '.join(shown)}{more}",
        hint=f"use {free_study(path)}, or leave `--study` out: each question gets a file of its "
        "own",
    )


def _flat(question: Question) -> Iterator[tuple[str, Any]]:
    """Every field of a question with its dotted name.

    Cells stand by their labels, and the list of labels is a field of its own.
    """
    fields = to_builtins(question)
    fields["cells"] = {cell.label_on(question.device): to_builtins(cell) for cell in question.cells}
    yield "cells", "; ".join(fields["cells"])
    yield from _leaves(fields, "")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
