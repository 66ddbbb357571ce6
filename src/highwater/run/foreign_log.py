"""The log of a foreign trainer as lines: who wrote each, and what it says without its decoration.

Terminal colours go, a progress bar that overwrites itself becomes a line for each state, and what
launchers put before a rank's lines (torchrun, torch's own hook, Ray, mpirun, srun) becomes the
name of the line's stream.
"""

import re
from typing import NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_LINE_END = re.compile(r"\r\n|[\n\r]")
_HOOK = r"\[rank(?P<hook>\d{1,5})\]: ?"
"""Before each line of an exception that nobody caught, by torch.distributed's own hook."""
_PREFIX = re.compile(
    rf"{_HOOK}"
    r"|\[default(?P<local>\d{1,4})\]: ?"  # torchrun --tee
    r"|\[rank: (?P<lightning>\d{1,5})\] ?"
    r"|\((?:[^()]{0,80} )?pid=(?P<pid>\d{1,10})(?:, ip=[\w.:]{1,40})?\) ?"  # Ray
    r"|\[\d{1,5},(?P<mpi>\d{1,5})\]<std(?:out|err)>: ?"
    r"|(?P<slurm>\d{1,4}): "
)
TRACEBACK = "Traceback (most recent call last):"
"""What Python writes before the frames of an exception."""


_LONGEST = 8192
"""Characters of a line that are read; the longest that anybody means to be read is shorter."""


class LogLine(NamedTuple):
    """One line that somebody wrote."""

    stream: str
    """Whose it is, as the launcher names them; empty where nobody says."""
    text: str
    is_uncaught: bool = False
    """Whether torch.distributed's hook wrote it: it is of an exception that ended its rank."""


def log_lines(text: str) -> list[LogLine]:
    """The lines of a log, states of a progress bar among them, in the order they were written."""
    lines: list[LogLine] = []
    for raw in _LINE_END.split(_ANSI.sub("", text)):
        line = _line(raw[:_LONGEST])
        before, header, after = line.text.partition(TRACEBACK)
        if header and before.strip() and not after.strip():
            # a progress bar leaves no line end before what comes after it
            lines += [line._replace(text=before), line._replace(text=header)]
        else:
            lines.append(line)
    return lines


def _line(raw: str) -> LogLine:
    """A line without the names before it: the first is its stream's."""
    stream, is_uncaught = "", False
    while (found := _PREFIX.match(raw)) is not None:
        kind = str(found.lastgroup)
        stream = stream or f"{kind} {found[kind]}"
        is_uncaught |= kind == "hook"
        raw = raw[found.end() :]
    return LogLine(stream, raw.rstrip(), is_uncaught)
