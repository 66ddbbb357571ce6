"""Classify a foreign trainer's trial from outside, by its exit status, signals and log.

The trainer's processes write no report of ours. So a length *fits* only if the trainer exited 0,
its log shows the steps with a proof beside them, and no allocation failed during them. It does
*not* fit only if lack of memory certainly ended the trial: by the last error of the rank that
failed, or by the kernel. A log that proves neither is a crash or a timeout.

Of each rank only the last error counts that is not a consequence of another rank's: a rank that
loses its peer reports an error too, and so does the launcher. If a rank's log goes on after an
error, with steps or other text, that error did not end the trial.
"""

import math
import re
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from highwater.nouns.codec import Record
from highwater.nouns.oom import (
    TORCH_SENTENCE,
    Exhausted,
    logged_memory,
    memory_aborted,
    tells_of_allocation,
)
from highwater.nouns.trial import Device, Outcome, TrialSpec
from highwater.trainers.logs import TRACEBACK, LogLine, StepsShown, log_lines, progress_of
from highwater.trials.classify import Verdict
from highwater.trials.job import SIGNALLED, how_ended
from highwater.units import counted, format_seconds

_TYPED = re.compile(
    r"(?P<kind>(?!nccl[A-Z])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)"
    r"(?:\(\w+\))?)(?:: ?(?P<text>.*))?"
)
"""An exception's type and text. NCCL's result names, such as ``ncclSystemError``, do not match."""
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*(?:\(\w+\))?)(?:: ?(?P<text>.*))?")
"""Any exception in the last line of a traceback."""
_LOGGED = re.compile(
    r"[^'\"`]{0,200}?\b(?:ERROR|CRITICAL|FATAL)\b[^'\"`]{0,200}?"
    r"(?P<kind>(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*Error): ?(?P<text>.*)"
)
_SAID = re.compile(
    r"[^'\"`]{0,200}?\b(?P<kind>ERROR|Error|error|CRITICAL|FATAL)\b[^'\"`]{0,200}?"
    rf"(?P<text>{TORCH_SENTENCE}.*)"
)
"""The sentence of PyTorch's allocator in a line that does not name the exception's type."""
_REFUSED = re.compile(r"(?P<kind>[\w./-]+(?: [\w./-]+){0,4}: error): (?P<text>\S.*)")
"""Sentence of a command-line parser that refuses its arguments."""
_CAUSES = "The above exception was the direct cause of the following exception:"
_ABORTS = "terminate called after throwing an instance of"
_BROKEN_LINES = 3
"""Lines after an error's first line that belong to its text, whatever they look like."""
_LONGER_LINES = 12
"""Lines after an error's first line that may continue its text: a CUDA failure that NCCL met, or a
sentence broken at 80 columns."""
_NCCL_WARNED = re.compile(r"NCCL WARN .*(?:out of memory|Failed to CUDA \w*alloc)")
_WENT_ON = re.compile(
    r"\b(?:skips|skipped|skipping|dropp(?:ed|ing)|retr(?:y|ies|ying)|(?:trying|run) again"
    r"|(?<!Exception )ignor(?:ed|ing)|(?:fall|fell|falling) ?back|continu(?:es|ing)"
    r"|(?:going|moving) on|recover(?:ed|ing)"
    r"|(?:reducing|decreasing|lowering|halving) .{0,40}\bto)\b",
    re.IGNORECASE,
)
"""Words by which a trainer says that it went on after an error."""
_WARNED = re.compile(r"(?<!NCCL )\bWARN")
_FROM_THE_START = re.compile(r"<module>|<frozen|_bootstrap|ray::")
"""Matches a traceback's first frame if nobody caught the exception before the program ended."""
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
"""Texts that say that another process ended, or that a peer was lost."""


class LoggedError(NamedTuple):
    """An error that a log shows."""

    stream: str
    at: int
    """Index of its line in the log."""
    kind: str
    text: str
    memory: Exhausted | None
    """The kind of memory that ran out; None if the error is about something else."""
    is_consequence: bool = False
    """True if the error says that another process failed or went away."""
    is_uncaught: bool = False
    """True if the error certainly ended its rank."""
    went_on: bool = False
    """True if its rank says that it went on after the error."""

    @property
    def said(self) -> str:
        """The error as one line of text."""
        return f"{self.kind}: {self.text}".rstrip(": ")


