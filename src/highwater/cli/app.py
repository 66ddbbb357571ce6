"""The ``highwater`` command: parse, dispatch, and turn errors into messages and exit codes."""

import argparse
import errno
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from keyword import iskeyword
from os.path import lexists
from pathlib import Path

from highwater.cli import console
from highwater.cli.console import exit_code_of, heeding
from highwater.cli.grammar import grammar, parse
from highwater.errors import EXIT_BUG, EXIT_USER, HighwaterError, MachineError, UsageError

_OURS = (errno.EBADF, errno.ECHILD, errno.ESRCH, errno.EFAULT)
"""Error numbers that only a bug causes. All others are the machine's: rights, room, limits."""


def main(words: Sequence[str] | None = None) -> int:
    """Run ``highwater`` with these words (default: the command line's); returns its exit code."""
    return guarded(_run, sys.argv[1:] if words is None else words)


def guarded(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command, print any HighwaterError that it raises, and return the exit code."""
    try:
        console.open_streams()
        _refuse_what_is_not_utf_8(words)
        with heeding(signal.SIGTERM):
            try:
                return run(words)
            finally:
                console.finish_answer()
    except HighwaterError as error:
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return exit_code_of(interrupt)
    except BrokenPipeError:  # the reader of the answer went away: nobody is left to tell
        console.write_no_more(sys.stdout)
        return EXIT_USER
    # the process's edge: exit code 1, Python's own, would say that nothing fits
    except Exception as error:  # noqa: BLE001
        refused = _refused_by_the_machine(error)
        if refused is None:
            console.bug(error)
            return EXIT_BUG
        console.error(refused)
        return refused.exit_code


def _refused_by_the_machine(error: Exception) -> MachineError | None:
    """The MachineError for an operating system error that no code handled; None: a bug of ours."""
    if isinstance(error, MemoryError):
        return MachineError(
            "this machine has no memory left",
            hint="end what else runs here: `ps aux --sort=-rss | head` lists it",
        )
    if not isinstance(error, OSError) or error.errno is None or error.errno in _OURS:
        return None
    if error.filename is None:
        return MachineError(
            f"this machine refused: {error.strerror}",
            hint="`df -h` shows what is full, `ulimit -a` what ends",
        )
    path = str(error.filename)
    there = next((each for each in (path, *map(str, Path(path).parents)) if lexists(each)), path)
    hint = f"`ls -ld {shlex.quote(there)}` shows whose it is, `df -h` what is full"
    return MachineError(f"{path} cannot be used: {error.strerror}", hint=hint)


def _refuse_what_is_not_utf_8(words: Sequence[str]) -> None:
    """Raise UsageError for a word that is not UTF-8, or has a zero byte."""
    for word in words:
        if "\0" in word:
            raise UsageError(f"{word} has a zero byte", hint="leave it out: no name has one")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{word} is not UTF-8", hint="rename it: a name with a study has to be UTF-8"
            ) from error


def _run(words: Sequence[str]) -> int:
    arguments = parse(words)
    if arguments.command_name is None:
        sys.stderr.write(grammar().format_help())
        return EXIT_USER
    return _handler(arguments.command_name)(arguments)


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """Import a command's handler; modules that only other commands need are not imported."""
    match name:
        case "find" | "try" | "show" | "schema":
            from highwater.cli import commands as module
        case "report" | "profile" | "guide":
            from highwater.cli import documents as module
        case "models" | "gpus" | "completion":
            from highwater.cli import catalog as module
        case "train":
            from highwater.cli import train as module
        case "predict" | "data":
            from highwater.cli import predict as module
        case "recommend" | "emit":
            from highwater.cli import recommend as module
        case "doctor":
            from highwater.cli import doctor as module
        case _:
            from highwater.cli import bench as module
    return getattr(module, f"{name}_" if iskeyword(name) else name)


if __name__ == "__main__":
    sys.exit(main())
