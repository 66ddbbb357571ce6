"""Errors in the log of a foreign trainer, and which of them ended it.

What counts is the last error of each rank that is no consequence of another's: a rank that loses
its peer says so, and so does the launcher, after the error that began it. An error that its rank
went on after, by its steps or by its words, did not end it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from highwater.nouns.oom import TORCH_SENTENCE, Exhausted, logged_memory, memory_aborted
from highwater.nouns.trial import Device
from highwater.trials.foreign_log import TRACEBACK, LogLine

_TYPED = re.compile(
    r"(?P<kind>(?!nccl[A-Z])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)"
    r"(?:\(\w+\))?)(?:: ?(?P<text>.*))?"
)
"""An exception's type and text; what NCCL calls its results, ``ncclSystemError``, is none."""
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*(?:\(\w+\))?)(?:: ?(?P<text>.*))?")
"""Any exception, where a traceback ends."""
_LOGGED = re.compile(
    r"[^'\"`]{0,200}?\b(?:ERROR|CRITICAL|FATAL)\b[^'\"`]{0,200}?"
    r"(?P<kind>(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*Error): ?(?P<text>.*)"
)
_SAID = re.compile(
    r"[^'\"`]{0,200}?\b(?P<kind>ERROR|Error|error|CRITICAL|FATAL)\b[^'\"`]{0,200}?"
    rf"(?P<text>{TORCH_SENTENCE}.*)"
)
"""The sentence of PyTorch's allocator where an error is told without its type."""
_REFUSED = re.compile(r"(?P<kind>[\w./-]+(?: [\w./-]+){0,4}: error): (?P<text>\S.*)")
"""What a command line's parser says of words that it does not take."""
_CAUSES = "The above exception was the direct cause of the following exception:"
_ABORTS = "terminate called after throwing an instance of"
_BROKEN_LINES = 3
"""Lines after an error's first one that belong to its text, whatever they look like."""
_LONGER_LINES = 12
"""Lines after an error's first one over which its text may go: a failure of CUDA that NCCL met, or
a sentence that was broken at 80 columns."""
_NCCL_WARNED = re.compile(r"NCCL WARN .*(?:out of memory|Failed to CUDA \w*alloc)")
_WENT_ON = re.compile(
    r"\b(?:skips|skipped|skipping|dropp(?:ed|ing)|retr(?:y|ies|ying)|(?:trying|run) again"
    r"|(?<!Exception )ignor(?:ed|ing)|(?:fall|fell|falling) ?back|continu(?:es|ing)"
    r"|(?:going|moving) on|recover(?:ed|ing)"
    r"|(?:reducing|decreasing|lowering|halving) .{0,40}\bto)\b",
    re.IGNORECASE,
)
"""How a trainer says that an error did not end it."""
_WARNED = re.compile(r"(?<!NCCL )\bWARN")
_FROM_THE_START = re.compile(r"<module>|<frozen|_bootstrap|ray::")
"""In a traceback's first frame: nobody caught the exception on its way out of the program."""
_OF_ANOTHER = re.compile(
    r"(?:^|[ .])(?:ChildFailedError|SignalException|CalledProcessError|DistNetworkError"
    r"|DistStoreError|RayTaskError\(?.*|RayActorError|ActorDiedError|ActorUnavailableError"
    r"|WorkerCrashedError|BrokenProcessPool|ProcessRaisedException|ProcessExitedException"
    r"|BrokenPipeError|ConnectionResetError|ConnectionAbortedError|ConnectionRefusedError"
    r"|EOFError|KeyboardInterrupt|SystemExit|(?:srun|slurmstepd|mpirun|mpiexec|prterun): error)$"
)
"""Exceptions that say that another process ended."""
_AFTER_ANOTHER = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|NCCL communicator was aborted"
    r"|remote process exited|Watchdog caught collective operation timeout"
    r"|Some NCCL operations have failed or timed out|Application timeout caused pair closure"
    r"|Timed out waiting \d+ms|DataLoader worker .{0,40} exited unexpectedly",
    re.IGNORECASE,
)
"""Texts that say so."""


class LoggedError(NamedTuple):
    """An error that a log shows."""

    stream: str
    at: int
    """Index of its line."""
    kind: str
    text: str
    memory: Exhausted | None
    """Which memory it says ran out; None: it is about something else."""
    is_consequence: bool = False
    """Whether it says that another process failed, or went away."""
    is_uncaught: bool = False
    """Whether it certainly ended its rank."""
    went_on: bool = False
    """Whether its rank says that it went on."""

    @property
    def said(self) -> str:
        """The error in a line."""
        return f"{self.kind}: {self.text}".rstrip(": ")


