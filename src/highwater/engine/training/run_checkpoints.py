"""Run checkpoints: one folder each, whole or absent, of which the latest and the best are kept.

``step-000120`` has the shards of each trained model in ``model`` and ``critic``, ``state.json``,
and ``manifest.json``, which names every other file. A save writes ``step-000120.partial``: all
ranks write, and read back what they wrote; the first rank writes the manifest and renames the
folder when everything is on the disk. Whenever a run is killed, its previous checkpoint is
intact.
"""

import errno
import re
import shlex
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.data.store import (
    MANIFEST_FILE,
    FileRecord,
    check_files,
    damage,
    read_manifest,
    record_of,
    write_manifest,
)
from highwater.engine.parallel.mesh import copies
from highwater.engine.training.checkpoint import load_sharded, save_sharded
from highwater.engine.training.out_of_memory import stored
from highwater.engine.training.rank_context import agreed, gathered
from highwater.engine.training.shard_reader import INDEX_FILE
from highwater.engine.training.step import Training
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import (
    INDEX_BYTES,
    from_json,
    make_durable,
    read_file,
    to_json,
    write_whole,
)
from highwater.nouns.training import (
    CHECKPOINTS,
    STATE_FILE,
    BestCheckpoint,
    RunState,
    checkpoint_name,
    checkpoint_step,
)
from highwater.units import format_bytes

BEST_FILE = "best.json"
MODEL_FOLDERS = ("model", "critic")
"""Folders of the trained models' shards, in the order of ``Training.trained``."""
PARTIAL, ASIDE = ".partial", ".set-aside"
"""Suffixes of folders that are being written or removed, or set aside because the run went back."""
_OWN_FILE = re.compile(
    rf"(?:{'|'.join(MODEL_FOLDERS)})/(?:__\d+_\d+\.distcp|\.metadata(?:\.tmp)?)"
    rf"|(?:(?:{'|'.join(MODEL_FOLDERS)})/{INDEX_FILE}|{STATE_FILE}|{MANIFEST_FILE})(?:\.partial)?"
)
"""Paths in a checkpoint's folder that a save writes."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota, and a file above the limit for sizes."""


