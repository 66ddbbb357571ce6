"""What the commands print: the answer to stdout, talk to stderr. Colours and live tables only where there is a terminal."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from highwater.cli.progress import Progress
from highwater.errors import HighwaterError
from highwater.report.table import TextTable, plain_table, rich_table
from highwater.report.text import plain, plain_json, plain_lines
from highwater.search.campaign import Event
from highwater.spec.codec import to_json
from highwater.spec.study import Question


def answer(text: str) -> None:
    """Print text that is the answer, or a part of it."""
    sys.stdout.write(f"{plain_lines(text)}\n")


def answer_table(table: TextTable) -> None:
    """Print a table that is the answer: drawn on a terminal, in plain columns elsewhere."""
    if not sys.stdout.isatty():
        answer(plain_table(table))
        return
    from rich.console import Console

    Console(file=sys.stdout).print(rich_table(table))


def answer_json(document: object) -> None:
    """Print the one document that is the answer."""
    sys.stdout.write(f"{plain_json(to_json(document, indent=2))}\n")


def talk(text: str = "") -> None:
    """Print to stderr what is not the answer."""
    sys.stderr.write(f"{plain(text)}\n")
    sys.stderr.flush()


def notes(lines: Sequence[str]) -> None:
    """Print what the user should know, one note a line."""
    for line in lines:
        talk(f"note: {line}")


def next_command(command: str) -> None:
    """Print the command that one types after this answer."""
    talk(f"next: {command}")


def error(problem: HighwaterError) -> None:
    """Print an error and its hint."""
    talk(f"error: {problem.problem}")
    talk()
    talk(f"hint: {problem.hint}")


@contextmanager
def progress(question: Question) -> Generator[Callable[[Event], None]]:
    """Show a search while it runs: a live table on a terminal, a line an event elsewhere. Yields who hears the events."""
    state = Progress(question)
    if not sys.stderr.isatty():

        def say(event: Event) -> None:
            state.hear(event)
            talk(state.line(event))

        yield say
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), get_renderable=lambda: rich_table(state.table()), refresh_per_second=2, transient=True):
        yield state.hear
