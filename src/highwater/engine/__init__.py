"""Data plane: one training step, and the worker that measures it.

For a training loop of your own: ``from highwater.engine import Trainer``. A name's modules, and
torch with them, are loaded when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from highwater.engine.training.statistics import Quantity as Quantity
    from highwater.engine.training.step import train_step as train_step
    from highwater.engine.training.step_record import Training as Training
    from highwater.engine.training.trainer import StepResult as StepResult
    from highwater.engine.training.trainer import Trainer as Trainer
    from highwater.engine.training.training_run import Evaluation

_PUBLIC = {
    "Evaluation": "highwater.engine.training.training_run",
    "Quantity": "highwater.engine.training.statistics",
    "StepResult": "highwater.engine.training.trainer",
    "Trainer": "highwater.engine.training.trainer",
    "Training": "highwater.engine.training.step_record",
    "train_step": "highwater.engine.training.step",
}
__all__ = ["Evaluation", "Quantity", "StepResult", "Trainer", "Training", "train_step"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'highwater.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
