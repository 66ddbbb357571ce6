"""The worker: one rank's process, from its memory limit to its report. Started by torchrun with the paths of spec and reports.

The process edge: whatever stops a trial is recorded whole in the report, and the exit status says that it did.
torch is imported only after the limits are set, so that they bound all of it.
"""

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from highwater.errors import HighwaterError
from highwater.spec.oom import exhausted_memory
from highwater.spec.trial import Failure, FailureKind, RankReport, TrialSpec

if TYPE_CHECKING:
    from highwater.engine.trial import Trial

EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one rank: ``python -m highwater.engine.worker SPEC REPORTS``."""
    spec_path, reports = Path(sys.argv[1]), Path(sys.argv[2])
    _die_with_parent()
    spec = msgspec.json.decode(spec_path.read_bytes(), type=TrialSpec)
    if spec.device == "cpu":
        assert spec.memory_budget_bytes is not None
        resource.setrlimit(resource.RLIMIT_DATA, (spec.memory_budget_bytes, spec.memory_budget_bytes))
    trial = None
    try:
        from highwater.engine.trial import Trial as LoadedTrial

        trial = LoadedTrial(spec)
        trial.run()
        _write(reports, trial.snapshot())
    except BaseException as error:  # noqa: BLE001 -- the process edge: the whole error is recorded
        try:
            _write(reports, _failed(trial, error, spec))  # before the log, whose disk may be the one that is full
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # No clean-up: the peers may hang in a collective, and torchrun ends them once this process is gone.
            os._exit(EXIT_FAILED)
    from highwater.parallel.mesh import leave

    leave()


def _failed(trial: "Trial | None", error: BaseException, spec: TrialSpec) -> RankReport:
    """The report of a rank that did not finish."""
    text = f"{type(error).__name__}: {error}"
    kind: FailureKind = exhausted_memory(text, device=spec.device) or "error"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, by name: torch itself may be what did not fit
        kind = "device_memory"
    hint = None
    if isinstance(error, HighwaterError):
        kind, hint = "refused", error.hint
    failure = Failure(kind=kind, phase=trial.phase if trial else "setup", text=text, at_unix_s=time.time(), hint=hint)
    return msgspec.structs.replace(_last_report(trial), failure=failure)


def _last_report(trial: "Trial | None") -> RankReport:
    """What is known of a rank that failed; without its peaks where the device answers nothing any more."""
    if trial is None:
        return RankReport(rank=int(os.environ["RANK"]))
    try:
        return trial.snapshot()
    except RuntimeError:  # a CUDA error that sticks: every further call raises it again
        return trial.report


def _write(reports: Path, report: RankReport) -> None:
    """Write the report whole or not at all."""
    target = reports / f"rank-{report.rank:03d}.json"
    partial = target.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(report))
    partial.replace(target)


def _die_with_parent() -> None:
    """Be killed when torchrun is: torchrun starts each worker in a process session of its own, out of reach of its group."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
