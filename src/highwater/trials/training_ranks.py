"""The ranks of a training: start them, follow their progress, tell them to stop, and report."""

import fcntl
import os
import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import from_json, read_file, refuse_irregular
from highwater.nouns.training import TrainingProgress, TrainingSpec
from highwater.nouns.trial import PHASE_FILE, Outcome, RankReport
from highwater.store.directory import TrainingFolder
from highwater.trials.classify import Ending, failure_of
from highwater.trials.engine_trial import REPORTS, StartedRanks, raise_refusal, started
from highwater.trials.job import end_reaper
from highwater.trials.nodes import Across
from highwater.trials.trial_process import trial_environment, trial_place
from highwater.units import format_bytes, format_tokens

LOG = "training.log"
_LOCK = ".lock"
_PHASE_BYTES = 4096
OnProgress = Callable[[TrainingProgress], None]


@contextmanager
def own_folder(directory: Path) -> Generator[None]:
    """Make and lock the run's folder for the block; UsageError if it is in use or no folder."""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (directory, *directory.parents) if path.exists())
        raise UsageError(
            f"{file} is no folder", hint=f"use `--output {shlex.quote(f'{file}-run')}`"
        ) from error
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"a training writes into {directory} now",
                hint=f"wait for it, or use `--output {shlex.quote(f'{directory}-2')}`",
            ) from error
        try:
            yield
        finally:  # this process has the lock, unless another was refused it
            if is_new and [path.name for path in directory.glob("*")] == [_LOCK]:
                (directory / _LOCK).unlink()
                directory.rmdir()
    finally:
        os.close(lock)


def run_ranks(
    spec: TrainingSpec, *, allow_busy: bool, on_progress: OnProgress, across: Across | None = None
) -> tuple[RankReport, ...]:
    """Train until all ranks have succeeded, here or ``across`` machines, and return their reports.

    Ctrl-C and SIGTERM make the ranks stop and save after their step; then KeyboardInterrupt is
    raised. A second Ctrl-C kills them at once. Raises HighwaterError if the ranks fail.
    """
    directory = Path(spec.output_directory)
    place = trial_place(
        spec.trial, None, allow_busy=allow_busy, log_directory=directory, flag="--output"
    )
    with place, (directory / LOG).open("a+b") as log:
        refuse_irregular(log.fileno(), directory / LOG)
        with started(spec, trial_environment(spec.trial), log, across) as ranks:
            ending, interrupt = _end_of(ranks, on_progress)
    _raise_failure(spec, ending, interrupt)
    if interrupt is not None:
        raise interrupt
    return ending.reports


def _progress(ranks: StartedRanks) -> TrainingProgress:
    try:
        said = read_file(ranks.path / REPORTS / PHASE_FILE, most_bytes=_PHASE_BYTES)
        return from_json(said, TrainingProgress)
    except (OSError, ValueError):
        return TrainingProgress(phase="starting")


def _end_of(
    ranks: StartedRanks, on_progress: OnProgress
) -> tuple[Ending, KeyboardInterrupt | None]:
    """Wait for the ranks; returns how they ended, and the interrupt that stopped them, if any."""
    interrupt: KeyboardInterrupt | None = None
    try:
        while ranks.process.poll() is None:
            try:
                ranks.wait()
                said = _progress(ranks)
                if interrupt is not None and ranks.process.poll() is None:
                    said = TrainingProgress(phase="stopping", step=said.step, steps=said.steps)
                on_progress(said)
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt = error
                ranks.process.terminate()  # they stop after their step, and save
    except BaseException:
        end_reaper(ranks.process)
        raise
    on_progress(_progress(ranks))
    return ranks.end(), interrupt


def _raise_failure(spec: TrainingSpec, ending: Ending, interrupt: KeyboardInterrupt | None) -> None:
    """Raise an error if ranks failed, or the interrupt if they were killed while stopping."""
    raise_refusal(ending.reports)
    failed = failure_of(spec.trial, ending)
    if failed is None:
        return
    if interrupt is not None:
        raise interrupt
    goes_on = _goes_on(spec)
    if failed.outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY):
        what = "memory" if failed.outcome is Outcome.OUT_OF_MEMORY else "host memory"
        raise MachineError(
            f"the training ran out of {what}: {failed.reason}",
            hint=f"{_less_memory(spec)}; {goes_on}",
        )
    log = shlex.quote(str(Path(spec.output_directory, LOG)))
    # A fault in the user's data or function was a refusal: this failure is the machine's.
    raise MachineError(
        f"the training ended: {failed.reason}", hint=f"`tail {log}` shows the rest; {goes_on}"
    )


def _less_memory(spec: TrainingSpec) -> str:
    if spec.trial.device == "cpu":
        budget = format_bytes(spec.trial.memory_budget_bytes or 0)
        return f"name a larger `--memory` than {budget}"
    length = format_tokens(spec.trial.length_tokens)
    model = shlex.quote(spec.trial.model_name)
    return f"`highwater recommend {model} --length {length}` says what takes less"


def _goes_on(spec: TrainingSpec) -> str:
    """Sentence on what the same command does after a failure."""
    steps = TrainingFolder(Path(spec.output_directory)).checkpoint_steps()
    if not steps:
        return "the same command begins anew: there is no checkpoint yet"
    without = "" if spec.resume_from is None else " without `--resume-from`"
    return f"the same command{without} goes on after step {steps[-1]}"
