"""Askable: what `recommend` can be asked about the model and the GPUs of a study, of a prediction or of a published capacity."""

from collections.abc import Sequence
from contextlib import suppress

from highwater.errors import ModelError
from highwater.prediction.capacity import Prediction
from highwater.spec.asking import Asking
from highwater.spec.capacities import Capacity
from highwater.spec.cluster import nameless
from highwater.spec.hardware import kind_of
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.study import Cell, Study

_ASKED = ("strategy", "recompute", "mlp_tiles", "rope", "objective", "critic", "entropy", "sequences_per_micro_batch")
"""Settings that `recommend` can be asked for, besides those that a rung is made of."""
_NOT_ASKED = ("checkpoint", "save_hf", "token_budget_tokens")
"""Settings that it cannot be asked for."""
_BUDGETS = (1, 2)
"""Sequences a micro-batch that every recommendation is about."""


def asking_of_study(study: Study) -> Asking | None:
    """How to ask about what a study is about; None where `recommend` cannot."""
    question, kind = study.question, kind_of(study.question.device_name)
    model = _model_words((question.model.name, question.model.directory), question.model.config_digest)
    settings = _settings(question.cells)
    if model is None or kind is None or settings is None or question.data is not None:
        return None
    margin = (("margin", question.margin_bytes),) if question.margin_bytes else ()
    return Asking(
        model=model,
        kind=kind.name,
        gpu_memory_bytes=question.memory_budget_bytes,
        studies=() if study.path is None else (study.path,),
        settings=(*settings, *margin),
    )


def asking_of_prediction(prediction: Prediction, model: str | None = None) -> Asking | None:
    """The same of a prediction by formula, of ``model`` as somebody named it; a trace is not asked again."""
    kind = kind_of(prediction.device_name)
    words = _model_words((model or prediction.model_name,), prediction.config_digest)
    cells = tuple(each.cell for each in prediction.cells)
    settings = _settings(cells) if prediction.trainer == "highwater" else _rope(cells)
    is_nameless = prediction.device_name == nameless(prediction.device_bytes)
    if words is None or (kind is None and not is_nameless) or settings is None or prediction.method == "trace":
        return None
    margin = (("margin", prediction.margin_bytes),) if prediction.margin_bytes else ()
    return Asking(
        model=words,
        kind=None if kind is None else kind.name,
        gpu_memory_bytes=None if kind and kind.usable_bytes == prediction.device_bytes else prediction.device_bytes,
        reserved_bytes=prediction.device_bytes - prediction.room.device_bytes,
        trainer=prediction.trainer,
        settings=(*settings, *margin),
    )


def asking_of_table(capacity: Capacity) -> Asking | None:
    """How to ask a formula about a published capacity's model and GPUs."""
    kind = kind_of(capacity.device_name)
    return None if kind is None else Asking(model=capacity.model_name, kind=kind.name, trainer=capacity.trainer)


def _model_words(names: Sequence[str], config_digest: str | None) -> str | None:
    """The first name that stands for this very model."""
    for name in names:
        with suppress(ModelError):
            if config_digest in (None, load_model(name).config_digest):
                return name
    return None


def _rope(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """What can be asked of another trainer's settings."""
    return (("rope", "yarn"),) if any(cell.settings.rope == "yarn" for cell in cells) else ()


def _settings(cells: Sequence[Cell]) -> tuple[tuple[str, str | int | bool], ...] | None:
    """What all cells have in common and is not the default; None for what cannot be asked."""
    if any(getattr(cell.settings, name) != getattr(Settings(), name) for cell in cells for name in _NOT_ASKED):
        return None
    found: list[tuple[str, str | int | bool]] = []
    for name in _ASKED:
        values = {getattr(cell.settings, name) for cell in cells}
        usual = _BUDGETS if name == "sequences_per_micro_batch" else (getattr(Settings(), name),)
        if len(values) == 1 and not values & set(usual):
            found.append((name, values.pop()))
    return tuple(found)
