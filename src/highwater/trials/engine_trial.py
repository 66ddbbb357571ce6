"""EngineLauncher: run a trial of our engine in fresh processes with a clean environment, classify
it, and leave no process behind. StartedRanks: the ranks of one start, of a trial or a training.
"""

import os
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from highwater.errors import HighwaterError, MachineError
from highwater.model.held_bytes import step_flops
from highwater.model.model import load_model
from highwater.nouns.codec import from_json, read_file, to_json
from highwater.nouns.environment import Profiling, SnapshotOrder
from highwater.nouns.hardware import kind_of
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import (
    REFUSED_FILE,
    TOLD_S,
    OnPhase,
    Outcome,
    RankReport,
    StatisticsFiles,
    TrialResult,
    TrialSpec,
    kept_report,
)
from highwater.store.logs import snapshot_folder
from highwater.trials.classify import Ending, classify
from highwater.trials.job import end_reaper, exit_code_of, phase_in, raise_refused, start
from highwater.trials.nodes import Across
from highwater.trials.ranks import RankShare, RanksLeft, read_left
from highwater.trials.reaper import END_AT_ONCE, module, status_of, under_reaper
from highwater.trials.trial_process import (
    OneLaunch,
    TrialLauncher,
    log_tail,
    private_folder,
    statistics_path,
    trial_environment,
)
from highwater.units import MIB

REPORTS = "reports"
SPEC_FILE = "spec.json"
_REPORT_BYTES = 16 * MIB
"""Largest size of one rank's report: a report of 100,000 steps has 6 MiB."""
_SAVE_S = 600.0
"""Longest time that ranks of a training may take to save after they are told to stop."""
_LAUNCHER_S = 20.0
"""Longest time that a launcher may take to end what it started on other machines."""
_LAST_WORDS_S = 2.0
"""Seconds that other machines' ranks have to report a failure of their own after one failed."""


@contextmanager
def started(
    spec: TrialSpec | TrainingSpec,
    environment: Mapping[str, str],
    log: IO[bytes],
    across: Across | None,
) -> Generator["StartedRanks"]:
    """Context manager: the running ranks of a trial or training, on one or more machines."""
    with private_folder() if across is None else across.folder() as folder:
        yield StartedRanks(spec, folder, environment, log, across)


