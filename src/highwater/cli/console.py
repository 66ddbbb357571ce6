"""Output of the commands: the answer to stdout, talk to stderr. Colours and live tables are for
terminals alone. SIGTERM, from a scheduler or `docker stop`, ends a command as Ctrl-C does, and so
does SIGHUP, of a closing terminal, end a training.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import TextIO

from highwater.errors import (
    EXIT_ANSWERED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    HighwaterError,
    UsageError,
)
from highwater.nouns.codec import to_json
from highwater.nouns.secrets import kept, without_secrets
from highwater.pages.table import TextTable, plain_table, terminal_table, terminal_text
from highwater.pages.text import ascii_json, folded, plain, plain_json, plain_lines

_STDOUT, _STDERR = 1, 2
_USUAL_WIDTH = 80
"""Columns of a terminal that does not say how wide it is."""
_DIGITS_OF_A_WIDTH = 6
"""Digits of the shortest COLUMNS that is not heeded: no terminal's has so many."""


def open_streams() -> None:
    """Make stdout and stderr accept any text; UsageError if stdout is closed. Closed descriptors
    are opened to /dev/null: else the next file to be opened, a study, would get their numbers.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    is_closed = sys.stdout is None
    # both stay open until the process ends
    sys.stdout = sys.stdout or open(_STDOUT, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(_STDERR, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if is_closed:
        raise UsageError(
            "stdout is closed: nobody would read the answer", hint="keep it: `> answer.txt`"
        )


def finish_answer() -> None:
    """Flush the answer; raises the errors of ``answer``."""
    with _answering():
        sys.stdout.flush()


def write_no_more(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, including text that is still in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def answer(text: str) -> None:
    """Print text of the answer, folded; raises the errors of ``answer_exactly``."""
    text = plain_lines(text)
    answer_exactly(terminal_text(text, width=width(sys.stdout)) if sys.stdout.isatty() else text)


def answer_exactly(text: str) -> None:
    """Print text that a program is to read, unfolded; UsageError when it cannot be written."""
    with _answering():
        sys.stdout.write(f"{plain_lines(text)}\n")
        sys.stdout.flush()


def answer_table(table: TextTable, *, drawn: Callable[[TextTable], str] = plain_table) -> None:
    """Print a table that is the answer: ``drawn`` whole, or folded for a narrower terminal."""
    text = drawn(table)
    if sys.stdout.isatty():
        columns = width(sys.stdout)
        if drawn is plain_table or max(map(len, text.splitlines())) > columns:
            text = terminal_table(table, width=columns)
    answer_exactly(text)


def answer_page(sentence: str, *tables: TextTable, noted: Sequence[str] = ()) -> None:
    """Print the answer, a sentence if any and tables with empty lines between, then its notes, but
    for those that the answer says.
    """
    if sentence:
        answer(sentence)
    for number, table in enumerate(tables):
        if number or sentence:
            answer("")
        answer_table(table)
    notes([each for each in noted if each[1:] not in sentence])


def answer_json(document: object, code: int = EXIT_ANSWERED, *, noted: Sequence[str] = ()) -> int:
    """Print the document that is the answer, as JSON, after notes on stderr; the exit code."""
    notes(noted)
    text = plain_json(to_json(document, indent=2))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = ascii_json(text)
    with _answering():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    return code


def talk(text: str = "") -> None:
    """Print talk to stderr, folded for a terminal except within backticks."""
    text = plain(text)
    _say("\n".join(folded(text, width(sys.stderr))) if sys.stderr.isatty() else text)


def seldom() -> Callable[[str], None]:
    """Return a function that prints progress: the first text at once, then one in 5 s at most."""
    said_s: dict[str, float] = {}  # when each text was said

    def say(text: str) -> None:
        if text not in said_s and time.monotonic() > max(said_s.values(), default=0.0) + 5:
            said_s[text] = time.monotonic()
            talk(text)

    return say


def notes(lines: Sequence[str]) -> None:
    """Print notes for the user to stderr, one on each line."""
    for line in lines:
        talk(f"note: {line}")


def next_command(command: str) -> None:
    """Print the command to type after this answer, on one line however long: it is pasted."""
    _say(f"next: {plain(command)}")


def error(problem: HighwaterError) -> None:
    """Print an error and its hint."""
    talk(f"error: {without_secrets(problem.problem)}")
    talk()
    talk(f"hint: {problem.hint}")


def bug(problem: Exception) -> None:
    """Print that the program itself has failed, and where, without secrets, for a report."""
    talk(
        f"error: highwater itself failed, which is a bug of ours: {type(problem).__name__}: "
        f"{kept(str(problem))}"
    )
    talk()
    talk(
        "hint: finished trials are kept; report it with what follows and the command that you typed"
    )
    _say(plain_lines(f"\n{without_secrets(''.join(traceback.format_exception(problem)))}".rstrip()))


def _say(text: str) -> None:
    """Write a line to stderr; if stderr is closed, drop it and continue."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        write_no_more(sys.stderr)


def width(stream: TextIO) -> int:
    """Terminal columns of a stream; the variable COLUMNS has precedence."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and len(named) < _DIGITS_OF_A_WIDTH and int(named):
        return int(named)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH
    except OSError:
        return _USUAL_WIDTH


@contextmanager
def _answering() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        write_no_more(sys.stdout)
        raise UsageError(
            f"the answer cannot be written: {error.strerror}",
            hint="write it elsewhere; what a search has found is in its study: `highwater show` "
            "shows it again",
        ) from error


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, or at another signal that was passed to ``heeding``."""


@contextmanager
def heeding(number: signal.Signals) -> Generator[None]:
    """Raise Terminated in the block on this signal, unless our starter changed its handling."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, _terminate)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """The code that a shell expects after this signal."""
    return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