class RunCheckpoints:
    """Checkpoints in one run's folder. All ranks must call its methods, and see the same disk."""

    def __init__(self, run_directory: Path) -> None:
        """``run_directory``: absolute path of the run's folder; made when something is saved."""
        self.folder = run_directory / CHECKPOINTS

    def latest(self) -> Path | None:
        """Return the checkpoint of the latest step, even if damaged; None if there is none."""
        return max(self._checkpoints(), key=_step_of, default=None)

    def best(self) -> BestCheckpoint | None:
        """Return the checkpoint with the best evaluation; None if none was evaluated."""
        path = self.folder / BEST_FILE
        try:
            return from_json(read_file(path, most_bytes=INDEX_BYTES), BestCheckpoint)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise damage(path, str(error)) from error

    def save(self, training: Training, state: RunState) -> Path:
        """Save models, optimizers and ``state``, then remove all but the latest and the best
        checkpoint; returns the new folder. An existing whole checkpoint of this step is kept.

        Raises MachineError, on all ranks, if the disk is full or fails: earlier checkpoints stay,
        and this one is removed. Raises UsageError if the folder has another run's checkpoints.
        """
        mesh, target = training.mesh, self.folder / checkpoint_name(state.step)
        if self._is_saved(target, state, mesh):
            return target
        partial = target.with_name(target.name + PARTIAL)
        needed = checkpoint_bytes(training)
        try:
            with agreed(mesh), self._in_words(target, needed):
                if dist.get_rank() == 0:
                    self._begin(partial, needed)
            self._write(training, state, partial, needed)
            with agreed(mesh), self._in_words(target, needed):
                if dist.get_rank() == 0:
                    self._set_aside([target] if target.exists() else [])
                    partial.rename(target)
                    make_durable(self.folder)
        except MachineError:
            if dist.get_rank() == 0 and is_ours(partial, _OWN_FILE.fullmatch):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with agreed(mesh), self._in_words(target, needed):
            if dist.get_rank() == 0:
                self._tell_best()
                self._remove_older()
        return target

    def resume(self, training: Training, *, checkpoint: str | None = None) -> RunState | None:
        """Load the latest checkpoint, or the one of this name, into models and optimizers; returns
        its saved state, None if there is no checkpoint yet.

        With a name, later checkpoints are set aside: renamed, and never read or removed again.
        Raises UsageError, on all ranks, for a checkpoint that is damaged or of another model.
        """
        mesh = training.mesh
        with agreed(mesh):
            if dist.get_rank() == 0:
                self._remove_partial()
        path = self._chosen(checkpoint, mesh)
        if path is None:
            return None
        try:
            state = self._check(path, mesh)
        except UsageError as error:
            raise UsageError(error.problem, hint=self._way_on(path, mesh)) from error
        for name, (model, optimizer) in zip(MODEL_FOLDERS, training.trained, strict=False):
            with agreed(mesh):
                load_sharded(model, optimizer, path / name, mesh=mesh)
        with agreed(mesh):
            if dist.get_rank() == 0:
                later = [each for each in self._checkpoints() if _step_of(each) > state.step]
                if later:
                    self._set_aside(later)
                    self._tell_best()
        return state

    def _is_saved(self, target: Path, state: RunState, mesh: DeviceMesh) -> bool:
        """True if this step has a whole checkpoint; UsageError for a later or another run's one."""
        with agreed(mesh):
            others = [each for each in self._checkpoints() if _step_of(each) > state.step]
            if target.is_dir():
                with suppress(UsageError):
                    saved = read_state(target)
                    is_same = (saved.run_digest, saved.losses) == (state.run_digest, state.losses)
                    others += [] if is_same else [target]
            if others:
                raise UsageError(
                    f"{others[0]} is not of this run, which is at step {state.step}",
                    hint=f"use another folder: `--output {shlex.quote(f'{self.folder.parent}-2')}`",
                )
        if gathered(target.is_dir(), mesh, kind=bool)[0]:
            with suppress(UsageError):
                self._check(target, mesh)
                return True
        return False

    def _write(self, training: Training, state: RunState, partial: Path, needed: int) -> None:
        """Write everything to the disk, the manifest last."""
        mesh, rank, failure = training.mesh, dist.get_rank(), None
        try:  # save_sharded raises the same error on all ranks
            for name, (model, optimizer) in zip(MODEL_FOLDERS, training.trained, strict=False):
                save_sharded(model, optimizer, partial / name, mesh=mesh)
        except OSError as error:
            failure = error
        own: dict[str, FileRecord] = {}
        with agreed(mesh), self._in_words(partial, needed):
            if failure is not None:
                raise failure
            if rank == 0:
                write_whole(partial / STATE_FILE, to_json(state).encode(), durably=True)
            own = {str(path.relative_to(partial)): record_of(path) for path in _own(partial, rank)}
        every = gathered(own, mesh, kind=dict[str, FileRecord])
        with agreed(mesh), self._in_words(partial, needed):
            if rank == 0:
                write_manifest(partial, {name: each for own in every for name, each in own.items()})

    def _begin(self, partial: Path, needed: int) -> None:
        """Make the partial folder; raises OSError if the disk has too little space for a save."""
        self._remove_partial()
        try:
            partial.mkdir(parents=True)
        except FileExistsError as error:
            raise in_the_way(partial, "a checkpoint") from error
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < needed:  # some network disks say nothing
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def _in_words(self, target: Path, needed: int) -> Generator[None]:
        """Context manager: turn an OSError into a MachineError in the user's words."""
        try:
            yield
        except OSError as error:
            free = "an unknown number of bytes"
            with suppress(OSError):
                free = format_bytes(shutil.disk_usage(self.folder.parent).free)
            why = "there is no space left" if error.errno in NO_SPACE else str(error.strerror)
            name = target.name.removesuffix(PARTIAL)
            before = [each for each in self._checkpoints() if each.name != name]
            kept = max(before, key=_step_of, default=None)
            raise MachineError(
                f"{name} cannot be saved in {self.folder}: {why}. A "
                f"checkpoint takes {format_bytes(needed)}, and {free} are free; "
                + ("there is none before it" if kept is None else f"{kept.name} is still there"),
                hint=f"make room (`df -h {shlex.quote(str(self.folder.parent))}`), and start the "
                "run again",
            ) from error

    def _chosen(self, name: str | None, mesh: DeviceMesh) -> Path | None:
        """Return the checkpoint to load, as the first rank sees it; None if there is none."""
        names = self._names(mesh)
        if name is None:
            return self.folder / names[0] if names else None
        if name not in names:
            offered = f"use `--resume-from {names[0]}`" if names else "leave `--resume-from` out"
            raise UsageError(f"there is no checkpoint {name!r} in {self.folder}", hint=offered)
        return self.folder / name

    def _names(self, mesh: DeviceMesh) -> list[str]:
        """Return the names of all checkpoints, the latest first, as the first rank sees them."""
        paths = sorted(self._checkpoints(), key=_step_of, reverse=True)
        return gathered([path.name for path in paths], mesh, kind=list[str])[0]

    def _check(self, path: Path, mesh: DeviceMesh) -> RunState:
        """Return the state of a checkpoint; UsageError on all ranks if a file is damaged."""
        with agreed(mesh):
            manifest = read_manifest(path)
            by_size = sorted(manifest.files, key=lambda name: manifest.files[name].size_bytes)
            check_files(path, manifest, by_size[dist.get_rank() :: mesh.size()])
            state = read_state(path)
            if state.step != _step_of(path):
                raise damage(path / STATE_FILE, f"it is of step {state.step}")
        return state

    def _way_on(self, path: Path, mesh: DeviceMesh) -> str:
        """Return the hint for a damaged checkpoint: the latest undamaged one before it, or none."""
        for name in self._names(mesh):
            if _step_of(self.folder / name) < _step_of(path):
                with suppress(UsageError):
                    self._check(self.folder / name, mesh)
                    return f"go on from the whole one before it: `--resume-from {name}`"
        folder = shlex.quote(str(self.folder))
        return f"none before it is whole: `mv {folder} {folder}.damaged` lets the run begin anew"

    def _checkpoints(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [
            path
            for path in self.folder.iterdir()
            if checkpoint_step(path.name) is not None and path.is_dir() and not path.is_symlink()
        ]

    def _set_aside(self, checkpoints: Sequence[Path]) -> None:
        for path in checkpoints:
            number, aside = 1, path.with_name(path.name + ASIDE)
            while aside.exists():
                number, aside = number + 1, path.with_name(f"{path.name}{ASIDE}-{number + 1}")
            path.rename(aside)

    def _tell_best(self) -> None:
        """Record the best checkpoint among those evaluated on the same data as the latest one."""
        states: list[RunState] = []
        for path in self._checkpoints():
            with suppress(UsageError):  # a damaged one is not the best
                states.append(read_state(path))
        latest = max(states, key=lambda state: state.step, default=None)
        evaluated = [
            BestCheckpoint(
                checkpoint=checkpoint_name(state.step), step=state.step, loss=state.evaluation_loss
            )
            for state in states
            if state.evaluation_loss is not None
            and latest is not None
            and state.evaluation_digest == latest.evaluation_digest
        ]
        if evaluated:
            best = min(evaluated, key=lambda each: (each.loss, each.step))
            text = to_json(best, indent=2) + "\n"
            write_whole(self.folder / BEST_FILE, text.encode(), durably=True)
        else:
            (self.folder / BEST_FILE).unlink(missing_ok=True)

    def _remove_older(self) -> None:
        """Remove all checkpoints but the latest and the best; keep any with unknown files."""
        best = self.best()
        kept = {self.latest(), None if best is None else self.folder / best.checkpoint}
        for path in self._checkpoints():
            if path in kept:
                continue
            with suppress(UsageError):  # without a manifest the owner is unknown
                names = {*read_manifest(path).files, MANIFEST_FILE}
                if is_ours(path, names.__contains__):
                    # Renamed first: a half-removed folder must not have a checkpoint's name.
                    shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))

    def _remove_partial(self) -> None:
        """Remove folders of interrupted saves and removals."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            name = path.name.removesuffix(PARTIAL)
            is_named = name != path.name and checkpoint_step(name) is not None
            if is_named and is_ours(path, _OWN_FILE.fullmatch):
                shutil.rmtree(path)


def read_state(path: Path) -> RunState:
    """Read the state in a checkpoint's folder; UsageError if it cannot be read."""
    try:
        return from_json(read_file(path / STATE_FILE, most_bytes=INDEX_BYTES), RunState)
    except FileNotFoundError as error:
        raise damage(path / STATE_FILE, "it is missing") from error
    except (OSError, msgspec.MsgspecError, HighwaterError) as error:
        raise damage(path / STATE_FILE, str(error).partition("\n")[0]) from error