class StartedRanks:
    """The running ranks of one trial or training, on this machine or several."""

    def __init__(
        self,
        spec: TrialSpec | TrainingSpec,
        path: Path,
        environment: Mapping[str, str],
        log: IO[bytes],
        across: Across | None,
    ) -> None:
        """Start the ranks, or their launcher, under a reaper; the ranks report in ``path``."""
        self.path = path
        self._across = across
        self._log, self._log_began_at = log, log.tell()
        self._failed_at: float | None = None
        if isinstance(spec, TrainingSpec):
            trial, kind, grace_s = spec.trial, ("training",), _SAVE_S
        else:
            trial, kind, grace_s = spec, (), None
        order, reports = path / SPEC_FILE, path / REPORTS
        order.write_text(to_json(spec), encoding="utf-8")
        reports.mkdir()
        of_rank = module("highwater.engine.training.worker", str(order), str(reports), *kind)
        remove = [trial.checkpoint_directory] if trial.checkpoint_directory else []
        of_all = partial(under_reaper, remove=remove, inherit=[path], grace_s=grace_s)
        if across is None:
            command = of_all(of_rank, ranks=RankShare(count=trial.layout.gpus, folder=str(path)))
        else:
            launched = across.command(trial, of_rank, path, grace_s=grace_s)
            command = of_all(launched, launcher_s=_LAUNCHER_S)
            environment = across.environment()
        self.process = start(command, environment, log)
        """The reaper's process."""

    def end_the_failed(self) -> None:
        """End the ranks on all machines once a rank has failed: not every launcher does that."""
        exits = (exit_ for left in self._left() for exit_ in left.exits)
        if self._across is None or not (
            any(exit_.status for exit_ in exits) or (self.path / REFUSED_FILE).is_file()
        ):
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now >= self._failed_at + _LAST_WORDS_S:
            self.process.send_signal(END_AT_ONCE)

    def _left(self) -> list[RanksLeft]:
        """The files that ranks left, of each machine; machines with a failed rank come first."""
        if self._across is None:
            return [read_left(self.path)]
        every = [read_left(self.path / str(node)) for node in range(self._across.nodes)]
        return sorted(every, key=lambda left: not any(exit_.status for exit_ in left.exits))

    def wait(self) -> None:
        """Wait until the ranks have ended, at most ``TOLD_S`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(TOLD_S)
        self.end_the_failed()

    def end(self, *, timeout_s: float = 0.0, is_late: bool = False) -> Ending:
        """Kill the processes still running and read their reports; ``is_late``: time ran out."""
        end_reaper(self.process)
        raise_refused(self.path)
        reports, damaged = read_reports(self.path / REPORTS)
        left = self._left()
        exits = tuple(exit_ for each in left for exit_ in each.exits)
        code = self.process.returncode
        if self._failed_at is not None:  # the launcher's status is not the ranks' own
            code = next((status_of(exit_.status) for exit_ in exits if exit_.status), code)
        said_bytes = os.fstat(self._log.fileno()).st_size - self._log_began_at
        return Ending(
            exit_code=None if is_late else code,
            timeout_s=timeout_s,
            reports=reports,
            exits=exits,
            log_tail=log_tail(self._log)[-said_bytes:] if said_bytes else "",
            kernel_kills=sum(each.kernel_kills for each in left),
            damaged_reports=damaged,
        )


def read_reports(folder: Path) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
    """Return the ranks' reports, and one line for each report that cannot be read."""
    reports: list[RankReport] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = from_json(read_file(path, most_bytes=_REPORT_BYTES), RankReport)
            reports.append(kept_report(report))
        except OSError as error:
            damaged.append(f"the report {path.name} cannot be read: {error.strerror}")
        except ValueError as error:  # msgspec's errors are ValueErrors
            damaged.append(f"the report {path.name} cannot be read: {' '.join(str(error).split())}")
    return tuple(reports), tuple(damaged)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLauncher(TrialLauncher):
    """Launches trials of this package's engine."""

    checkpoint_directory: Path | None = None
    """Folder in which each trial that saves gets a temporary one of its own; None: the log's."""
    profiling: Profiling | None = None
    """Memory records that each rank makes, in a folder beside the log; None: none."""
    logit_range: bool = False
    """True if the statistics include the range of the logits: one more pass over them."""
    across: Across | None = None
    """How ranks are started on several machines; None: on this machine alone."""

    def _run(self, one: OneLaunch) -> TrialResult:
        log_path, began_unix, limit_s = Path(one.log.name), time.time(), one.timeout_s
        with _with_own_directory(one.spec, self.checkpoint_directory or log_path.parent) as spec:
            spec = self._with_statistics(self._recorded(spec, log_path), log_path)
            environment = trial_environment(spec, one.gpus)
            with started(spec, environment, one.log, self.across) as ranks:
                tell = partial(_tell, ranks, one.on_phase)
                code = exit_code_of(ranks.process, timeout_s=limit_s, ended=one.ended, tell=tell)
                ending = ranks.end(timeout_s=limit_s, is_late=code is None)
        raise_refusal(reports := ending.reports)
        outcome, reason = classify(spec, ending)
        began_s = [r.first_step_at_unix_s for r in reports if r.first_step_at_unix_s is not None]
        if spec.is_memory_only:  # its losses and times would pass for a training's
            untrained = dict.fromkeys(("losses", "gradient_norms", "step_times_s"), ())
            reports = tuple(each.replace(**untrained) for each in reports)
        result = TrialResult(
            outcome=outcome,
            reason=reason,
            ranks=reports,
            launch_to_first_step_s=max(began_s) - began_unix if began_s else None,
            exit_code=ending.exit_code,
        )
        return _with_speed(spec, result)

    def _recorded(self, spec: TrialSpec, log_path: Path) -> TrialSpec:
        """The trial, with a folder for its memory snapshots if any are recorded."""
        if self.profiling is None:
            return spec
        directory = snapshot_folder(log_path)
        directory.mkdir(parents=True, exist_ok=True)
        order = SnapshotOrder(directory=str(directory.resolve()), profiling=self.profiling)
        return spec.replace(memory_snapshots=order)

    def _with_statistics(self, spec: TrialSpec, log_path: Path) -> TrialSpec:
        """The trial with files for statistics beside its log; unchanged if it is memory-only."""
        if spec.is_memory_only:
            return spec
        files = StatisticsFiles(
            path=str(statistics_path(log_path.absolute())), logit_range=self.logit_range
        )
        return spec.replace(statistics=files)


def _tell(ranks: StartedRanks, on_phase: OnPhase) -> None:
    on_phase(phase_in(ranks.path / REPORTS))
    ranks.end_the_failed()


@contextmanager
def _with_own_directory(spec: TrialSpec, parent: Path) -> Generator[TrialSpec]:
    """Context manager: the trial, with a new checkpoint directory below ``parent`` if it saves; the
    directory is removed at the end. The reaper removes it if this process dies first. ``parent``
    may be a user's: it is made if missing and never removed.
    """
    if spec.settings.checkpoint == "none" and spec.settings.save_hf == "never":
        yield spec
        return
    parent.mkdir(parents=True, exist_ok=True)
    with private_folder(parent, kind="checkpoint-") as own:
        yield spec.replace(checkpoint_directory=str(own))


def raise_refusal(reports: tuple[RankReport, ...]) -> None:
    """Raise the first refusal that a worker reported: it is for the user, and no outcome."""
    for report in reports:
        failure = report.failure
        if failure is not None and failure.kind == "refused":
            kind, _, problem = failure.text.partition(": ")
            told = MachineError if kind == MachineError.__name__ else HighwaterError
            raise told(problem, hint=failure.hint or "see the log")


def _with_speed(spec: TrialSpec, result: TrialResult) -> TrialResult:
    """Add tokens per second and MFU to the result of a trial that fit."""
    if result.outcome is not Outcome.FIT or result.step_time_s is None:
        return result
    sequences = spec.sequences * spec.micro_batches * spec.layout.data_parallel_degree
    tokens_per_s = sequences * spec.length_tokens / result.step_time_s
    kind = kind_of(result.ranks[0].device_name or "")
    mfu = None
    if kind is not None and kind.bf16_dense_tflops is not None:
        shape = load_model(spec.model_directory).shape
        flops = step_flops(
            shape, length_tokens=spec.length_tokens, sequences=sequences, settings=spec.settings
        )
        mfu = flops / result.step_time_s / (kind.bf16_dense_tflops * 1e12 * spec.layout.gpus)
    return result.replace(tokens_per_s=tokens_per_s, mfu=mfu)
