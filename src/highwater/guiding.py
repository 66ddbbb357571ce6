"""Guiding: a guide from what studies found, what others published and what is predicted, and the file it is written to."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from highwater import api
from highwater.errors import MachineError, UsageError
from highwater.prediction.capacity import Prediction, predicted_capacities
from highwater.report.guide import Guide, guide_tables
from highwater.report.guide_markdown import guide_markdown
from highwater.spec.capacities import Capacity, study_capacities
from highwater.spec.codec import from_json
from highwater.spec.events import Trainer
from highwater.spec.published import table_capacities
from highwater.spec.study import Study
from highwater.store.directory import check_new_file

_EXAMPLE = "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB"

_PAGE = ".html"


def guide(
    *sources: str | Path,
    predict: Sequence[str] = (),
    gpus: Sequence[str] = (),
    trainer: Trainer = "highwater",
) -> Guide:
    """For each length the simplest settings that fit, on every kind and number of GPUs that the sources know.

    A source is a study, a table of known capacities (``.csv``) or an answer of ``highwater predict --json`` (``.json``).
    ``predict`` names models whose capacities are predicted by formula, on each of ``gpus``: ``"4xA100-80GB"``; without any, on
    this machine's. Raises HighwaterError for a source that cannot be read, and for what cannot be predicted.
    """
    if gpus and not predict:
        raise UsageError("GPUs are named, and no model to predict", hint=f"for example `{_EXAMPLE}`")
    if not sources and not predict:
        raise UsageError("a guide of nothing: no study, no table and no model is named", hint=f"for example `{_EXAMPLE}`")
    capacities: list[Capacity] = []
    notes: dict[str, None] = {}
    for found, said in (*map(_read, map(Path, sources)), *_predictions(predict, gpus, trainer)):
        capacities += found
        notes |= dict.fromkeys(said)
    return Guide(tables=guide_tables(capacities), notes=tuple(notes))


def write_guide(path: str | Path, made: Guide) -> Path:
    """Write a guide into a new file: ``.html`` as a page that needs nothing else, any other name as Markdown.

    Raises HighwaterError for a file that is there already or cannot be written.
    """
    path = Path(path)
    check_guide_file(path)
    if path.suffix == _PAGE:
        from highwater.report.guide_page import guide_page  # here, so that no other command waits for the templates

        text = guide_page(made)
    else:
        text = guide_markdown(made)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}", hint="make room there, or leave `-o` out") from error
    return path


def check_guide_file(path: Path) -> None:
    """Raise UsageError for a file that no guide is written to: nothing that a user has is overwritten."""
    check_new_file(path, flag="-o", name="guide.html" if path.suffix == _PAGE else "guide.md")


def _read(path: Path) -> tuple[tuple[Capacity, ...], tuple[str, ...]]:
    """What one file knows, and what a reader should know about it."""
    if path.suffix == ".csv":
        return table_capacities(path), ()
    if path.suffix == ".json":
        return _read_prediction(path)
    study: Study = api.open_study(path)
    if study.question.device == "cpu":
        hint = f"leave it out; for example `{_EXAMPLE}`"
        raise UsageError(f"{path} is a search on the CPU, and a guide is about GPUs", hint=hint)
    return study_capacities(study), tuple(f"{path}: {note}" for note in study.notes)


def _read_prediction(path: Path) -> tuple[tuple[Capacity, ...], tuple[str, ...]]:
    hint = f"`highwater predict Qwen3-8B --gpus 4xA100-80GB --json > {shlex.quote(str(path))}` writes one"
    try:
        prediction = from_json(path.read_bytes(), Prediction)
    except OSError as error:
        raise UsageError(f"the prediction {path} cannot be read: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a prediction of this version: {error}", hint=hint) from error
    return predicted_capacities(prediction, str(path)), tuple(f"{path}: {note}" for note in prediction.notes)


def _predictions(
    models: Sequence[str], gpus: Sequence[str], trainer: Trainer
) -> Iterator[tuple[tuple[Capacity, ...], tuple[str, ...]]]:
    for where in gpus or (None,):
        for model in models:
            words = ["highwater", "predict", model, *(("--gpus", where) if where else ())]
            words += ["--trainer", trainer] if trainer != "highwater" else []
            prediction = api.predict(model, gpus=where, trainer=trainer)
            command = shlex.join(words)
            yield predicted_capacities(prediction, command), tuple(f"{command}: {note}" for note in prediction.notes)
