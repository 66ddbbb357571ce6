"""``highwater predict``: the longest context of every rung on GPUs that need not be in this
machine; and ``highwater data``: lengths of a user's documents.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from highwater.api.gpu_choice import cheapest_gpus
from highwater.api.prediction import predict as api_predict
from highwater.cli import console
from highwater.cli.flags import (
    named_model,
    told_notes,
    trial_limits,
    typed_place,
    typed_values,
    words_again,
    words_without,
)
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, UsageError
from highwater.memory.capacity import Prediction
from highwater.nouns.cluster import gpus_listed
from highwater.nouns.declaration import flag_of, words_of
from highwater.nouns.hardware import LIST_PRICE_NOTE, default_host, gpu_catalog, runs_trials
from highwater.nouns.request import DECLARED, request_from, setting_flags, taken_by, trial_flags
from highwater.nouns.settings import short_settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import FOREIGN, OF_OTHERS, TRAINERS, ForeignName, foreign_name
from highwater.nouns.trial import TrialSpec
from highwater.pages.prediction_tables import (
    assumed_host,
    choice_answer,
    choice_table,
    data_answer,
    data_table,
    fuller_rows,
    in_lines,
    prediction_answer,
    prediction_table,
    rollout_tables,
    term_table,
)
from highwater.trials.probe import probe
from highwater.units import format_tokens

if TYPE_CHECKING:
    from highwater.api.data_lengths import DataLengths

_EXAMPLE = "highwater predict Qwen3-8B --gpus 4xA100-80GB"
_NOT_RECOMMENDED = tuple(row.flag for row in taken_by("predict", but_not="recommend"))
"""Flags that a prediction has and a recommendation has not."""


def predict(arguments: argparse.Namespace) -> int:
    """Print a prediction; or with ``--data`` (``read_data``) lengths of data, of several ``--gpus``
    (``cluster``) the cheapest. ``--trainer``: ``predicted_for``.
    """
    if arguments.read_data:
        return _predict_data(arguments)
    if arguments.whole is not None:
        problem = "a share of documents, and no data"
        raise UsageError(problem, hint="add `--data data.jsonl`, or leave `--whole` out")
    listed_gpus = gpus_listed(arguments.cluster) or _rentable_kinds(arguments)
    if len(listed_gpus) > 1:  # usually one, as `4xA100-80GB`
        return _compare_gpus(arguments, listed_gpus)
    is_priced = arguments.price is not None or arguments.tokens is not None
    if is_priced and arguments.length is None:
        problem = "a price of training, and neither a length nor data"
        raise UsageError(problem, hint="add `--length 32k` or `--data data.jsonl`")
    prediction = _prediction_asked(arguments)
    limit, cost = prediction.memory_limit, prediction.cost
    is_bound = any(cell.binding == "host" for cell in prediction.cells)
    is_bound &= prediction.answer is None  # an answer names its host memory
    host = assumed_host(limit.host_bytes, limit.usual_host) if is_bound else ()
    is_listed = cost is not None and cost.dollars is not None and arguments.price is None
    notes = (*told_notes(arguments, prediction.notes), *host, *([LIST_PRICE_NOTE] * is_listed))
    code = EXIT_ANSWERED if prediction.answer is not None else EXIT_ANSWERED_NO
    if arguments.json:
        return console.answer_json(prediction, code, noted=notes)
    ways, saved = _other_ways(arguments, prediction), _as_saved(arguments, prediction)
    is_drawn = arguments.explain or (arguments.length and "read" not in ways)
    console.answer_page(
        in_lines(prediction_answer(prediction, as_saved=saved, **ways)),
        prediction_table(prediction, is_explained=arguments.explain, is_whole=arguments.all_),
        *(rollout_tables(prediction) if is_drawn else ()),
        *((term_table(prediction.explained),) if arguments.explain else ()),
        noted=notes,
    )
    console.next_command(_after_predict(arguments, prediction))
    return code


def data(arguments: argparse.Namespace) -> int:
    """Print the lengths of documents, and what part of them each context length keeps."""
    from highwater.api.data_lengths import data_lengths

    paths, model = arguments.documents, arguments.counted_by
    found = data_lengths(paths, model, whole=arguments.whole, on_phase=console.seldom())
    model = model if model and found.native_length_tokens else "Qwen3-0.6B"  # it has no shape
    words = ["highwater", "predict", model, "--gpus", "H100-80GB", "--data", *paths]
    return _say_data(arguments, found, words)


def _predict_data(arguments: argparse.Namespace) -> int:
    """Print the lengths of documents, with the settings that train each, and the time of a pass."""
    from highwater.api.data_lengths import data_lengths

    for name in ("exact", "tried_to_allocate"):
        if getattr(arguments, name):
            problem = "each length of the data is predicted by formula"
            raise UsageError(problem, hint=f"leave `{flag_of(name)}` out")
    model, settings = named_model(arguments, [], example=_EXAMPLE)
    found = data_lengths(
        arguments.read_data,
        model,
        length=arguments.length,
        price=arguments.price,
        whole=arguments.whole,
        on_phase=console.seldom(),
        **typed_place(arguments),
        **settings,
    )
    words = words_again(arguments, drop=(*_NOT_RECOMMENDED, "--length"))
    kept = found.cut if found.cut and found.cut.trained else found.enough
    length = ("--length", str(kept.length_tokens))
    return _say_data(arguments, found, ("highwater", "recommend", model, *words, *length))


def _say_data(arguments: argparse.Namespace, found: "DataLengths", then: Sequence[str]) -> int:
    if arguments.json:
        return console.answer_json(found, noted=found.notes)
    table = data_table(found, is_whole=vars(arguments).get("all_", False))
    console.answer_page(data_answer(found), table, noted=found.notes)
    console.next_command(shlex.join(then))
    return EXIT_ANSWERED


def _other_ways(arguments: argparse.Namespace, prediction: Prediction) -> dict[str, Any]:
    """Of a user's file with a length: how far it trains. If nothing fits: the prediction without a
    length, alternatives, and the file with changes. If a length may fit on one GPU: only
    alternatives, which say how many GPUs are safe. Of a cost: that of fuller micro-batches.
    """
    answer, asked = prediction.answer, prediction.length_tokens
    if prediction.method != "formula" or arguments.calibrate:
        return {}
    model, settings = named_model(arguments, [], example=_EXAMPLE)
    shared, longest = typed_place(arguments), None
    ways = _file_ways(prediction, model, shared, settings) if "trainer_config" in settings else {}
    if (rows := fuller_rows(prediction)) is not None:
        bill = {name: getattr(arguments, name) for name in ("length", "tokens", "price")}
        settings |= {"sequences_per_micro_batch": rows}
        return {**ways, "fuller": api_predict(model, **shared, **settings, **bill)}
    if answer is not None and (answer.capacity_tokens or not asked or prediction.gpus > 1):
        return ways
    if answer is None and asked is not None and not ways:
        longest = api_predict(model, constants=arguments.constants, **shared, **settings)
    length_tokens = asked or prediction.cells[0].does_not_fit_tokens
    grid = {flag_of(name) for name in settings if name not in OF_OTHERS}
    if length_tokens is None or grid.intersection(_NOT_RECOMMENDED):
        return {"longest": longest, **ways}
    from highwater.recommendation.recommend import recommend, what_would_fit

    if "trainer_config" not in settings:
        would = what_would_fit(model, length_tokens=length_tokens, **shared, **settings)
        return {"longest": longest, "alternatives": would}
    found = recommend(model, length=length_tokens, **shared, **settings)
    return {"longest": longest, "alternatives": found.alternatives, "changed": found, **ways}


def _file_ways(
    prediction: Prediction, model: str, shared: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """What a user's file says, and how far it trains as it is and with changes; empty if no length
    is asked about and one trains, and of a file that says only how processes share the work.
    """
    from highwater.trainers.user_file import FILE_WORDS, settings_of

    typed, words = dict(settings), FILE_WORDS[prediction.trainer]
    path = Path(typed.pop("trainer_config"))
    read = settings_of(prediction.trainer, path, gpus=prediction.gpus, typed=typed)
    is_told = prediction.answer is not None and prediction.length_tokens is None
    if is_told or not (words.words or words.length):
        return {}
    rows = prediction.explained.cell.settings.traits.documents_together
    others: dict[str, Any] = {**read.kept, "sequences_per_micro_batch": rows, **typed}
    far = [api_predict(model, max_length="1m", **shared, **each) for each in (settings, others)]
    return {"read": read, "longest": far[0], "farthest": far[1]}


def _as_saved(arguments: argparse.Namespace, prediction: Prediction) -> Prediction | None:
    """The prediction with weights in bf16, where the trainer leaves them so and nobody named any
    dtype; None: the weights' dtype is known, or frozen.
    """
    settings, is_left = prediction.explained.cell.settings, not arguments.calibrate
    is_left &= TRAINERS[prediction.trainer].loads_as_saved and prediction.method == "formula"
    if not is_left or settings.lora or settings.paged or settings.deepspeed != "none":
        return None
    model, typed = named_model(arguments, [], example=_EXAMPLE)
    if "parameters" in typed:
        return None
    optimizer = "adamw-bf16" if settings.optimizer == "adamw" else settings.optimizer
    typed |= {"optimizer": optimizer, "parameters": "bf16", "micro_batches": 1}
    return api_predict(model, length=arguments.length, **typed_place(arguments), **typed)


def _rentable_kinds(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Kinds of GPUs with a list price, for a command with a length but no GPUs, and none here."""
    if arguments.length is None or {arguments.cluster, arguments.gpu_memory} != {None}:
        return ()
    every = () if probe().gpus else gpu_catalog()  # no usual host: its memory would be unlimited
    return tuple(e.name for e in every if e.hour_dollars and default_host(e.name, 1))


