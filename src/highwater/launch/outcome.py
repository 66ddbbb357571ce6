"""The outcome of a trial, from everything it left: exit status, signals, the ranks' reports and, last, the log's text."""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from highwater.spec.codec import Noun
from highwater.spec.oom import exhausted_memory
from highwater.spec.trial import Failure, Outcome, RankReport, TrialSpec
from highwater.units import format_seconds

_RANK_EXIT = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
"""A rank and its exit status, in the summary of failures that torchrun ends its log with."""
_LAUNCHER_ERROR = re.compile(r"^torch\.distributed\.elastic\..*ChildFailedError:", re.MULTILINE)
"""Where that summary begins."""
_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt): .*$", re.MULTILINE)
_SENT_BY_OTHERS = {-signal.SIGKILL, -signal.SIGTERM}
"""Exits that say nothing about the process itself: somebody else ended it."""


class Ending(Noun, frozen=True, kw_only=True):
    """How the processes of a trial ended."""

    exit_code: int | None
    """Of the launcher; None when it was ended because time was up."""
    timeout_s: float
    reports: tuple[RankReport, ...]
    log_tail: str
    host_kills: int
    """Processes that the kernel killed for want of host memory while the trial ran, on the whole machine."""
    damaged_reports: tuple[str, ...] = ()
    """Reports that could not be read, and why, a line each: their ranks count as silent."""


class Verdict(NamedTuple):
    """An outcome and the one line that says why."""

    outcome: Outcome
    reason: str


def judge(spec: TrialSpec, ending: Ending) -> Verdict:
    """The one outcome of a trial.

    A log is read only where a rank died without a report: in a good trial any text may stand there.
    """
    failures = {report.rank: report.failure for report in ending.reports if report.failure is not None}
    for rank, failure in failures.items():
        if failure.kind == "device_memory":
            return Verdict(Outcome.OUT_OF_MEMORY, _say(rank, failure))
        if failure.kind == "host_memory":
            return Verdict(Outcome.HOST_OUT_OF_MEMORY, _say(rank, failure))
    # After memory: who failed for want of it may leave peers that hang until time is up.
    if ending.exit_code is None:
        return Verdict(Outcome.TIMEOUT, f"not done after {format_seconds(ending.timeout_s)}{_phases(ending.reports)}")
    silent = set(range(spec.layout.gpus)) - {report.rank for report in ending.reports}
    if silent:
        outcome, reason = _judge_silence(spec, ending, silent, failures)
        return Verdict(outcome, "; ".join((reason, *ending.damaged_reports)))
    if failures:
        return Verdict(Outcome.CRASHED, _say(*_first(failures)))
    if ending.exit_code != 0:
        return Verdict(Outcome.CRASHED, f"every rank reported success, yet the launcher exited with {ending.exit_code}")
    return _judge_reports(spec, ending.reports)


def _judge_silence(spec: TrialSpec, ending: Ending, silent: set[int], failures: dict[int, Failure]) -> Verdict:
    """Some ranks left no report: the kernel, a signal or an abort in native code ended them."""
    exits = {int(rank): int(code) for rank, code in _RANK_EXIT.findall(ending.log_tail) if int(rank) in silent}
    if ending.host_kills and -signal.SIGKILL in exits.values():
        memory = Outcome.OUT_OF_MEMORY if spec.device == "cpu" else Outcome.HOST_OUT_OF_MEMORY
        return Verdict(memory, "the kernel killed a worker for want of host memory")
    # Who was ended by somebody else did not end for what the log says.
    exhausted = None if exits and set(exits.values()) <= _SENT_BY_OTHERS else exhausted_memory(ending.log_tail, device=spec.device)
    if exhausted is not None:
        memory = Outcome.OUT_OF_MEMORY if exhausted == "device_memory" else Outcome.HOST_OUT_OF_MEMORY
        return Verdict(memory, "a worker died without a report after its log said that memory ran out")
    signals = {rank: -code for rank, code in sorted(exits.items()) if code < 0 and code != -signal.SIGTERM}
    if signals:
        rank, number = next(iter(signals.items()))
        return Verdict(Outcome.CRASHED, f"rank {rank} was ended by signal {number} ({_signal_name(number)})")
    if failures:
        return Verdict(Outcome.CRASHED, _say(*_first(failures)))
    ranks = "1 rank" if len(silent) == 1 else f"{len(silent)} ranks"
    said = _last_error(ending.log_tail)
    return Verdict(Outcome.CRASHED, f"{ranks} left no report; the launcher exited with {ending.exit_code}{said}")


def _judge_reports(spec: TrialSpec, reports: Sequence[RankReport]) -> Verdict:
    """Every process exited 0 and reported: what is left is whether the training was one."""
    for report in reports:
        if len(report.losses) < spec.steps:
            return Verdict(Outcome.CRASHED, f"rank {report.rank} did {len(report.losses)} of {spec.steps} steps")
    if spec.attention_depth is not None:
        layers = "the last layer" if spec.attention_depth == 1 else f"the last {spec.attention_depth} layers"
        return Verdict(Outcome.MEMORY_ONLY_FIT, f"{spec.steps} steps done, with attention over whole documents in {layers} only")
    return Verdict(Outcome.FIT, f"{spec.steps} steps done, loss {reports[0].losses[-1]:.3f}")


def _first(failures: dict[int, Failure]) -> tuple[int, Failure]:
    """The failure that came first: the others lost their peer to it."""
    return min(failures.items(), key=lambda item: (item[1].at_unix_s or 0.0, item[0]))


def _say(rank: int, failure: Failure) -> str:
    first_line = failure.text.strip().splitlines()[0] if failure.text.strip() else failure.kind
    return f"rank {rank}, {failure.phase}: {first_line}"


def _phases(reports: Sequence[RankReport]) -> str:
    phases = sorted({report.failure.phase for report in reports if report.failure})
    return f"; a rank had failed in {', '.join(phases)}" if phases else ""


def _last_error(log_tail: str) -> str:
    """The last line of the log that names an error, before the launcher's own."""
    errors = _ERROR_LINE.findall(_LAUNCHER_ERROR.split(log_tail, maxsplit=1)[0])
    return f"; the last error in the log: {errors[-1]}" if errors else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
