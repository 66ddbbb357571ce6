"""Diagnosis of a study: repeat its first out-of-memory trial and record the history of its memory.
The repeat is no trial of the study: it is not in the journal, and no answer waits for it.
"""

import shlex
from pathlib import Path

from highwater.errors import HighwaterError
from highwater.nouns.codec import Record
from highwater.nouns.environment import Profiling
from highwater.nouns.request import Request
from highwater.nouns.settings import short_settings
from highwater.nouns.study import RecordedTrial, Study
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.store.logs import recorded_snapshots
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.trials.trial_process import log_path_of
from highwater.units import format_tokens

_STEPS = (0, 1)
"""Steps that are recorded. The second also holds what lives from step to step."""
_ENTRIES = 40_000
"""Allocator events of a step that are kept: about 10 MiB."""


class MemoryDiagnosis(Record, frozen=True, kw_only=True):
    """What a second run of a failed trial showed, with its memory recorded."""

    spec: TrialSpec
    outcome: Outcome | None = None
    """Outcome of the repeat, which may fit at the edge of what fits; None if it did not start."""
    snapshots: tuple[Path, ...] = ()
    """Snapshots of the rank that ran out of memory first; the last step's come last."""
    problem: str | None = None
    """Why the repeat did not start; None if it did."""

    @property
    def note(self) -> str:
        """One line about what the repeat of the trial showed."""
        what = (
            f"{short_settings(self.spec.settings)}, {format_tokens(self.spec.length_tokens)} tokens"
        )
        if self.problem is not None:
            return f"{what} could not be repeated with its memory recorded: {self.problem}"
        again = "" if self.outcome is None else f"; this time it ended as {self.outcome}"
        if not self.snapshots:
            return f"{what}, repeated with its memory recorded, left no snapshot{again}"
        path = shlex.quote(str(self.snapshots[-1]))
        told = "" if self.outcome is not None and self.outcome.is_memory else again
        return f"what was alive, {what}: `highwater profile {path}`{told}"


def undiagnosed(request: Request, study: Study) -> RecordedTrial | None:
    """The first trial of a study that ran out of GPU memory and has no snapshot, or None."""
    is_left_out = request.no_diagnose or request.dry_run or request.nodes > 1
    if is_left_out or request.memory_profiler is not None:
        return None
    if request.on_ray:  # it would have to be repeated on a GPU of the same kind
        return None
    if request.trainer != OURS:  # no other trainer records its memory for us
        return None
    for trial in study.trials:
        result = trial.result
        if result is not None and result.outcome is Outcome.OUT_OF_MEMORY:
            is_real = trial.spec.device == "cuda" and not result.simulated
            log = log_path_of(Path(request.log_dir), trial.spec, "rung")
            return trial if is_real and not recorded_snapshots(log) else None
    return None


def diagnose(request: Request, trial: RecordedTrial) -> MemoryDiagnosis:
    """Repeat a trial once and record the memory of the rank that had run out of memory first."""
    first = None if trial.result is None else trial.result.first_failed
    launcher = EngineLauncher(
        log_directory=Path(request.log_dir),
        timeout_s=request.timeout_s,
        allow_busy=request.allow_busy,
        checkpoint_directory=None
        if request.checkpoint_dir is None
        else Path(request.checkpoint_dir),
        profiling=Profiling(
            profile_steps=_STEPS, max_entries=_ENTRIES, ranks=(0 if first is None else first.rank,)
        ),
    )
    try:
        result = LocalRunner(launcher).run(trial.spec)
    except HighwaterError as error:  # the study's answer is there already, and stands
        return MemoryDiagnosis(spec=trial.spec, problem=error.problem)
    log = log_path_of(Path(request.log_dir), trial.spec, "rung")
    return MemoryDiagnosis(
        spec=trial.spec, outcome=result.outcome, snapshots=recorded_snapshots(log)
    )