def _compare_gpus(arguments: argparse.Namespace, listed_gpus: Sequence[str]) -> int:
    """Print which of several kinds of GPUs trains a length for the least money."""
    if arguments.length is None:
        problem = f"GPUs of {len(listed_gpus)} kinds are compared at one length"
        raise UsageError(problem, hint="add `--length 32k`, or name one kind")
    alike = ("exact", "timeline", "calibrate", "constants", "rollout")
    for name in (*alike, "tried_to_allocate"):
        if getattr(arguments, name, None):
            problem = "kinds of GPUs are compared by formula"
            raise UsageError(problem, hint=f"leave `{flag_of(name)}` out, or name one kind")
    model, settings = named_model(arguments, [], example=_EXAMPLE)
    place = typed_place(arguments) | {"gpus": listed_gpus, "price": arguments.price}
    place["tokens"] = arguments.tokens
    choice = cheapest_gpus(model, length=arguments.length, **place, **settings)
    notes, best = told_notes(arguments, choice.notes), choice.offers[0]
    if arguments.cluster is None:
        notes.append("no GPU is here: kinds with a list price are compared; `--gpus` names yours")
    code = EXIT_ANSWERED if best.trained else EXIT_ANSWERED_NO
    if arguments.json:
        return console.answer_json(choice, code, noted=notes)
    console.answer_page(in_lines(choice_answer(choice)), choice_table(choice), noted=notes)
    own: tuple[str, ...] = ()
    if best.trained is not None:  # the fastest; a prediction names the simplest first
        cell, refused = best.trained.cell, TRAINERS[choice.trainer].refused(DECLARED)
        degrees = {n: each for n, each in cell.layout.degree_settings.items() if n not in refused}
        own = (*words_of(degrees), *setting_flags(cell.settings, but_not=refused))
    gpus = {"--gpus": f"{best.gpus}x{best.device_name}"}
    words = words_again(arguments, drop=tuple(w for w in own if w.startswith("--")), **gpus)
    console.next_command(shlex.join(("highwater", "predict", model, *words, *own)))
    return code


