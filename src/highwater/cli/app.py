"""The ``highwater`` command: parse, dispatch, and turn every error into its message and exit code."""

import sys
from collections.abc import Callable, Sequence

from highwater.cli import console
from highwater.cli.interruption import exit_code_of, heeding_sigterm
from highwater.cli.parser import parse, usage
from highwater.errors import EXIT_USER, HighwaterError, UsageError


def main(words: Sequence[str] | None = None) -> int:
    """Run ``highwater`` with these words (default: the command line's); returns its exit code."""
    return guarded(_run, sys.argv[1:] if words is None else words)


def guarded(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """The exit code of a command; an error of the user or the machine is printed, a bug is not caught."""
    try:
        console.open_streams()
        _refuse_what_is_not_utf_8(words)
        with heeding_sigterm():
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


def _refuse_what_is_not_utf_8(words: Sequence[str]) -> None:
    """Raise UsageError for a word that no study could record."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{word} is not UTF-8", hint="rename it: a name with a study has to be UTF-8") from error


def _run(words: Sequence[str]) -> int:
    arguments = parse(words)
    if arguments.command is None:
        sys.stderr.write(usage())
        return EXIT_USER
    # here, so that a slip in the grammar is told at once
    from highwater.cli import commands, doctor, emission, guide, prediction, recommendation, report

    handlers = {
        "find": commands.find,
        "try": commands.try_,
        "predict": prediction.predict,
        "guide": guide.guide,
        "recommend": recommendation.recommend,
        "emit": emission.emit,
        "show": commands.show,
        "report": report.report,
        "doctor": doctor.doctor,
        "schema": commands.schema,
        "compare-search": commands.compare_search,
    }
    return handlers[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
