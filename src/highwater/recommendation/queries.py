"""Queries: what ``recommend`` can be asked about a study, a prediction or a published capacity."""

from collections.abc import Sequence
from contextlib import suppress

from highwater.errors import ModelError
from highwater.memory.capacity import Prediction
from highwater.model.model import load_model
from highwater.nouns.capacities import Capacity
from highwater.nouns.cluster import nameless
from highwater.nouns.hardware import kind_of
from highwater.nouns.recommendation import Query
from highwater.nouns.request import taken_by
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Study
from highwater.nouns.trainer import TRAINERS, predicted_trainer

_RECOMMENDED = ("allocator", "loss", "offload")
"""Settings that differ among what is recommended."""
_ASKED = {
    row.rung_field: row
    for row in taken_by("recommend")
    if row.name not in _RECOMMENDED and row.rung_field in Settings.__struct_fields__
}
"""Settings of a rung that `recommend` can be asked for, besides those, by the rung's field."""
_NOT_ASKED = tuple(
    field for field in Settings.__struct_fields__ if field not in (*_ASKED, *_RECOMMENDED)
)
"""Settings that it cannot be asked for."""


def query_of_study(study: Study) -> Query | None:
    """The query about a study's model and GPUs; None where ``recommend`` cannot be asked it."""
    question, kind = study.question, kind_of(study.question.device_name)
    if question.foreign is not None:
        return None
    names = (question.model.name, question.model.directory)
    model = _model_words(names, question.model.config_digest)
    settings = _settings(question.cells)
    if model is None or kind is None or settings is None or question.data is not None:
        return None
    margin = (("headroom", question.margin_bytes),) if question.margin_bytes else ()
    return Query(
        model=model,
        kind=kind.name,
        gpu_memory_bytes=question.memory_budget_bytes,
        studies=() if study.path is None else (study.path,),
        settings=(*settings, *margin),
    )


def query_of_prediction(prediction: Prediction, model: str | None = None) -> Query | None:
    """The query about a prediction's model and GPUs; None where ``recommend`` cannot be asked it.
    ``model`` is what somebody called the model. A prediction by trace is not asked again.
    """
    kind = kind_of(prediction.device_name)
    words = _model_words((model or prediction.model_name,), prediction.config_digest)
    cells = tuple(each.cell for each in prediction.cells)
    settings = _settings(cells) if TRAINERS[prediction.trainer].is_run else _rope(cells)
    is_nameless = prediction.device_name == nameless(prediction.device_bytes)
    if words is None or settings is None or prediction.method == "trace":
        return None
    if any(cell.layout.is_several_machines for cell in cells):  # copies are no part of a query
        return None
    if kind is None and not is_nameless:
        return None
    is_whole = kind is not None and kind.usable_bytes == prediction.device_bytes
    margin = () if prediction.has_default_headroom else (("headroom", prediction.margin_bytes),)
    return Query(
        model=words,
        kind=None if kind is None else kind.name,
        gpu_memory_bytes=None if is_whole else prediction.device_bytes,
        reserved_bytes=prediction.device_bytes - prediction.memory_limit.device_bytes,
        trainer=prediction.trainer,
        settings=(*settings, *margin),
    )


def query_of_table(capacity: Capacity) -> Query | None:
    """The query of a formula about a published capacity's model and GPUs."""
    kind = kind_of(capacity.device_name)
    trainer = predicted_trainer(capacity.trainer)
    if kind is None or trainer is None:
        return None
    return Query(model=capacity.model_name, kind=kind.name, trainer=trainer)


def _model_words(names: Sequence[str], config_digest: str | None) -> str | None:
    """The first name that stands for this very model."""
    for name in names:
        with suppress(ModelError):
            if config_digest in (None, load_model(name).config_digest):
                return name
    return None


def _rope(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """The one setting that can be asked of another trainer."""
    return (("rope", "yarn"),) if any(cell.settings.rope == "yarn" for cell in cells) else ()


def _settings(cells: Sequence[Cell]) -> tuple[tuple[str, str | int | bool], ...] | None:
    """Settings that all cells share and that are no default; None if some cannot be asked for."""
    default = Settings()
    for name in _NOT_ASKED:
        if any(getattr(cell.settings, name) != getattr(default, name) for cell in cells):
            return None
    found: list[tuple[str, str | int | bool]] = []
    for field, row in _ASKED.items():
        values = {getattr(cell.settings, field) for cell in cells}
        if len(values) == 1 and getattr(default, field) not in values:
            found.append((row.name, row.typed_for(values.pop())))
    return tuple(found)
