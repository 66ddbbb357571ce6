"""A job: a process of the data plane, or several ranks, under a reaper that this process holds.

An order goes in and a report comes back as JSON (``nouns/trial.py``), both in the job's own folder.
The process is new, and all its children are ended with it. Its output goes to a log: without a
report, the log's last lines, or the signal that ended it, tell the reason. Trials, trainings and
benchmarks are started, awaited and ended here too; each defines its own reports and judges them.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, Generic, TypeVar

from highwater.errors import MachineError
from highwater.nouns.codec import Record, from_json, read_file, to_json
from highwater.nouns.trial import (
    PHASE_FILE,
    REFUSED_FILE,
    TOLD_S,
    OnPhase,
    Refused,
    TrialEndedError,
    unheard,
)
from highwater.trials.probe import INSTALL_HINT
from highwater.trials.ranks import RankShare, started
from highwater.trials.reaper import END_AT_ONCE, module, under_reaper

_END_S = 30.0
_LAST_LINES = 3
_PHASE_BYTES = 1024
SIGNALLED = 128
"""Exit statuses above this are signals, as shells and the reaper report them."""
Report = TypeVar("Report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[Report]):
    """A module to run in a process of its own, the type of its report, and its error's words."""

    module: str
    report: type[Report]
    order: Record | None = None
    """None: the module takes no order, only the path of its report."""
    words: tuple[str, ...] = ()
    """Command-line words for the module, after the paths of order and report."""
    ranks: int | None = None
    """Number of ranks that run the module as one group; None: one process that is no rank."""
    environment: Mapping[str, str]
    timeout_s: float
    grace_s: float | None = None
    """Seconds that the job has to end what it started elsewhere; None: it is ended at once."""
    first_phase: str = "starting"
    """Phase shown until the job names one."""
    failure: str
    """Beginning of the error message, which the job's last words follow."""
    late: str | None = None
    """Subject of the message "took more than" ``timeout_s`` seconds; None: ``failure`` is used."""
    hint: str | None = None
    """Hint after a failure; None: it depends on how the process ended."""

    def run(
        self, folder: Path, *, ended: Event | None = None, on_phase: OnPhase = unheard
    ) -> Report:
        """Run the job in ``folder`` and return its report, with all its processes ended. Raises its
        own refusal, MachineError if there is no report, and TrialEndedError after ``ended`` is set.
        """
        order, report, log = folder / "order.json", folder / "report.json", folder / "log"
        words = [str(report), *self.words]
        if self.order is not None:
            order.write_text(to_json(self.order), encoding="utf-8")
            words.insert(0, str(order))
        share = None if self.ranks is None else RankShare(count=self.ranks, folder=str(folder))
        command = under_reaper(
            module(self.module, *words), inherit=[folder], ranks=share, grace_s=self.grace_s
        )
        with log.open("wb") as said:
            status = exit_code_of(
                start(command, self.environment, said),
                timeout_s=self.timeout_s,
                ended=ended or Event(),
                tell=lambda: on_phase(phase_in(folder, self.first_phase)),
                grace_s=self.grace_s,
            )
        raise_refused(folder)
        if report.is_file():
            return from_json(report.read_bytes(), self.report)
        if status is None and self.late is not None:
            problem = f"{self.late} took more than {self.timeout_s:.0f} s"
            raise MachineError(problem, hint=self.hint or INSTALL_HINT)
        raise failed(self.failure, log, status, hint=self.hint)


def raise_refused(folder: Path) -> None:
    """Raise the error that a job wrote to its folder, if any."""
    if (path := folder / REFUSED_FILE).is_file():
        raise from_json(path.read_bytes(), Refused).error()


def start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], *, is_read: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command made by ``under_reaper``; it writes to the log, or to a pipe to be read."""
    return started(
        command,
        environment=environment,
        stdout=subprocess.PIPE if is_read else log,
        stderr=log,
        is_apart=True,  # Ctrl-C reaches this process alone, which then ends the others in order
    )


def phase_in(folder: Path, otherwise: str = "starting") -> str:
    """The phase that a job last reported in its folder; ``otherwise`` if it has reported none."""
    try:
        said = read_file(folder / PHASE_FILE, most_bytes=_PHASE_BYTES)
    except OSError:
        return otherwise
    return said.decode(errors="replace")


def exit_code_of(
    process: subprocess.Popen[bytes],
    *,
    timeout_s: float,
    ended: Event,
    tell: Callable[[], None],
    grace_s: float | None = None,
) -> int | None:
    """Wait until the processes under a reaper end, calling ``tell`` twice a second, and return the
    exit status; None if time was up. All have ended when this returns or raises. Raises
    TrialEndedError after ``ended`` is set.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(TOLD_S, left_s))
            if ended.is_set():
                if grace_s is not None:
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(grace_s)
                raise TrialEndedError
            tell()
        return None
    finally:
        end_reaper(process)


def end_reaper(process: subprocess.Popen[bytes]) -> None:
    """Kill a reaper and its processes; a second Ctrl-C waits until all have ended."""
    process.send_signal(END_AT_ONCE)
    deadline = time.monotonic() + _END_S
    interrupt: KeyboardInterrupt | None = None
    while process.poll() is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def failed(what: str, log: Path, status: int | None, *, hint: str | None = None) -> MachineError:
    """Make the error for a process that left no report; ``what``: the failed task, a sentence."""
    if hint is None:
        is_exit = status is not None and status <= SIGNALLED
        hint = INSTALL_HINT if is_exit else "see whether memory is left, `free -h`, and try again"
    return MachineError(f"{what}: {last_words(log, status)}", hint=hint)


def last_words(log: Path, status: int | None) -> str:
    """How a process ended, and its last three log lines; ``status`` None: time was up."""
    how = "time was up" if status is None else how_ended(status)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{how}: {' / '.join(lines[-_LAST_LINES:])}" if lines else f"{how}, without a word"


def how_ended(status: int) -> str:
    """``exited with 3``, or ``ended by signal 9 (SIGKILL)``. Takes -n and 128 + n for signal n."""
    number = -status if status < 0 else status - SIGNALLED
    try:
        return f"ended by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"ended by signal {number}" if status < 0 else f"exited with {status}"
