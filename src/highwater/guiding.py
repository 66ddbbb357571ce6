"""Guiding: a guide from what studies found, what others published and what is predicted, and the file it is written to."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from highwater import api
from highwater.errors import StudyError, UsageError
from highwater.prediction.askable import asking_of_prediction, asking_of_study, asking_of_table
from highwater.prediction.capacity import Prediction, Room, predicted_capacities
from highwater.report.guide import Guide, guide_tables
from highwater.report.guide_markdown import guide_markdown
from highwater.spec.asking import Asking
from highwater.spec.capacities import Capacity, study_capacities
from highwater.spec.codec import from_json
from highwater.spec.events import Trainer
from highwater.spec.files import CONFIG_BYTES, read_file
from highwater.spec.model import STATE_BYTES_PER_PARAMETER
from highwater.spec.published import table_capacities
from highwater.store.directory import check_new_file, free_name, write_new_file
from highwater.units import format_bytes

_EXAMPLE = "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB"
_READ = (
    "what is read: a study that `highwater find` wrote, a .csv of known capacities, the .json of `highwater predict --json`; "
    f"without a file `{_EXAMPLE}`"
)

PAGE = ".html"
"""What a guide's name ends with to be a page."""
_ENDS = (PAGE, ".md")
"""What it ends with at all."""
_PREDICTION = "prediction.json"


class _Found(NamedTuple):
    """What one source knows."""

    capacities: tuple[Capacity, ...]
    notes: tuple[str, ...]
    """What a reader should know about it."""
    words: str
    """The source as one types it after ``highwater guide``."""
    askings: Mapping[tuple[str, str, str], Asking]
    """What `recommend` is asked about it, by what it is called, model and kind of GPU."""


class _Known(NamedTuple):
    """Which model a name stands for, and the first source that says so."""

    config_digest: str
    found_in: str
    words: str


def guide(
    *sources: str | Path,
    predict: Sequence[str] = (),
    gpus: Sequence[str] = (),
    trainer: Trainer = "highwater",
    gpu_memory: str | int | None = None,
    sequences_per_micro_batch: int | None = None,
) -> Guide:
    """For each length the simplest settings that fit, on every kind and number of GPUs that the sources know.

    A source is a study, a table of known capacities (``.csv``) or an answer of ``highwater predict --json`` (``.json``).
    ``predict`` names models whose capacities are predicted by formula, on each of ``gpus``: ``"4xA100-80GB"``; without any, on
    this machine's. ``gpu_memory`` is the memory of one, whichever they are, for a kind that no catalog has. It is predicted of so
    many ``sequences_per_micro_batch``, None: as many as ``predict`` takes by default. Raises HighwaterError for a source that
    cannot be read, and for what cannot be predicted.
    """
    if (gpus or gpu_memory is not None) and not predict:
        raise UsageError("GPUs are named, and no model to predict", hint=f"for example `{_EXAMPLE}`")
    if not sources and not predict:
        raise UsageError("a guide of nothing: no study, no table and no model is named", hint=f"for example `{_EXAMPLE}`")
    if sequences_per_micro_batch is not None and not predict:
        raise UsageError("sequences a micro-batch are named, and no model to predict", hint=f"for example `{_EXAMPLE}`")
    capacities: list[Capacity] = []
    notes: dict[str, None] = {}
    models: dict[str, _Known] = {}
    askings: dict[tuple[str, str, str], Asking] = {}
    settings: dict[str, Any] = {"trainer": trainer, "gpu_memory": gpu_memory}
    if sequences_per_micro_batch is not None:
        settings["sequences_per_micro_batch"] = sequences_per_micro_batch
    for found in (*map(_read, map(Path, sources)), *_predictions(predict, gpus, settings)):
        _check_models(found.capacities, found.words, models)
        capacities += found.capacities
        notes |= dict.fromkeys(found.notes)
        askings |= found.askings
    return Guide(tables=guide_tables(capacities), notes=tuple(notes), askings=askings)


def write_guide(path: str | Path, made: Guide) -> Path:
    """Write a guide into a new file: ``.html`` as a page that needs nothing else, ``.md`` as Markdown.

    Raises HighwaterError for another name, and for a file that is there already or cannot be written.
    """
    path = Path(path)
    check_guide_file(path)
    if path.suffix == PAGE:
        from highwater.choosing import places  # here, so that no other command waits for the templates
        from highwater.report.guide_page import guide_page

        text = guide_page(made, places(made))
    else:
        text = guide_markdown(made)
    write_new_file(path, text.encode(), flag="-o")
    return path


