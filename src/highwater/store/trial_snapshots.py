"""Snapshots of a trial's memory: where they lie, and which ranks left none."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from highwater.nouns.profiling import SNAPSHOTS, Profiling, coordinates, snapshot_name
from highwater.nouns.settings_words import short_settings
from highwater.nouns.study import Study
from highwater.nouns.trial import TrialResult, TrialSpec
from highwater.units import format_tokens


def snapshot_folder(log_path: Path) -> Path:
    """The folder of one launch, beside its log: ``model_len-8192/memory_snapshots``."""
    return log_path.with_suffix("") / SNAPSHOTS


def recorded_snapshots(log_path: Path) -> tuple[Path, ...]:
    """Snapshots of every launch of a trial, by the log of one: those of the last step come last."""
    stem = log_path.stem.partition(".attempt-")[0]
    found = [
        path
        for launch in (stem, f"{stem}.attempt-*")
        for path in log_path.parent.glob(f"{launch}/memory_snapshots/*/snapshot_rank*.pickle")
    ]
    return tuple(sorted(found, key=lambda path: (path.stat().st_mtime, path)))


def ranks_snapshots(folder: Path) -> tuple[Path, ...]:
    """Snapshots of the ranks of one step: of the folder itself, else of the last step below a
    folder ``memory_snapshots``, or below that of a trial; else whatever is called ``.pickle``.
    """
    for pattern in ("", "*/", "memory_snapshots/*/"):
        found = sorted(folder.glob(f"{pattern}snapshot_rank*.pickle"))
        if found:
            last = max((path.parent for path in found), key=_step)
            return tuple(path for path in found if path.parent == last)
    return tuple(sorted(folder.glob("*.pickle")))


def _step(part: Path) -> tuple[int, str]:
    """The order of ``setup``, ``step_0`` and ``step_10``."""
    number = part.name.removeprefix("step_")
    return (int(number) if number.isdecimal() else -1), part.name


def snapshot_lines(spec: TrialSpec, result: TrialResult, profiling: Profiling) -> Iterator[str]:
    """For each part of the trial that was recorded, how many ranks wrote a snapshot, and by name
    those that did not; and by name the ranks that were ended, by a signal or because another had
    failed, before they could write one of where they were.
    """
    if result.log_path is None:
        return
    folder = snapshot_folder(Path(result.log_path))
    ranks = [rank for rank in range(spec.layout.gpus) if profiling.records(rank)]
    parts = sorted(part for part in folder.glob("*") if part.is_dir())
    if not parts:
        yield f"memory snapshots: none below {folder}, no rank came so far"
    for part in parts:
        silent = [
            rank
            for rank in ranks
            if not (part / snapshot_name(rank, coordinates(spec.layout, rank))).is_file()
        ]
        yield f"memory snapshots: {len(ranks) - len(silent)} of {len(ranks)} ranks in {part}" + (
            f"; none of rank {', '.join(map(str, silent))}" if silent else ""
        )
    ended = _ended(spec, result, profiling)
    if ended is not None:
        yield f"memory snapshots: {ended}"


def study_snapshot_lines(study: Study, profiling: Profiling) -> Iterator[str]:
    """Where the snapshots of a study's trials are; and of each trial that was recorded the ranks
    that were ended before they could write one.
    """
    yield "memory snapshots of each trial are in a folder beside its log"
    for trial in study.trials:
        result = trial.result
        # made before a launch that records: without it the trial is of an earlier search
        if result is None or not result.log_path or not _is_recorded(Path(result.log_path)):
            continue
        ended = _ended(trial.spec, result, profiling)
        if ended is not None:
            spec = trial.spec
            what = f"{short_settings(spec.settings)}, {format_tokens(spec.length_tokens)} tokens"
            yield f"memory snapshots, {what}: {ended}"


def _is_recorded(log_path: Path) -> bool:
    return snapshot_folder(log_path).is_dir()


def _ended(spec: TrialSpec, result: TrialResult, profiling: Profiling) -> str | None:
    """The ranks that were ended, by a signal or because another had failed; None for none."""
    recorded = {rank for rank in range(spec.layout.gpus) if profiling.records(rank)}
    ended = sorted(recorded - {rank.rank for rank in result.ranks})
    if not ended:
        return None
    return f"{_named(ended)} ended, before a snapshot of where that was could be written"


def _named(ranks: Sequence[int]) -> str:
    several = len(ranks) > 1
    return f"rank{'s' * several} {', '.join(map(str, ranks))} {'were' if several else 'was'}"
