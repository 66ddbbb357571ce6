"""Classify a trial's outcome by exit status, signals, the ranks' reports and, last, its log."""

import math
import re
import signal
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from highwater.nouns.codec import Record
from highwater.nouns.oom import memory_aborted
from highwater.nouns.trial import Failure, Outcome, RankReport, TrialSpec
from highwater.trials.job import how_ended
from highwater.trials.ranks import RankExit
from highwater.units import format_seconds

_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt): .*$", re.MULTILINE)


class Ending(Record, frozen=True, kw_only=True):
    """How a trial's processes ended: exit codes, ranks' reports, and the end of the log."""

    exit_code: int | None
    """Exit status of the reaper; None if the trial was ended because its time was up."""
    timeout_s: float
    reports: tuple[RankReport, ...]
    exits: tuple[RankExit, ...] = ()
    """Exits of the ranks that ended by themselves, the earliest first."""
    log_tail: str
    kernel_kills: int = 0
    """Number of processes that the kernel killed for lack of memory while the trial ran, counted in
    the control group that the trial's processes belong to."""
    damaged_reports: tuple[str, ...] = ()
    """One line for each report that could not be read, and why. Its rank counts as silent."""


class Verdict(NamedTuple):
    """A trial's outcome, and one line that says why."""

    outcome: Outcome
    reason: str


def classify(spec: TrialSpec, ending: Ending) -> Verdict:
    """Return how our engine's trial ended, and why. Ranks' output counts only without a report."""
    return failure_of(spec, ending) or _classify_reports(spec, ending.reports)


def failure_of(spec: TrialSpec, ending: Ending) -> Verdict | None:
    """Verdict on a trial if a process was ended or failed; None if all processes succeeded."""
    strange = _strange_ranks(spec, ending.reports)
    if strange is not None:
        return Verdict(Outcome.CRASHED, strange)
    failures = {report.rank: report.failure for report in ending.reports if report.failure}
    for rank, failure in failures.items():
        if failure.kind == "device_memory":
            return Verdict(Outcome.OUT_OF_MEMORY, _say(rank, failure))
        if failure.kind == "host_memory":
            return Verdict(Outcome.HOST_OUT_OF_MEMORY, _say(rank, failure))
    # Memory comes first: a rank that runs out may leave peers that hang until time is up.
    if ending.exit_code is None:
        late = f"not done after {format_seconds(ending.timeout_s)}"
        return Verdict(Outcome.TIMEOUT, late + _phases(ending.reports))
    silent = set(range(spec.layout.gpus)) - {report.rank for report in ending.reports}
    if silent:
        outcome, reason = _classify_silence(spec, ending, silent, failures)
        return Verdict(outcome, "; ".join((reason, *ending.damaged_reports)))
    if failures:
        return Verdict(Outcome.CRASHED, _say(*_first(failures)))
    if ending.exit_code != 0:
        exited = f"the trial's processes exited with {ending.exit_code}"
        return Verdict(Outcome.CRASHED, f"every rank reported success, yet {exited}")
    return None


def _strange_ranks(spec: TrialSpec, reports: Sequence[RankReport]) -> str | None:
    """A line about unexpected reports: of an unknown rank, or a second one of a rank; else None."""
    for rank, times in Counter(report.rank for report in reports).items():
        if not 0 <= rank < spec.layout.gpus:
            last = spec.layout.gpus - 1
            return f"there is a report of rank {rank}, in a trial of ranks 0 to {last}"
        if times > 1:
            return f"there are {times} reports of rank {rank}"
    return None


def _classify_silence(
    spec: TrialSpec, ending: Ending, silent: set[int], failures: dict[int, Failure]
) -> Verdict:
    """Decide the outcome of a trial in which some ranks left no report.

    The kernel, a signal or an abort in native code ended them. Memory ran out only if the kernel
    counts a kill, or a rank's last output before an abort says so. A segmentation fault or an exit
    status says nothing about memory, whatever was written before (docs/decisions/027).
    """
    exits = [each for each in ending.exits if each.rank in silent]
    for each in exits:
        memory = _memory_verdict(spec, each, kernel_kills=ending.kernel_kills)
        if memory is not None:
            return memory
    signalled = next((each for each in exits if each.status < 0), None)
    if signalled is not None:
        reason = f"rank {signalled.rank} was {how_ended(signalled.status)}"
        return Verdict(Outcome.CRASHED, reason)
    if failures:
        return Verdict(Outcome.CRASHED, _say(*_first(failures)))
    ranks = "1 rank" if len(silent) == 1 else f"{len(silent)} ranks"
    exited = f"the trial's processes exited with {ending.exit_code}"
    errors = _ERROR_LINE.findall(
        next((each.output for each in exits if each.status), ending.log_tail)
    )
    said = f"; the last error in the log: {errors[-1]}" if errors else ""
    return Verdict(Outcome.CRASHED, f"{ranks} left no report; {exited}{said}")


def _memory_verdict(spec: TrialSpec, ended: RankExit, *, kernel_kills: int) -> Verdict | None:
    """Verdict on a rank that the kernel killed, or that aborted, for lack of memory; else None."""
    if ended.status == -signal.SIGKILL and kernel_kills:
        memory = Outcome.OUT_OF_MEMORY if spec.device == "cpu" else Outcome.HOST_OUT_OF_MEMORY
        return Verdict(memory, f"the kernel killed rank {ended.rank} for want of host memory")
    if ended.status != -signal.SIGABRT:
        return None
    exhausted = memory_aborted(ended.output, device=spec.device)
    if exhausted is None:
        return None
    is_device = exhausted == "device_memory"
    memory = Outcome.OUT_OF_MEMORY if is_device else Outcome.HOST_OUT_OF_MEMORY
    aborted = f"rank {ended.rank} was aborted without a report"
    return Verdict(memory, f"{aborted}: its last words say that memory ran out")


def _classify_reports(spec: TrialSpec, reports: Sequence[RankReport]) -> Verdict:
    """Decide whether a trial trained, given that all its processes exited 0 and reported."""
    for report in reports:
        if len(report.losses) < spec.steps:
            done = f"rank {report.rank} did {len(report.losses)} of {spec.steps} steps"
            return Verdict(Outcome.CRASHED, done)
        if not all(map(math.isfinite, (*report.losses, *report.gradient_norms))):
            reason = "reports a loss or a gradient norm that is no finite number"
            return Verdict(Outcome.CRASHED, f"rank {report.rank} {reason}")
    if spec.attention_depth is not None:
        depth = spec.attention_depth
        layers = "the last layer" if depth == 1 else f"the last {depth} layers"
        reason = f"{spec.steps} steps done, with attention over whole documents in {layers} only"
        return Verdict(Outcome.MEMORY_ONLY_FIT, reason)
    return Verdict(Outcome.FIT, f"{spec.steps} steps done, loss {reports[0].losses[-1]:.3f}")


def _first(failures: dict[int, Failure]) -> tuple[int, Failure]:
    """The earliest failure: later ones are often of ranks that lost the failed one."""
    return min(failures.items(), key=lambda item: (item[1].at_unix_s or 0.0, item[0]))


def _say(rank: int, failure: Failure) -> str:
    first_line = failure.text.strip().splitlines()[0] if failure.text.strip() else failure.kind
    return f"rank {rank}, {failure.phase}: {first_line}"


def _phases(reports: Sequence[RankReport]) -> str:
    phases = sorted({report.failure.phase for report in reports if report.failure})
    return f"; a rank had failed in {', '.join(phases)}" if phases else ""