def errors_of(lines: Sequence[LogLine], *, device: Device) -> list[LoggedError]:
    """List all errors of a log in order. In a chain of causes, the first about memory counts."""
    streams: dict[str, list[tuple[int, LogLine]]] = {}
    for at, line in enumerate(lines):
        streams.setdefault(line.stream, []).append((at, line))
    found = [error for stream, own in streams.items() for error in _of_stream(stream, own, device)]
    if device == "cuda" and any(_NCCL_WARNED.search(line.text) for line in lines):
        # NCCL's error names its reason, or leaves it to the warning before it.
        found = [
            error._replace(memory=error.memory or "device_memory")
            if "unhandled cuda error" in error.text
            else error
            for error in found
        ]
    return sorted(found, key=lambda error: error.at)


def ending_error(errors: Sequence[LoggedError], *, progress_at: int | None) -> LoggedError | None:
    """The error that ended the trial; None if no error certainly did.

    ``progress_at`` is the index of the line that shows the last step: a rank with an older error
    continued, unless the error is known to have ended it. The first such error decides; without
    one, lack of memory is the reason only if no rank reports anything else.
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
            error = LoggedError(stream, at, *raised, None, is_uncaught=line.is_uncaught)
            error = _judged(error, following, device)
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
    """The exception's type and text in a line; None if the line has no exception."""
    found = _TYPED.fullmatch(text) or _LOGGED.fullmatch(text) or _REFUSED.fullmatch(text)
    found = found or _SAID.fullmatch(text)
    if found is None and in_traceback:
        found = _RAISED.fullmatch(text)
    return None if found is None else (found["kind"], (found["text"] or "").strip())


def _judged(
    error: LoggedError, following: Sequence[tuple[int, LogLine]], device: Device
) -> LoggedError:
    """The error with fields set by its whole text: exhausted memory, and if it is a consequence."""
    whole = " ".join((error.text, *_until_other(following)))
    memory = logged_memory(error.kind, whole, device=device)
    after = _OF_ANOTHER.search(error.kind) or _AFTER_ANOTHER.search(whole)
    return error._replace(memory=memory, is_consequence=memory is None and after is not None)


def _until_other(lines: Sequence[tuple[int, LogLine]]) -> Iterator[str]:
    """Yield the rest of an error's text, up to an empty line or the start of another error."""
    for _, line in lines:
        if not line.text.strip() or TRACEBACK[:-1] in line.text:
            return
        if _TYPED.fullmatch(line.text):
            return
        yield line.text.strip()


_KILLED = re.compile(
    r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|terminated with signal SIGKILL"
    r"|killed by signal: Killed|return code = -9\b|^(?:.*\d\s+)?Killed\b"
)
"""Words by which launchers and shells say that a process was killed."""

_ERROR = re.compile(r"\W{0,8}(?:error|fatal|critical)\b(?!\W{0,4}(?:\d|none\b))", re.IGNORECASE)
"""Beginning of a line that reports an error; ``error: 0.02`` is a figure and does not match."""
_NOT_EACH = "not each in its turn with its own loss: `--done-pattern REGEX` says what does"
_AGAIN = re.compile(r"\b(?:retr(?:y|ies|ying)|attempt|(?:try|trying) again|batch)\b", re.IGNORECASE)
_SOON = 4
"""Number of lines, from a failed allocation on, in which a new attempt would be announced."""

EndedFor = Literal["timeout", "hang"]


class ForeignEnding(Record, frozen=True, kw_only=True):
    """How a foreign trainer's processes ended, and the end of their log."""

    exit_code: int | None
    """Exit status of the command, 128 + n for signal n; None if the trial was ended."""
    ended_for: EndedFor | None = None
    """Why the trial was ended: its time was up, or nothing moved after memory had run out."""
    timeout_s: float
    log: str
    """The end of the log."""
    steps_done: int | None = None
    """Steps counted by whoever prepared the trial; None: by the pattern, or the usual signs."""
    is_stuck: bool = False
    """True if a process had gone, or none was working, when the trial was ended."""
    kernel_kills: int = 0
    """Processes in the control group that the kernel killed for lack of memory meanwhile."""


