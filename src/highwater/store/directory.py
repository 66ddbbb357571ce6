"""Directories and files to write: the paths of studies, and checks for room on the disk.

Training folder: a run's folder as the process that starts the run uses it: its specification, and
the steps done. The ranks write the rest.
"""

import os
import shlex
import shutil
import tempfile
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from highwater.errors import MachineError, StudyError, UsageError
from highwater.model.held_bytes import CheckpointBytes
from highwater.nouns.codec import CONFIG_BYTES, from_json, read_file, to_json, write_whole
from highwater.nouns.hardware import CPU_SEARCH
from highwater.nouns.study import Question
from highwater.nouns.training import (
    CHECKPOINTS,
    STATE_FILE,
    RunState,
    TrainingSpec,
    checkpoint_name,
    checkpoint_step,
    differences,
)
from highwater.store.journal_file import NO_SPACE
from highwater.units import MIB, format_bytes

FREE_BYTES = 64 * MIB
"""Free space that a search needs at the start: a log is tens of KiB, a study a few MiB."""
_PROBE_BYTES = 4096


def check_log_directory(directory: Path) -> None:
    """Write a test file in the directory: UsageError if that fails, MachineError if it is full."""
    try:
        _write_in(directory)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _full(directory, f"no space left: {error.strerror}") from error
        raise UsageError(
            f"the log directory {directory} cannot be written: {error.strerror}",
            hint=f"use `--log-dir {_another()}`",
        ) from error
    free = shutil.disk_usage(directory).free
    if free < FREE_BYTES:
        needs = f"a search needs {format_bytes(FREE_BYTES)}"
        raise _full(directory, f"{format_bytes(free)} are free, {needs}")


def check_checkpoint_directory(directory: Path, needed: CheckpointBytes) -> None:
    """Raise UsageError if a directory cannot be made or written, MachineError if it lacks room."""
    try:
        _write_in(directory)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise UsageError(
                f"the checkpoint directory {directory} cannot be written: {error.strerror}",
                hint=f"use `--checkpoint-dir {_another('checkpoints')}`",
            ) from error
    free = shutil.disk_usage(directory).free
    if free < _with_spare(needed):
        said = _said(needed, "of shards", "of Hugging Face weights")
        less = {
            "--save-hf never": needed._replace(hf_bytes=0),
            "--checkpoint none": needed._replace(sharded_bytes=0),
            "--checkpoint none --save-hf never": CheckpointBytes(sharded_bytes=0, hf_bytes=0),
        }
        enough = [f for f, rest in less.items() if rest != needed and free >= _with_spare(rest)]
        # Both flags together are offered only if neither is enough.
        fewest = [flags for flags in enough if len(enough) == 1 or " none --" not in flags]
        ways = _roomy(needed, "--checkpoint-dir", "highwater-checkpoints")
        ways += [f"use `{flags}`" for flags in fewest]
        raise _too_little(directory, f"a trial saves {said} below {directory}", needed, free, ways)


def check_run_directory(directory: Path, needed: CheckpointBytes, *, checkpoints: int) -> None:
    """Raise MachineError if a run's folder lacks room for its checkpoints and the model."""
    needed = needed._replace(sharded_bytes=needed.sharded_bytes * checkpoints)
    disk = shutil.disk_usage(directory)
    if disk.free >= _with_spare(needed) or not disk.total:  # some network disks say nothing
        return
    several = f"for {checkpoints} checkpoint{'s' if checkpoints > 1 else ''}"
    needs = f"a run needs {_said(needed, several, 'for the model')} in {directory}"
    ways = _roomy(needed, "--output", directory.name)
    raise _too_little(directory, needs, needed, disk.free, ways)


def _said(needed: CheckpointBytes, of_shards: str, of_weights: str) -> str:
    parts = (needed.sharded_bytes, of_shards), (needed.hf_bytes, of_weights)
    return " and ".join(f"{format_bytes(count)} {what}" for count, what in parts if count)


