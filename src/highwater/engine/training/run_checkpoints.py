"""The checkpoints of a run: a folder for each, whole or not there, of which the latest and the best
are kept.

``step-000120`` has the shards of each trained model in ``model`` and ``critic``, ``state.json``,
and ``manifest.json``, which names every other file. It is written as ``step-000120.partial``: all
ranks write, and read back what they wrote; the first one writes the manifest and renames the folder
when everything is on the disk. Whatever is killed, and whenever, the checkpoint before it is there.
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from highwater.engine.data.store import (
    MANIFEST_FILE,
    FileRecord,
    check_files,
    damage,
    make_durable,
    read_manifest,
    record_of,
    write_durably,
    write_manifest,
)
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.parallel.mesh import copies
from highwater.engine.training.checkpoint import load_sharded, save_sharded
from highwater.engine.training.rank_context import agreed, gathered
from highwater.engine.training.shard_reader import INDEX_FILE
from highwater.engine.training.step import Training
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.files import INDEX_BYTES, read_file
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
"""Ends of the names of folders that are being written or removed, and of checkpoints after the one
that a run went back to."""
_OWN_FILE = re.compile(
    rf"(?:{'|'.join(MODEL_FOLDERS)})/(?:__\d+_\d+\.distcp|\.metadata(?:\.tmp)?|{INDEX_FILE})"
    rf"|(?:{STATE_FILE}|{MANIFEST_FILE})(?:\.tmp)?"
)
"""Files that a save writes, by their paths in its folder."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunCheckpoints:
    """The checkpoints below one run's folder. All ranks call its methods, and see one disk."""

    def __init__(self, run_directory: Path) -> None:
        """``run_directory``: what the run writes, absolute; made when something is saved."""
        self.folder = run_directory / CHECKPOINTS

    def latest(self) -> Path | None:
        """The checkpoint of the latest step, whole or damaged; None where there is none."""
        return max(self._checkpoints(), key=_step_of, default=None)

    def best(self) -> BestCheckpoint | None:
        """The checkpoint whose evaluation was the best; None where none was evaluated."""
        path = self.folder / BEST_FILE
        try:
            return from_json(read_file(path, most_bytes=INDEX_BYTES), BestCheckpoint)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise damage(path, str(error)) from error

    def save(self, training: Training, state: RunState) -> Path:
        """Save models, optimizers and ``state``, then remove what is neither the latest nor the
        best; returns the checkpoint's folder. One of this step that is there and whole stays.

        Raises MachineError, on all ranks, where the disk does not take it: the checkpoints before
        it stay, and nothing is left of this one. UsageError where another run's are there.
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
            if dist.get_rank() == 0 and _is_ours(partial, _OWN_FILE.fullmatch):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with agreed(mesh), self._in_words(target, needed):
            if dist.get_rank() == 0:
                self._tell_best()
                self._remove_older()
        return target

    def resume(self, training: Training, *, checkpoint: str | None = None) -> RunState | None:
        """Load the latest checkpoint, or the one of this name, into models and optimizers; returns
        the state that was saved with it, None where there is no checkpoint yet.

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
        """Whether this step is saved already, and whole; UsageError where it is another's."""
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
        """Write everything, onto the disk, the manifest last."""
        mesh, rank, failure = training.mesh, dist.get_rank(), None
        try:  # the same error on all ranks
            for name, (model, optimizer) in zip(MODEL_FOLDERS, training.trained, strict=False):
                save_sharded(model, optimizer, partial / name, mesh=mesh)
        except OSError as error:
            failure = error
        own: dict[str, FileRecord] = {}
        with agreed(mesh), self._in_words(partial, needed):
            if failure is not None:
                raise failure
            if rank == 0:
                write_durably(partial / STATE_FILE, to_json(state))
            own = {str(path.relative_to(partial)): record_of(path) for path in _own(partial, rank)}
        every = gathered(own, mesh, kind=dict[str, FileRecord])
        with agreed(mesh), self._in_words(partial, needed):
            if rank == 0:
                write_manifest(partial, {name: each for own in every for name, each in own.items()})

    def _begin(self, partial: Path, needed: int) -> None:
        """Make the folder, where there is room for what comes into it."""
        self._remove_partial()
        try:
            partial.mkdir(parents=True)
        except FileExistsError as error:
            raise UsageError(
                f"{partial} is in the way of a checkpoint, and has files that are none of one",
                hint=f"`mv {shlex.quote(str(partial))} {shlex.quote(str(partial))}.mine`",
            ) from error
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < needed:  # some network disks say nothing
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def _in_words(self, target: Path, needed: int) -> Generator[None]:
        """Say what the disk did not take in a user's words."""
        try:
            yield
        except OSError as error:
            free = "an unknown number of bytes"
            with suppress(OSError):
                free = format_bytes(shutil.disk_usage(self.folder.parent).free)
            why = "there is no space left" if error.errno in _NO_SPACE else str(error.strerror)
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
        """What is loaded, as the first rank sees it."""
        names = self._names(mesh)
        if name is None:
            return self.folder / names[0] if names else None
        if name not in names:
            offered = f"use `--resume-from {names[0]}`" if names else "leave `--resume-from` out"
            raise UsageError(f"there is no checkpoint {name!r} in {self.folder}", hint=offered)
        return self.folder / name

    def _names(self, mesh: DeviceMesh) -> list[str]:
        """Names of all checkpoints, the latest first, as the first rank sees them."""
        paths = sorted(self._checkpoints(), key=_step_of, reverse=True)
        return gathered([path.name for path in paths], mesh, kind=list[str])[0]

    def _check(self, path: Path, mesh: DeviceMesh) -> RunState:
        """The state of a checkpoint; UsageError on all ranks where a file is damaged."""
        with agreed(mesh):
            manifest = read_manifest(path)
            by_size = sorted(manifest.files, key=lambda name: manifest.files[name].size_bytes)
            check_files(path, manifest, by_size[dist.get_rank() :: mesh.size()])
            state = read_state(path)
            if state.step != _step_of(path):
                raise damage(path / STATE_FILE, f"it is of step {state.step}")
        return state

    def _way_on(self, path: Path, mesh: DeviceMesh) -> str:
        """What to type where a checkpoint is damaged."""
        for name in self._names(mesh):
            if _step_of(self.folder / name) < _step_of(path):
                with suppress(UsageError):
                    self._check(self.folder / name, mesh)
                    return f"go on from the whole one before it: `--resume-from {name}`"
        folder = shlex.quote(str(self.folder))
        return f"none before it is whole: `mv {folder} {folder}.damaged` lets the run begin anew"

    def _checkpoints(self) -> list[Path]:
        """Every folder with a checkpoint's name."""
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
        """Say which checkpoint is the best, by evaluations as the latest one's."""
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
            write_durably(self.folder / BEST_FILE, to_json(best, indent=2) + "\n")
        else:
            (self.folder / BEST_FILE).unlink(missing_ok=True)

    def _remove_older(self) -> None:
        """Remove all checkpoints but the latest and the best, unless they have others' files."""
        best = self.best()
        kept = {self.latest(), None if best is None else self.folder / best.checkpoint}
        for path in self._checkpoints():
            if path in kept:
                continue
            with suppress(UsageError):  # without a manifest nobody knows whose it is
                names = {*read_manifest(path).files, MANIFEST_FILE}
                if _is_ours(path, names.__contains__):
                    # Half of it is never seen under a checkpoint's name.
                    shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))

    def _remove_partial(self) -> None:
        """Remove what a save or a removal that was killed left."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            name = path.name.removesuffix(PARTIAL)
            is_named = name != path.name and checkpoint_step(name) is not None
            if is_named and _is_ours(path, _OWN_FILE.fullmatch):
                shutil.rmtree(path)


def read_state(path: Path) -> RunState:
    """The state in a checkpoint's folder; UsageError where it cannot be read."""
    try:
        return from_json(read_file(path / STATE_FILE, most_bytes=INDEX_BYTES), RunState)
    except FileNotFoundError as error:
        raise damage(path / STATE_FILE, "it is missing") from error
    except (OSError, msgspec.MsgspecError, HighwaterError) as error:
        raise damage(path / STATE_FILE, str(error)) from error


