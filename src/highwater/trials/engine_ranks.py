"""The ranks of one start of our engine, for a trial or a training, from then to what they leave."""

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import IO, NamedTuple, Protocol

from highwater.nouns.codec import from_json, to_json
from highwater.nouns.files import read_file
from highwater.nouns.protocols import TOLD_S, OnPhase
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import RankReport, TrialSpec, kept_report
from highwater.trials.job import end_reaper, exit_code_of, phase_in, start
from highwater.trials.ranks import RankExit, RankShare, read_exits
from highwater.trials.reaper import module, under_reaper
from highwater.trials.sampled_peak import kernel_kills
from highwater.trials.trial_process import private_folder
from highwater.units import MIB

REPORTS = "reports"
SPEC_FILE = "spec.json"
_REPORT_BYTES = 16 * MIB
"""Bytes of one rank's report at the most: one of 100,000 steps has 6 MiB."""
_SAVE_S = 600.0
"""Longest time that ranks of a training have, told to stop, to save what they did."""


class RanksEnd(NamedTuple):
    """What ranks left."""

    exit_code: int | None
    """Exit status of the reaper; None when it was ended because time was up."""
    reports: tuple[RankReport, ...]
    damaged_reports: tuple[str, ...]
    """Reports that could not be read, and why, a line each."""
    exits: tuple[RankExit, ...]
    kernel_kills: int
    """Processes that the kernel killed for want of memory meanwhile."""
    lost: str | None = None
    """Why a machine was lost in the midst of it; None where none was."""


class RunRanks(Protocol):
    """Runs the ranks of a trial to their end."""

    def __call__(
        self,
        spec: TrialSpec,
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        timeout_s: float,
        ended: Event,
        on_phase: OnPhase,
    ) -> RanksEnd:
        """Return when none of them runs any more; raises TrialEndedError when ``ended`` is set."""
        ...


def run_ranks_here(
    spec: TrialSpec,
    environment: Mapping[str, str],
    log: IO[bytes],
    *,
    timeout_s: float,
    ended: Event,
    on_phase: OnPhase,
) -> RanksEnd:
    """Run all ranks on this machine, as ``RunRanks`` says."""
    with private_folder() as folder:
        ranks = RanksHere(spec, folder, environment, log)
        exit_code = exit_code_of(
            ranks.process,
            timeout_s=timeout_s,
            ended=ended,
            tell=lambda: on_phase(phase_in(folder / REPORTS)),
        )
        return ranks.end()._replace(exit_code=exit_code)


class RanksHere:
    """The ranks of one start on this machine: all of a trial or a training, or a share of them."""

    def __init__(
        self,
        spec: TrialSpec | TrainingSpec,
        path: Path,
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        share: RankShare | None = None,
    ) -> None:
        """Start them under a reaper of this process. In ``path`` all ranks meet, and report;
        whoever starts the first of them writes there what they read.
        """
        self.path = path
        self._kills_before = kernel_kills()
        if isinstance(spec, TrainingSpec):
            trial, worker, grace_s = spec.trial, "training_worker", _SAVE_S
        else:
            trial, worker, grace_s = spec, "worker", None
        share = share or RankShare(count=trial.layout.gpus, folder=path)
        order, reports = path / SPEC_FILE, path / REPORTS
        remove: list[str] = []
        if share.first == 0:
            order.write_text(to_json(spec), encoding="utf-8")
            reports.mkdir()
            remove += [trial.checkpoint_directory] if trial.checkpoint_directory else []
        command = under_reaper(
            module(f"highwater.engine.training.{worker}", str(order), str(reports)),
            remove=remove,
            inherit=[share.folder],
            ranks=share,
            grace_s=grace_s,
        )
        self.process = start(command, environment, log)
        """The reaper."""

    @property
    def kernel_kills(self) -> int:
        """Processes that the kernel killed for want of memory since the start."""
        return kernel_kills() - self._kills_before

    def is_over(self) -> bool:
        """Whether they have ended by themselves."""
        return self.process.poll() is not None

    def wait(self) -> None:
        """Wait a moment, or until they have ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(TOLD_S)

    def stop(self) -> None:
        """Tell them to stop after their step and to save, those of a trial to end."""
        self.process.terminate()

    def abandon(self) -> None:
        """End them, whatever they do."""
        end_reaper(self.process)

    def end(self) -> RanksEnd:
        """End what still runs of them; what they left."""
        self.abandon()
        reports, damaged = read_reports(self.path / REPORTS)
        code = self.process.returncode
        return RanksEnd(code, reports, damaged, read_exits(self.path), self.kernel_kills)


def read_reports(folder: Path) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
    """The reports of the ranks, and a line for each report that cannot be read."""
    reports: list[RankReport] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = from_json(read_file(path, most_bytes=_REPORT_BYTES), RankReport)
            reports.append(kept_report(report))
        except OSError as error:
            damaged.append(f"the report {path.name} cannot be read: {error.strerror}")
        except ValueError as error:  # msgspec's errors are
            damaged.append(f"the report {path.name} cannot be read: {' '.join(str(error).split())}")
    return tuple(reports), tuple(damaged)