class Evidence(Record, frozen=True, kw_only=True):
    """What the log of a running trial shows: steps that are done, lack of memory."""

    steps: int
    has_run_out: bool
    """True if the last error of a rank says that memory ran out, and no step came after it."""
    is_certain: bool
    """True if that error certainly ended its rank."""


def evidence_of(spec: TrialSpec, log: str) -> Evidence:
    """Read the steps, and errors about memory, from the log of a trial that still runs."""
    lines = log_lines(log)
    done = _progress(spec, lines)
    error = ending_error(errors_of(lines, device=spec.device), progress_at=done.at)
    has_run_out = error is not None and error.memory is not None
    return Evidence(
        steps=done.steps,
        has_run_out=has_run_out,
        is_certain=has_run_out and error is not None and error.is_uncaught,
    )


def classify_foreign(spec: TrialSpec, ending: ForeignEnding) -> Verdict:
    """Classify a foreign trainer's trial: its outcome, and a line that explains it."""
    lines = log_lines(ending.log)
    done = _progress(spec, lines)
    if ending.steps_done is not None:
        done = done._replace(steps=ending.steps_done, is_over=False)
    errors = errors_of(lines, device=spec.device)
    error = ending_error(errors, progress_at=done.at)
    killed = _killed_by_the_kernel(spec, ending, lines)
    if killed is not None:
        return killed
    if ending.exit_code is None:
        return _ended(spec, ending, done, error)
    if ending.exit_code == 0:
        return _exited_well(spec, ending, done, lines, errors)
    # An error after the last step, as in an evaluation, says nothing about the steps.
    is_done = done.is_over or (done.steps >= spec.steps and done.loss is not None)
    if error is not None and error.memory is not None and not is_done:
        is_signalled = ending.exit_code > SIGNALLED
        if error.is_uncaught or not is_signalled:
            return _ran_out(spec, error)
    how = how_ended(ending.exit_code)
    if done.steps:
        how += f" after {counted(done.steps, 'step')}"
    said = error or next(reversed(errors), None)  # the error that explains most
    return Verdict(Outcome.CRASHED, f"{how}; its last error: {said.said}" if said else how)


def _progress(spec: TrialSpec, lines: Sequence[LogLine]) -> StepsShown:
    pattern = None if spec.foreign is None else spec.foreign.done_pattern
    return progress_of(lines, steps=spec.steps, pattern=pattern)


def _ended(
    spec: TrialSpec, ending: ForeignEnding, done: StepsShown, error: LoggedError | None
) -> Verdict:
    """Outcome of a trial that was ended: out of memory if its log is certain, else a timeout."""
    has_run_out = error is not None and error.memory is not None
    if error is not None and has_run_out and (error.is_uncaught or ending.is_stuck):
        outcome, reason = _ran_out(spec, error)
        return Verdict(outcome, f"{reason}; the others waited for it until they were ended")
    late = f"not done after {format_seconds(ending.timeout_s)}, {_steps(spec, done)}"
    if error is not None:
        late += f"; its last error: {error.said}"
    return Verdict(Outcome.TIMEOUT, late)


def _exited_well(
    spec: TrialSpec,
    ending: ForeignEnding,
    done: StepsShown,
    lines: Sequence[LogLine],
    errors: Sequence[LoggedError],
) -> Verdict:
    """Verdict on a trial that exited 0, which by itself does not prove that its steps ran."""
    pattern = None if spec.foreign is None else spec.foreign.done_pattern
    takes_any = pattern == "" and ending.steps_done is None
    error = ending_error(errors, progress_at=done.at)
    is_counted = (ending.steps_done or 0) >= spec.steps
    if not (takes_any or is_counted or done.is_over or done.steps >= spec.steps):
        return Verdict(Outcome.CRASHED, _unproven(spec, done, error))
    failed = _failed_allocation(done, lines, errors)
    if failed is not None:
        said = f"exited 0, {_steps(spec, done)}; yet an allocation failed: {failed}"
        return Verdict(Outcome.CRASHED, said)
    if done.loss is not None and not math.isfinite(done.loss):
        return Verdict(Outcome.CRASHED, f"exited 0, with a loss of {done.loss}")
    if not (takes_any or is_counted):
        if not (done.is_over or done.has_each):
            return Verdict(Outcome.CRASHED, f"exited 0, {_steps(spec, done)}, {_NOT_EACH}")
        if (late := _late_error(done, lines, errors)) is not None:
            said = f"exited 0, {_steps(spec, done)}; yet an error came after them: {late}"
            return Verdict(Outcome.CRASHED, said)
    loss = "" if done.loss is None else f", loss {done.loss:.3f}"
    if takes_any:
        return Verdict(Outcome.FIT, f"exited 0, which is taken for {spec.steps} steps{loss}")
    return Verdict(Outcome.FIT, f"{spec.steps} steps seen in the log, exited 0{loss}")