def checkpoint_bytes(training: Training) -> int:
    """Bytes of all numbers in a checkpoint over all ranks; a tensor takes about 1 KiB more."""
    own = 0
    for model, optimizer in training.trained:
        for parameter in model.parameters():
            if parameter.requires_grad:
                for each in (parameter.detach(), *optimizer.state.get(parameter, {}).values()):
                    own += sum(part.nbytes for part in _stored(local_shard(each)))
    return sum(gathered(own, training.mesh, kind=int)) // copies(training.mesh)


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that one consists of: moments of 8 bits are codes and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield getattr(tensor, name)


def _own(partial: Path, rank: int) -> Iterator[Path]:
    """The files that this rank wrote."""
    for folder in (partial / name for name in MODEL_FOLDERS):
        yield from folder.glob(f"__{rank}_*.distcp")
        if rank == 0 and folder.is_dir():
            yield from (folder / ".metadata", folder / INDEX_FILE)
    if rank == 0:
        yield partial / STATE_FILE


def _is_ours(folder: Path, is_own_file: Callable[[str], object]) -> bool:
    """Whether a folder is one, and has no file in it that is not written here."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and all(
            (path.is_dir() and not path.is_symlink()) or is_own_file(str(path.relative_to(folder)))
            for path in folder.rglob("*")
        )
    )


def _step_of(path: Path) -> int:
    step = checkpoint_step(path.name)
    assert step is not None, "a checkpoint has a checkpoint's name"
    return step