def _prediction_asked(arguments: argparse.Namespace) -> Prediction:
    model, settings = named_model(arguments, arguments.calibrate, example=_EXAMPLE)
    request_from({"model": model, **settings})  # refuses values by the names of their flags
    alike = ("length", "tokens", "price", "exact", "timeline", "constants", "tried_to_allocate")
    return api_predict(
        model,
        **{name: getattr(arguments, name) for name in alike},
        calibrate_with=arguments.calibrate,
        on_trace=partial(_say_traced, count(1)),
        on_calibrate=lambda trials, traces: console.talk(
            f"calibration: {trials} trials are traced, two at once; traces that are not kept yet: "
            f"{traces}"
        ),
        **typed_place(arguments),
        **settings,
    )


def _say_traced(numbers: Iterator[int], spec: TrialSpec) -> None:
    where = f"{spec.layout.gpus} GPUs{spec.layout.suffix}, " if spec.layout.gpus > 1 else ""
    what = (
        f"{spec.model_name}, {short_settings(spec.settings)}, {where}"
        f"{format_tokens(spec.length_tokens)} tokens"
    )
    console.talk(f"{what}: trace {next(numbers)}, up to some minutes")


def _after_predict(arguments: argparse.Namespace, prediction: Prediction) -> str:
    """The next command: the same with ``--explain``, then a trial or search that measures it."""
    if not arguments.explain and prediction.answer is not None:
        # a timeline is written by now
        return shlex.join((*words_without(arguments.command_line, "--timeline"), "--explain"))
    model, settings = str(typed_values(arguments)["model"]), prediction.explained.cell.settings
    if not TRAINERS[prediction.trainer].is_run and "trainer_config" not in vars(arguments):
        words = words_again(arguments, drop=("--trainer", *map(flag_of, OF_OTHERS)))
        return shlex.join(("highwater", "predict", model, *words))
    foreign = foreign_name(prediction.trainer)
    has_trial = is_tried(prediction.explained.cell, prediction.device_name, foreign)
    has_trial &= prediction.memory_limit.rollout is None  # no trial runs a rollout
    explained, length = prediction.explained, prediction.length_tokens
    if not explained.capacity_tokens or not has_trial:  # other ways, at this length or the nearest
        length = length or explained.capacity_tokens or explained.does_not_fit_tokens
        words = words_again(arguments, drop=_NOT_RECOMMENDED, **{"--length": str(length)})
        return shlex.join(("highwater", "recommend", model, *words))
    if prediction.length_tokens is not None:
        flags = trial_flags(prediction.explained.cell, prediction.length_tokens, foreign)
        return shlex.join(("highwater", "try", model, *flags, *trial_limits(arguments)))
    refused = {"model", *(FOREIGN[foreign].refused(DECLARED) if foreign else ())}
    typed = typed_values(arguments).items()  # `auto` is a search's default, too
    typed = {n: value for n, value in typed if n not in refused and value != "auto"}
    typed |= {"trainer": foreign} if foreign else {}
    typed |= {} if arguments.gpu_memory is None else {"memory": arguments.gpu_memory}
    of_the_mark: dict[str, object] = {}
    if foreign:  # our own search tries these settings anyway
        of_the_mark |= prediction.explained.cell.layout.degree_settings
        on_host = {"offload": settings.offload, "activations": settings.activations}
        on_host = {name: value for name, value in on_host.items() if value not in (False, "gpu")}
        of_the_mark |= {"allocator": settings.allocator, **on_host} if on_host else {}
    of_the_mark = {n: value for n, value in of_the_mark.items() if n not in refused}
    words = ("--gpus", str(prediction.gpus), *words_of(of_the_mark | typed))
    return shlex.join(("highwater", "find", model, *words))


def is_tried(cell: Cell, device_name: str, foreign: ForeignName | None) -> bool:
    """True if a trial of a cell can run on such GPUs: on one machine, and with a foreign trainer
    only if it can be told all settings and needs no command of the user's.
    """
    is_written = True
    if foreign is not None:
        from highwater.trainers.targets import named  # only a foreign trainer needs it

        traits = FOREIGN[foreign]
        is_written = traits.objectives is None or cell.settings.objective in traits.objectives
        is_told = traits.loss == cell.settings.loss and traits.refused(named(cell)) in (
            [],
            ["loss"],
        )
        is_written &= is_told and not traits.is_typed
    return is_written and not cell.layout.is_several_machines and runs_trials(device_name)