def checkpoint_bytes(training: Training) -> int:
    """Bytes of all tensors in a checkpoint, over all ranks; each takes about 1 KiB more."""
    own = 0
    for model, optimizer in training.trained:
        for parameter in model.parameters():
            if parameter.requires_grad:
                for each in (parameter.detach(), *optimizer.state.get(parameter, {}).values()):
                    own += sum(part.nbytes for part in stored(each))
    return sum(gathered(own, training.mesh, kind=int)) // copies(training.mesh)


def _own(partial: Path, rank: int) -> Iterator[Path]:
    """Yield the files that this rank wrote."""
    for folder in (partial / name for name in MODEL_FOLDERS):
        yield from folder.glob(f"__{rank}_*.distcp")
        if rank == 0 and folder.is_dir():
            yield from (folder / ".metadata", folder / INDEX_FILE)
    if rank == 0:
        yield partial / STATE_FILE


def is_ours(folder: Path, is_own_file: Callable[[str], object]) -> bool:
    """True for a folder, no link, in which ``is_own_file`` holds for each file's relative path."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and all(
            (path.is_dir() and not path.is_symlink()) or is_own_file(str(path.relative_to(folder)))
            for path in folder.rglob("*")
        )
    )


def in_the_way(partial: Path, what: str) -> UsageError:
    """Return the error for a folder with files that no save of ours writes."""
    name = shlex.quote(str(partial))
    return UsageError(
        f"{partial} is in the way of {what}, and has files that are none of one",
        hint=f"`mv {name} {name}.mine`",
    )


def _step_of(path: Path) -> int:
    step = checkpoint_step(path.name)
    assert step is not None, "a checkpoint has a checkpoint's name"
    return step