def errors_of(lines: Sequence[LogLine], *, device: Device) -> list[LoggedError]:
    """Every error in a log, in its order; of a chain of causes the first that is memory's."""
    streams: dict[str, list[tuple[int, LogLine]]] = {}
    for at, line in enumerate(lines):
        streams.setdefault(line.stream, []).append((at, line))
    found = [error for stream, own in streams.items() for error in _of_stream(stream, own, device)]
    if device == "cuda" and any(_NCCL_WARNED.search(line.text) for line in lines):
        # NCCL's error names its reason, or leaves it to the warning before it
        found = [
            error._replace(memory=error.memory or "device_memory")
            if "unhandled cuda error" in error.text
            else error
            for error in found
        ]
    return sorted(found, key=lambda error: error.at)


def ending_error(errors: Sequence[LoggedError], *, progress_at: int | None) -> LoggedError | None:
    """The error that ended the trial; None where none is certain to have.

    ``progress_at`` is the line that shows the last step: whoever wrote an error before it went on,
    unless the error is known to have ended its rank. Where some are known to, the first of those
    decides; else want of memory is the reason only where no rank says anything different.
    """
    last: dict[str, LoggedError] = {}
    for error in errors:
        if not error.is_consequence:
            last[error.stream] = error
    ended = sorted(
        (
            error
            for error in last.values()
            if not error.went_on
            and (error.is_uncaught or progress_at is None or error.at > progress_at)
        ),
        key=lambda error: error.at,
    )
    uncaught = (error for error in ended if error.is_uncaught)
    others = (error for error in ended if error.memory is None)
    return next(uncaught, None) or next(others, None) or next(iter(ended), None)


def _of_stream(
    stream: str, lines: Sequence[tuple[int, LogLine]], device: Device
) -> list[LoggedError]:
    """The errors of one stream."""
    found: list[LoggedError] = []
    in_traceback = is_caused = is_warned = False
    before, quotes_to = "", -1
    for number, (at, line) in enumerate(lines):
        text = line.text
        if TRACEBACK[:-1] in text:
            in_traceback = True
            frame = lines[number + 1][1].text if number + 1 < len(lines) else ""
            is_caught = _FROM_THE_START.search(frame) is None
            is_warned = before.startswith("Exception ignored in") or bool(
                _WENT_ON.search(before) or (is_caught and _WARNED.search(before))
            )
        elif text.startswith(_CAUSES):
            is_caused = True
        elif text.startswith(_ABORTS):
            words = "\n".join(each.text for _, each in lines[number : number + 3])
            memory = memory_aborted(words, device=device)
            kind = text.partition("'")[2].rstrip("'") or "terminate"
            found.append(LoggedError(stream, at, kind, "", memory, is_uncaught=True))
        elif (raised := _raised(text, in_traceback=in_traceback)) is not None:
            if not in_traceback and number <= quotes_to:
                continue
            in_traceback = False
            following = lines[number + 1 : number + 1 + _LONGER_LINES]
            error = _error(stream, at, *raised, line, following, device)
            cause = found[-1] if is_caused and found else None
            if cause is not None and cause.memory is not None:
                error = error._replace(kind=cause.kind, text=cause.text, memory=cause.memory)
            found.append(error._replace(went_on=is_warned))
            is_caused = is_warned = False
            if error.memory is None and not error.is_consequence:
                quotes_to = number + _BROKEN_LINES
        elif found and _WENT_ON.search(text):
            found[-1] = found[-1]._replace(went_on=True)
        if not text or text[0].isspace():
            quotes_to = -1
        before = text or before
    return found


def _raised(text: str, *, in_traceback: bool) -> tuple[str, str] | None:
    """The exception's type and text in a line; None where it has none."""
    found = _TYPED.fullmatch(text) or _LOGGED.fullmatch(text) or _REFUSED.fullmatch(text)
    found = found or _SAID.fullmatch(text)
    if found is None and in_traceback:
        found = _RAISED.fullmatch(text)
    return None if found is None else (found["kind"], (found["text"] or "").strip())


def _error(
    stream: str,
    at: int,
    kind: str,
    text: str,
    line: LogLine,
    following: Sequence[tuple[int, LogLine]],
    device: Device,
) -> LoggedError:
    whole = " ".join((text, *_until_other(following)))
    memory = logged_memory(kind, whole, device=device)
    after = _OF_ANOTHER.search(kind) or _AFTER_ANOTHER.search(whole)
    is_consequence = memory is None and after is not None
    return LoggedError(stream, at, kind, text, memory, is_consequence, line.is_uncaught)


def _until_other(lines: Sequence[tuple[int, LogLine]]) -> Iterator[str]:
    """The rest of an error's text: what follows, up to an empty line or what begins another."""
    for _, line in lines:
        if not line.text.strip() or TRACEBACK[:-1] in line.text:
            return
        if _TYPED.fullmatch(line.text):
            return
        yield line.text.strip()
