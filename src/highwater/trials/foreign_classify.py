"""The outcome of a foreign trainer's trial, from outside: exit status, signals, and its log.

Nobody reports from within. So a length fits only where the trainer exited 0, its log shows the
steps with a proof beside them, and no allocation failed among them; and does not fit only where
want of memory certainly ended the trial: by the last error of the rank that failed, or by the
kernel. What proves neither is a crash, or a timeout.
"""

import math
import re
import signal
from collections.abc import Sequence
from functools import partial
from typing import Literal

from highwater.nouns.codec import Record
from highwater.nouns.oom import tells_of_allocation
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.classify import Verdict
from highwater.trials.foreign_errors import LoggedError, ending_error, errors_of
from highwater.trials.foreign_log import LogLine, log_lines
from highwater.trials.foreign_progress import StepsShown, progress_of
from highwater.trials.trial_process import SIGNALLED, how_ended
from highwater.units import counted, format_seconds

_KILLED = re.compile(
    r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|terminated with signal SIGKILL"
    r"|killed by signal: Killed|return code = -9\b|^(?:.*\d\s+)?Killed\b"
)
"""How launchers and shells say that a process was killed."""

_ERROR = re.compile(r"\W{0,8}(?:error|fatal|critical)\b(?!\W{0,4}(?:\d|none\b))", re.IGNORECASE)
"""How a line of an error begins; ``error: 0.02`` is a figure."""
_NOT_EACH = "not each in its turn with its own loss: `--done-pattern REGEX` says what does"
_AGAIN = re.compile(r"\b(?:retr(?:y|ies|ying)|attempt|(?:try|trying) again|batch)\b", re.IGNORECASE)
_SOON = 4
"""Lines from a failed allocation on in which another attempt is spoken of."""

EndedFor = Literal["timeout", "hang"]


class ForeignEnding(Record, frozen=True, kw_only=True):
    """How the processes of a foreign trainer's trial ended."""

    exit_code: int | None
    """Exit status of what was started, 128 + n for signal n; None where it was ended."""
    ended_for: EndedFor | None = None
    """Why it was ended: time was up, or nothing moved after memory had run out."""
    timeout_s: float
    log: str
    """The end of what it wrote."""
    steps_done: int | None = None
    """Steps by whoever prepared the trial; None: by the question's pattern, or the usual signs."""
    is_stuck: bool = False
    """Whether, when it was ended, a process had gone or none was working."""
    kernel_kills: int = 0
    """Processes that the kernel killed for want of memory meanwhile, in its control group."""


class Evidence(Record, frozen=True, kw_only=True):
    """What a log says while its trial runs."""

    steps: int
    has_run_out: bool
    """Whether the last error of a rank says that memory ran out, and nothing went on after it."""
    is_certain: bool
    """Whether that error certainly ended its rank."""


def evidence_of(spec: TrialSpec, log: str) -> Evidence:
    """What the log of a trial that still runs says of its steps, and of memory."""
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
    """Decide the one outcome of a foreign trainer's trial."""
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
    # what runs out after the last step, as an evaluation, says nothing of the steps
    is_done = done.is_over or (done.steps >= spec.steps and done.loss is not None)
    if error is not None and error.memory is not None and not is_done:
        is_signalled = ending.exit_code > SIGNALLED
        if error.is_uncaught or not is_signalled:
            return _ran_out(spec, error)
    return Verdict(Outcome.CRASHED, _crash(ending.exit_code, done, error, errors))


def _progress(spec: TrialSpec, lines: Sequence[LogLine]) -> StepsShown:
    pattern = None if spec.foreign is None else spec.foreign.done_pattern
    return progress_of(lines, steps=spec.steps, pattern=pattern)


def _ended(
    spec: TrialSpec, ending: ForeignEnding, done: StepsShown, error: LoggedError | None
) -> Verdict:
    """Decide for a trial that was ended: by its log where that is certain, else a timeout."""
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
    """Decide for a trial that exited 0, which proves nothing by itself."""
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
    """What tells of an allocation that failed while the steps were done, caught or not; None where
    nothing does.

    A trainer that leaves out a batch, or tries it again, counts the step all the same. What fails
    before training is said to begin, as a kernel that is tried and not taken, says nothing, unless
    it is followed by another attempt; where nobody says that it begins, whatever stands before the
    first step may be of it.
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
    """An error after what shows the last step; None where there is none. Whoever shows steps that
    an earlier run did ends so.
    """
    after = (done.at or 0) + 1
    own = {error.at: error.said for error in errors if not (error.went_on or error.is_consequence)}
    texts = ((at, lines[at].text.strip()) for at in range(after, len(lines)))
    return next((own.get(at, text) for at, text in texts if at in own or _ERROR.match(text)), None)


def _unproven(spec: TrialSpec, done: StepsShown, error: LoggedError | None) -> str:
    """Why a trial that exited 0 is no fit, in words."""
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
    """The verdict where the kernel killed a process for want of memory, and the trial says that
    one was killed.
    """
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


def _crash(
    exit_code: int, done: StepsShown, error: LoggedError | None, errors: Sequence[LoggedError]
) -> str:
    """A crash in words: how it exited, and the error that says most."""
    how = how_ended(exit_code)
    after = f" after {counted(done.steps, 'step')}" if done.steps else ""
    said = error or next(reversed(errors), None)
    return f"{how}{after}" if said is None else f"{how}{after}; its last error: {said.said}"


def _steps(spec: TrialSpec, done: StepsShown) -> str:
    """How far it was seen to come."""
    if not done.is_shown and not done.steps:
        return "no step seen in its log"
    return f"{min(done.steps, spec.steps)} of {spec.steps} steps seen in its log"