def check_guide_file(path: Path) -> None:
    """Raise UsageError for a file that no guide is written to: nothing that a user has is overwritten."""
    if path.suffix not in _ENDS:
        hint = f"end it in {' or '.join(_ENDS)}: `-o {shlex.quote(free_name(f'{path.stem}{PAGE}'))}`"
        raise UsageError(f"{path}: a guide is not written as {path.suffix or 'a file without a suffix'}", hint=hint)
    check_new_file(path, flag="-o", name="guide.html" if path.suffix == PAGE else "guide.md")


def _check_models(found: Iterable[Capacity], words: str, models: dict[str, _Known]) -> None:
    """Raise UsageError where a name that is known already stands for another model; what is new is added to ``models``."""
    for each in found:
        if each.config_digest is None:
            continue
        known = models.setdefault(each.model_name, _Known(each.config_digest, each.found_in, words))
        if known.config_digest != each.config_digest:
            raise UsageError(
                f"{known.found_in} and {each.found_in} each have a model {each.model_name}, and these are two models: their "
                "config.json differ",
                hint=f"`highwater guide {known.words}` and `highwater guide {words}` make a guide of each",
            )


def _read(path: Path) -> _Found:
    """What one file knows."""
    words = shlex.quote(str(path))
    if path.suffix == ".csv":
        capacities = table_capacities(path)
        return _Found(capacities, (), words, _asked(capacities, asking_of_table))
    if path.suffix == ".json":
        return _read_prediction(path)
    try:
        study = api.open_study(path)
    except StudyError as error:
        raise StudyError(error.problem, hint=_READ) from error
    if study.question.device == "cpu":
        hint = f"leave it out; for example `{_EXAMPLE}`"
        raise UsageError(f"{path} is a search on the CPU, and a guide is about GPUs", hint=hint)
    odd = (f"{each.cell.label}: not monotone: {text}" for each in study.answers for text in each.contradictions)
    capacities, asking = study_capacities(study), asking_of_study(study)
    notes = tuple(f"{path}: {note}" for note in (*study.notes, *odd))
    return _Found(capacities, notes, words, _asked(capacities, lambda _: asking))


def _read_prediction(path: Path) -> _Found:
    hint = f"`highwater predict Qwen3-8B --gpus 4xA100-80GB --json > {free_name(_PREDICTION)}` writes one"
    try:
        prediction = from_json(read_file(path, most_bytes=CONFIG_BYTES), Prediction)
    except OSError as error:
        raise UsageError(f"the prediction {path} cannot be read: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a prediction of this version: {error}", hint=hint) from error
    assumed = _assumed(prediction.room)
    if assumed:
        flags = " and ".join(f"`{flag}`" for flag in assumed)
        raise UsageError(
            f"{path} was predicted with {' and '.join(assumed.values())}, and a guide says nothing of that",
            hint=f"predict without {flags}: {hint}",
        )
    notes = tuple(f"{path}: {note}" for note in prediction.notes)
    capacities, asking = predicted_capacities(prediction, str(path)), asking_of_prediction(prediction)
    return _Found(capacities, notes, shlex.quote(str(path)), _asked(capacities, lambda _: asking))


def _asked(capacities: Iterable[Capacity], asking_of: Callable[[Capacity], Asking | None]) -> Mapping[tuple[str, str, str], Asking]:
    found = ((each.found_in, each.model_name, each.device_name, asking_of(each)) for each in capacities)
    return {(source, model, device): asking for source, model, device, asking in found if asking is not None}


def _assumed(room: Room) -> dict[str, str]:
    """What a prediction takes for granted that others do not, by its flag. What is reserved of a GPU is in the GPU's name."""
    states, host = room.state_bytes_per_parameter, room.host_bytes
    found: dict[str, str] = {}
    if states != STATE_BYTES_PER_PARAMETER:
        found["--state-bytes-per-param"] = f"{states} bytes of states a parameter"
    if host is not None:
        found["--host-memory"] = f"{format_bytes(host)} of host memory"
    if room.constants is not None:
        found["--constants"] = "constants of its own"
    return found


def _predictions(models: Sequence[str], gpus: Sequence[str], settings: Mapping[str, Any]) -> Iterator[_Found]:
    """``settings`` are keywords of ``predict``; None and the default trainer are not typed."""
    given = {name: value for name, value in settings.items() if value not in (None, "highwater")}
    typed = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for where in gpus or (None,):
        for model in models:
            flags = [*(["--gpus", where] if where else []), *typed]
            prediction = api.predict(model, gpus=where, **settings)
            command = shlex.join(["highwater", "predict", model, *flags])
            notes = tuple(f"{command}: {note}" for note in prediction.notes)
            capacities, asking = predicted_capacities(prediction, command), asking_of_prediction(prediction, model)
            words = shlex.join(["--predict", model, *flags])
            yield _Found(capacities, notes, words, _asked(capacities, lambda _, asking=asking: asking))
