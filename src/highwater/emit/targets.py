"""Targets: every trainer that a configuration is emitted for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from highwater.emit.accelerate import accelerate
from highwater.emit.areal import areal
from highwater.emit.emitted import Emitted, Target
from highwater.emit.torchtitan import torchtitan
from highwater.emit.trinity import trinity
from highwater.emit.trl import trl
from highwater.emit.verl import verl
from highwater.spec.recommendation import Candidate, Recommendation


class Emit(Protocol):
    """Makes the configuration of one trainer."""

    def __call__(
        self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None
    ) -> Emitted:
        """Of a recommendation whose chosen rung is ``chosen``. Raises UsageError for what the
        trainer has no words for.
        """
        ...


EMITS: Mapping[Target, Emit] = {
    "trinity": trinity,
    "verl": verl,
    "areal": areal,
    "trl": trl,
    "torchtitan": torchtitan,
    "accelerate": accelerate,
}


def configured(target: Target, found: Recommendation, chosen: Candidate, *, model: str) -> Emitted:
    """One trainer's configuration, of ``model`` as somebody named it: a directory stands there by
    its whole path.
    """
    path = Path(model).expanduser()
    return EMITS[target](found, chosen, model_path=str(path.resolve()) if path.is_dir() else None)