def _too_little(
    directory: Path, needs: str, needed: CheckpointBytes, free: int, ways: list[str]
) -> MachineError:
    room = f"{format_bytes(_with_spare(needed))} with what has to stay free"
    return MachineError(
        f"{needs}: {room}, {format_bytes(free)} are free",
        hint=", or ".join([_make_room(directory), *ways]),
    )


def check_new_file(path: Path, *, flag: str, name: str) -> None:
    """Raise UsageError for a file that exists or cannot be written; the hint has a free name."""
    try:
        path.touch(exist_ok=False)
        path.unlink()
    except OSError as error:
        new = f"`{flag} {shlex.quote(free_name(name))}`"
        is_there = isinstance(error, FileExistsError)
        why = "is there already" if is_there else f"cannot be written: {error.strerror}"
        hint = f"name a new file: {new}"
        if isinstance(error, FileNotFoundError) and str(path):
            why = f"cannot be written: there is no folder {path.parent}"
            make = f"`mkdir -p {shlex.quote(str(path.parent))}`"
            hint = f"make it: {make}; or name a file here: {new}"
        raise UsageError(f"{path} {why}", hint=hint) from error


def write_new_file(path: Path, content: bytes, *, flag: str) -> None:
    """Write a file that does not exist yet; if that fails, raise MachineError and leave no file."""
    try:
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        hint = f"make room there, or leave `{flag}` out"
        raise MachineError(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def free_name(name: str) -> str:
    """Return the first of ``guide.md``, ``guide-2.md``, ... not yet in the working directory."""
    stem, suffix = Path(name).stem, Path(name).suffix
    names = (name, *(f"{stem}-{number}{suffix}" for number in range(2, 1000)))
    return next(name for name in names if not Path(name).exists())


def study_path(log_directory: Path, question: Question) -> Path:
    """Return the default path of a question's study: one file for each question."""
    return log_directory / question.model.name / f"study-{question.key[:6]}.jsonl"


def newest_studies(log_directory: Path) -> list[Path]:
    """Return the studies under the log directory, newest first; StudyError if there are none."""
    try:
        found = log_directory.glob("*/study-*.jsonl")
        studies = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError as error:
        hint = "name another with `--log-dir ./logs`, or a study's file"
        raise StudyError(
            f"the log directory {log_directory} cannot be read: {error.strerror}", hint=hint
        ) from error
    if not studies:
        raise StudyError(
            f"there is no study under {log_directory}", hint=f"`{CPU_SEARCH}` makes one"
        )
    return studies


def _write_in(directory: Path) -> None:
    """Write and sync a test file in the directory, made if need be; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".highwater-", dir=directory) as probe:
        probe.write(b"\0" * _PROBE_BYTES)
        probe.flush()
        os.fsync(probe.fileno())


def _roomy(needed: CheckpointBytes, flag: str, name: str) -> list[str]:
    """Return a flag for a folder with enough room, in a list; an empty list if there is none."""
    return [
        f"use `{flag} {shlex.quote(str(place / name))}`"
        for place in _writable_places()
        if shutil.disk_usage(place).free >= _with_spare(needed)
    ][:1]


def _make_room(directory: Path) -> str:
    return f"free some space (`df -h {shlex.quote(str(directory))}`)"


def _with_spare(needed: CheckpointBytes) -> int:
    """Bytes that must be free: ``needed``, 1 % more, and ``FREE_BYTES`` for logs and others."""
    return sum(needed) + sum(needed) // 100 + FREE_BYTES


def _another(what: str = "logs") -> str:
    """Return a writable directory, quoted for a shell: at home, or among temporary files."""
    return shlex.quote(str(_writable_places()[0] / f"highwater-{what}"))


def _writable_places() -> list[Path]:
    """Return the home directory, if it can be written, and the one for temporary files."""
    home, temporary = Path("~"), Path(tempfile.gettempdir())
    with suppress(RuntimeError):  # some users have no home directory
        home = home.expanduser()
    return [home, temporary] if os.access(home, os.W_OK) else [temporary]


def _full(directory: Path, problem: str) -> MachineError:
    hint = f"{_make_room(directory)}, or use `--log-dir {_another()}`"
    return MachineError(f"the log directory {directory} is full: {problem}", hint=hint)


_SPEC, _MODEL = "training.json", "model"
_STATE_BYTES = 64 * MIB
"""Largest size of a state; a million steps have 20 MiB."""


class TrainingFolder:
    """One run's folder."""

    def __init__(self, path: str | Path) -> None:
        """``path`` as it was typed; it need not exist yet."""
        self.path = Path(path)
        self.statistics = self.path / "statistics.jsonl"
        self.reports = self.path / "reports"
        self.snapshots = self.path / "snapshots"
        self.corpora = self.path / "corpora"
        """Corpora of machines that train together, all of which see this folder."""
        self._spec = self.path / _SPEC
        self._checkpoints = self.path / CHECKPOINTS

    @property
    def another(self) -> str:
        """Flag for another folder beside this one."""
        return f"`--output {shlex.quote(f'{self.path}-2')}`"

    def spec(self) -> TrainingSpec | None:
        """Return the run's specification; None if there is no run. UsageError if unreadable."""
        if not self._spec.exists():
            if self.statistics.exists() or self._checkpoints.exists():
                raise UsageError(
                    f"{self.path} has a run without its {_SPEC}", hint=f"use {self.another}"
                )
            return None
        try:
            return from_json(read_file(self._spec, most_bytes=CONFIG_BYTES), TrainingSpec)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self._spec} cannot be read: {' '.join(str(error).split())}",
                hint=f"use {self.another}",
            ) from error

    def refuse_another(self, before: TrainingSpec | None, spec: TrainingSpec) -> None:
        """Raise UsageError if the run ``before`` could not continue exactly as ``spec``."""
        changed = () if before is None else differences(before, spec)
        if changed:
            raise UsageError(
                f"{self.path} has a run that was trained otherwise: {'; '.join(changed)}",
                hint=f"type what was typed then, or use {self.another}",
            )

    def keep(self, spec: TrainingSpec) -> None:
        """Write the specification, and make the folders that the run's ranks write into."""
        write_whole(self._spec, to_json(spec).encode())
        if spec.trial.memory_snapshots is not None:
            self.snapshots.mkdir(exist_ok=True)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all whole checkpoints, ascending."""
        folders = (path for path in self._checkpoints.glob("step-*") if path.is_dir())
        steps = (checkpoint_step(folder.name) for folder in folders)
        return sorted(step for step in steps if step is not None)

    def last_state(self) -> RunState | None:
        """Return the state in the last checkpoint that has one; None if none has."""
        for step in reversed(self.checkpoint_steps()):
            path = self._checkpoints / checkpoint_name(step) / STATE_FILE
            try:
                return from_json(read_file(path, most_bytes=_STATE_BYTES), RunState)
            except (OSError, ValueError):
                continue
        return None

    def done_steps(self, resume_from: str | None) -> int:
        """Return the step of the checkpoint from which a run resumes; 0 if it starts anew."""
        if resume_from is not None:
            return checkpoint_step(resume_from) or 0
        state = self.last_state()
        return 0 if state is None else state.step

    def refuse_missing(self, resume_from: str | None) -> None:
        """Raise UsageError if the checkpoint to resume from does not exist."""
        steps = self.checkpoint_steps()
        if resume_from is None or checkpoint_step(resume_from) in steps:
            return
        latest = f"use `--resume-from {checkpoint_name(steps[-1])}`" if steps else None
        problem = f"there is no checkpoint {resume_from!r} in {self._checkpoints}"
        raise UsageError(problem, hint=latest or "leave `--resume-from` out")

    def new_model(self, steps: int) -> Path:
        """Free path for an exported model: ``model``, ``model-<steps>``, ``model-<steps>-2``."""
        names = chain((_MODEL, f"{_MODEL}-{steps}"), (f"{_MODEL}-{steps}-{n}" for n in count(2)))
        return next(path for name in names if not (path := self.path / name).exists())
