"""The ranks of one start of our engine, for a trial or a training, from then to what they leave."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import IO, NamedTuple, Protocol

from highwater.nouns.codec import from_json, to_json
from highwater.nouns.files import read_file
from highwater.nouns.protocols import OnPhase
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import RankReport, TrialSpec, kept_report
from highwater.trials.job import exit_code_of, phase_in, start
from highwater.trials.ranks import RankExit, RankShare, read_exits
from highwater.trials.reaper import module, under_reaper
from highwater.trials.sampled_peak import kernel_kills
from highwater.trials.trial_process import private_folder
from highwater.units import MIB

REPORTS = "reports"
SPEC_FILE = "spec.json"
_REPORT_BYTES = 16 * MIB
"""Bytes of one rank's report at the most: one of 100,000 steps has 6 MiB."""


class RankWork(NamedTuple):
    """What ranks do."""

    module: str
    """The module that each of them runs."""
    grace_s: float | None = None
    """Longest time in seconds that they have, told to stop, to save what they did; None: none."""


TRIAL = RankWork("highwater.engine.training.worker")
TRAINING = RankWork("highwater.engine.training.training_worker", grace_s=600.0)


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
    kills_before = kernel_kills()
    with private_folder() as folder:
        prepare_folder(spec, folder)
        share = RankShare(count=spec.layout.gpus, folder=folder)
        process = start_ranks(spec, folder, share, environment, log)
        exit_code = exit_code_of(
            process,
            timeout_s=timeout_s,
            ended=ended,
            tell=lambda: on_phase(phase_in(folder / REPORTS)),
        )
        reports, damaged = read_reports(folder / REPORTS)
        kills = kernel_kills() - kills_before
        return RanksEnd(exit_code, reports, damaged, read_exits(folder), kills)


def prepare_folder(spec: TrialSpec | TrainingSpec, folder: Path) -> None:
    """Write what the ranks read into the folder in which they meet, and report."""
    (folder / SPEC_FILE).write_text(to_json(spec), encoding="utf-8")
    (folder / REPORTS).mkdir()


def start_ranks(
    spec: TrialSpec,
    folder: Path,
    share: RankShare,
    environment: Mapping[str, str],
    log: IO[bytes],
    *,
    work: RankWork = TRIAL,
) -> subprocess.Popen[bytes]:
    """Start a share of the ranks under a reaper of this process."""
    worker = module(work.module, str(folder / SPEC_FILE), str(folder / REPORTS))
    owned = spec.checkpoint_directory if share.first == 0 else None
    remove = [] if owned is None else [owned]
    command = under_reaper(
        worker, remove=remove, inherit=[share.folder], ranks=share, grace_s=work.grace_s
    )
    return start(command, environment, log)


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
