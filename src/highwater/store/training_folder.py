"""Training folder: a run's folder as seen by whoever starts it: the run's specification, and how
far it came. The ranks write the rest.
"""

import shlex
from itertools import chain, count
from pathlib import Path

from highwater.errors import UsageError
from highwater.nouns.codec import CONFIG_BYTES, from_json, read_file, to_json, write_whole
from highwater.nouns.training import (
    CHECKPOINTS,
    STATE_FILE,
    RunState,
    TrainingSpec,
    checkpoint_name,
    checkpoint_step,
    differences,
)
from highwater.units import MIB

_SPEC, _MODEL = "training.json", "model"
_STATE_BYTES = 64 * MIB
"""Largest size of a state; a million steps have 20 MiB."""


class TrainingFolder:
    """One run's folder."""

    def __init__(self, path: str | Path) -> None:
        """``path`` as it was typed; it need not exist yet."""
        self.path = Path(path)
        self.statistics = self.path / "statistics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.snapshots = self.path / "snapshots"
        self.corpora = self.path / "corpora"
        """Corpora of machines that train together, all of which see this folder."""
        self._spec = self.path / _SPEC
        self._checkpoints = self.path / CHECKPOINTS

    @property
    def another(self) -> str:
        """Flag that names a folder beside this one."""
        return f"`--output {shlex.quote(f'{self.path}-2')}`"

    def spec(self) -> TrainingSpec | None:
        """Return the run's specification, None without one; UsageError if it is unreadable."""
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
        """Raise UsageError if the run ``before`` could not go on exactly as this one."""
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
        """Return the steps of the checkpoint from which a run resumes; 0 without one."""
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
        """Return a free path for a model: ``model``, ``model-<steps>``, ``model-<steps>-2``..."""
        names = chain((_MODEL, f"{_MODEL}-{steps}"), (f"{_MODEL}-{steps}-{n}" for n in count(2)))
        return next(path for name in names if not (path := self.path / name).exists())