def _failed_allocation(
    done: StepsShown, lines: Sequence[LogLine], errors: Sequence[LoggedError]
) -> str | None:
    """Text of an allocation that failed during the steps, caught or not; None if none failed.

    It matters although the trainer exited 0: a trainer that skips or repeats a batch counts its
    step all the same. A failure before the start of training, such as a kernel that is tried and
    not chosen, counts only if another attempt follows. If the log does not say when training
    starts, a failure before the first step counts too.
    """
    said = {error.at: error.said for error in errors if error.memory is not None}
    texts = [line.text.strip() for line in lines] + [""]
    for at in range(len(lines)):
        is_begun = done.begins_at is not None and at >= done.begins_at
        in_steps = is_begun or (done.first_at is not None and at >= done.first_at)
        tells = partial(tells_of_allocation, may_advise=not in_steps)
        text, following = texts[at : at + 2]
        if at not in said and not tells(text):
            text = f"{text} {following}"  # a sentence may be broken
            if at + 1 in said or tells(following) or not tells(text):
                continue
        is_before = done.begins_at is not None and not is_begun
        if not is_before or _AGAIN.search(" ".join(texts[at : at + _SOON])):
            return said.get(at) or text
    return None


def _late_error(
    done: StepsShown, lines: Sequence[LogLine], errors: Sequence[LoggedError]
) -> str | None:
    """First error in the log after the line of the last step; None if there is none."""
    after = (done.at or 0) + 1
    own = {error.at: error.said for error in errors if not (error.went_on or error.is_consequence)}
    texts = ((at, lines[at].text.strip()) for at in range(after, len(lines)))
    return next((own.get(at, text) for at, text in texts if at in own or _ERROR.match(text)), None)


def _unproven(spec: TrialSpec, done: StepsShown, error: LoggedError | None) -> str:
    """Reason why a trial that exited 0 does not count as a fit."""
    if error is not None:
        return f"exited 0, {_steps(spec, done)}; its last error: {error.said}"
    if done.is_shown:
        return f"exited 0, {_steps(spec, done)}"
    if spec.foreign is not None and spec.foreign.done_pattern:
        return f"exited 0, and nothing in its log matches {spec.foreign.done_pattern!r}"
    return (
        "exited 0, and nothing in its log shows a step: `--done-pattern REGEX` says what does, "
        "`--done-pattern ''` that exit status 0 is enough"
    )


def _killed_by_the_kernel(
    spec: TrialSpec, ending: ForeignEnding, lines: Sequence[LogLine]
) -> Verdict | None:
    """Verdict if the kernel killed for memory and the exit status or the log shows it."""
    if not ending.kernel_kills or ending.exit_code == 0:
        return None
    is_ended_stuck = ending.exit_code is None and ending.is_stuck
    is_killed = ending.exit_code == SIGNALLED + signal.SIGKILL or is_ended_stuck
    if not is_killed and not any(_KILLED.search(line.text) for line in lines):
        return None
    outcome = Outcome.OUT_OF_MEMORY if spec.device == "cpu" else Outcome.HOST_OUT_OF_MEMORY
    return Verdict(outcome, "the kernel killed a process of it for want of host memory")


def _ran_out(spec: TrialSpec, error: LoggedError) -> Verdict:
    is_device = error.memory == "device_memory" or spec.device == "cpu"
    outcome = Outcome.OUT_OF_MEMORY if is_device else Outcome.HOST_OUT_OF_MEMORY
    who = error.stream.strip(" :|>-")
    who = f"process {who}" if who.replace(",", "").isdecimal() else who
    return Verdict(outcome, f"{who}: {error.said}" if who else error.said)


def _steps(spec: TrialSpec, done: StepsShown) -> str:
    if not done.is_shown and not done.steps:
        return "no step seen in its log"
    return f"{min(done.steps, spec.steps)} of {spec.steps} steps seen in its log"
