"""Worker: one rank's process in a trial or a training run, from its memory limit to its report.
Started with the paths of the spec and of the reports.

This is a process edge: any error that stops a trial is recorded whole in the report, and the exit
status tells of it. torch is imported only after the limits are set, so that they bound it too.
"""

import mmap
import os
import resource
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from highwater.errors import HighwaterError
from highwater.nouns.codec import write_whole
from highwater.nouns.oom import exhausted_memory
from highwater.nouns.secrets import LOGGED, kept
from highwater.nouns.trial import Failure, FailureKind, RankReport, TrialSpec, tell_phase
from highwater.units import MIB

if TYPE_CHECKING:
    from highwater.engine.training.rank_run import RankRun

EXIT_FAILED = 1
_SPENT_BYTES = 64 * MIB
"""Bytes of a test allocation: a process that still gets it did not fail for lack of memory."""


def main() -> None:
    """Run one rank: ``python -m highwater.engine.training.worker SPEC REPORTS [training]``."""
    text, reports = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
    training = None
    if sys.argv[3:]:
        from highwater.nouns.training import TrainingSpec

        training = msgspec.json.decode(text, type=TrainingSpec)
    spec = msgspec.json.decode(text, type=TrialSpec) if training is None else training.trial
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if spec.device == "cpu":
        assert spec.memory_budget_bytes is not None
        resource.setrlimit(resource.RLIMIT_DATA, (spec.memory_budget_bytes, before[1]))
    run = None
    try:
        # torch is imported here, so that the limit bounds that too
        if training is None:
            from highwater.engine.training.rank_run import Trial

            run = Trial(spec, on_phase=partial(_tell, reports))
        else:
            from highwater.engine.training.training_run import TrainingRun

            run = TrainingRun(training, on_phase=partial(_tell, reports))
        run.run()
        _write(reports, run.snapshot())
    except BaseException as error:  # noqa: BLE001 -- the process edge: the whole error is recorded
        try:
            kind: FailureKind = "refused"
            if not isinstance(error, HighwaterError):
                spent = exhausted_memory(error, device=spec.device, is_spent=_is_spent)
                kind = spent or "error"
            # under the limit there may be too little memory left for a report
            resource.setrlimit(resource.RLIMIT_DATA, before)
            try:  # the report first: the log's disk may be full
                _write(reports, _failed(run, error, kind))
            finally:
                sys.stderr.write(kept(_printable(traceback.format_exc()), most=LOGGED) + "\n")
                sys.stdout.flush()
                sys.stderr.flush()
            if run is not None and run.profiler is not None:
                run.profiler.write_failed()
                sys.stderr.flush()
        finally:
            # No clean-up: the peers may hang in a collective, and the reaper ends them once this
            # process is gone.
            os._exit(EXIT_FAILED)
    from highwater.engine.parallel.mesh import leave

    leave()


def _tell(reports: Path, phase: str) -> None:
    """Write the first rank's phase for the launcher; nothing depends on it."""
    if os.environ["RANK"] == "0":
        tell_phase(reports, phase)


def _is_spent() -> bool:
    """True if this process can get no more host memory."""
    try:
        mmap.mmap(-1, _SPENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


def _failed(run: "RankRun | None", error: BaseException, kind: FailureKind) -> RankReport:
    """Return the report of a rank that did not finish."""
    hint = error.hint if isinstance(error, HighwaterError) else None
    phase, layer = (run.where.phase, run.where.layer) if run else ("setup", None)
    alive = None
    if run is not None and run.out_of_memory is not None and kind == "device_memory":
        try:
            alive, phase, layer = run.out_of_memory.alive(error)
        except Exception:  # noqa: BLE001 -- the process edge: the failure itself is told all the same
            traceback.print_exc()
    failure = Failure(
        kind=kind,
        phase=phase,
        text=_text(error),
        at_unix_s=time.time(),
        hint=hint,
        layer=layer,
        alive=alive,
    )
    return _last_report(run).replace(failure=failure)


def _text(error: BaseException) -> str:
    """Return the exception's text, type first; undecodable bytes of file names are escaped."""
    try:
        said = error.problem if isinstance(error, HighwaterError) else str(error)
    except Exception as broken:  # noqa: BLE001 -- somebody's own exception, whose text is broken
        said = f"its text cannot be had: {type(broken).__name__}"
    if not said and isinstance(error, MemoryError):
        said = "no memory is left for this process"
    return kept(_printable(f"{type(error).__name__}: {said}".removesuffix(": ")))


def _printable(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _last_report(run: "RankRun | None") -> RankReport:
    """Return a failed rank's last report; without memory peaks if the device no longer answers."""
    if run is None:
        return RankReport(rank=int(os.environ["RANK"]))
    try:
        return run.snapshot()
    except RuntimeError:  # a CUDA error that sticks: every further call raises it again
        return run.report


def _write(reports: Path, report: RankReport) -> None:
    write_whole(reports / f"rank-{report.rank:03d}.json", msgspec.json.encode(report))


if __name__ == "__main__":
    main()
