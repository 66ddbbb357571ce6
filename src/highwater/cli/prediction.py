"""``highwater predict``: the longest context of every rung on GPUs that need not be here, or how a prediction scores."""

import argparse
import shlex
from collections.abc import Iterator
from functools import partial
from itertools import count

from highwater import api
from highwater.cli import console
from highwater.cli.flags import PREDICT_FLAGS, RECOMMEND_FLAGS, typed_values, words_of
from highwater.cli.recommendation import words_again
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, UsageError
from highwater.prediction.capacity import Prediction
from highwater.prediction.score import Score
from highwater.report.prediction import prediction_table, score_table, term_table
from highwater.spec.request import request_from, trial_flags
from highwater.spec.trial import TrialSpec
from highwater.units import format_tokens

_NOT_RECOMMENDED = tuple(f"--{flag.name}" for flag in PREDICT_FLAGS if flag not in RECOMMEND_FLAGS)
"""Flags that a prediction has and a recommendation has not."""


def predict(arguments: argparse.Namespace) -> int:
    """Print the prediction, or the score against a table."""
    if arguments.against is not None:
        return _against(arguments)
    if arguments.model is None and len(arguments.calibrate) > 1:
        arguments.model = arguments.calibrate.pop()  # `--calibrate STUDY MODEL`: argparse gives both to the flag
    settings = typed_values(arguments)
    model = settings.pop("model", None)
    if model is None:
        example = "highwater predict Qwen3-8B --gpus 4xA100-80GB"
        raise UsageError("no model is named", hint=f"name a directory or a catalog model: `{example}`")
    request_from({"model": model, **settings})  # raises for a value that cannot be, in the words of flags
    prediction = api.predict(
        str(model),
        gpus=arguments.cluster,
        length=arguments.length,
        trainer=arguments.trainer,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        reserved=arguments.reserved,
        state_bytes_per_param=arguments.state_bytes_per_param,
        exact=arguments.exact,
        timeline=arguments.timeline,
        calibrate_with=arguments.calibrate,
        constants=arguments.constants,
        on_trace=partial(_say_traced, count(1)),
        on_calibrate=_say_calibrated,
        **settings,
    )
    console.notes(prediction.notes)
    if arguments.json:
        console.answer_json(prediction)
    else:
        console.answer_table(prediction_table(prediction))
        _explain(arguments, prediction)
        console.next_command(_after_predict(arguments, prediction))
    return EXIT_ANSWERED if any(cell.capacity_tokens for cell in prediction.cells) else EXIT_ANSWERED_NO


def _against(arguments: argparse.Namespace) -> int:
    if arguments.exact or arguments.timeline is not None:
        raise UsageError("a table is not compared with traces yet", hint="leave `--exact` and `--timeline` out")
    if arguments.constants is not None:
        raise UsageError("a table is compared with predictions by the constants that come along", hint="leave `--constants` out")
    if arguments.calibrate:
        raise UsageError("a table is compared with predictions, not with their intervals", hint="leave `--calibrate` out")
    if arguments.model is not None or arguments.cluster is not None or arguments.length is not None:
        raise UsageError("the table of `--against` names its models, GPUs and lengths", hint="leave those on the command line out")
    _refuse_beside_a_table(arguments)
    result: Score = api.predict_against(
        arguments.against,
        trainer=arguments.trainer,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        reserved=arguments.reserved,
        state_bytes_per_param=arguments.state_bytes_per_param,
    )
    if arguments.json:
        console.answer_json(result)
    else:
        console.answer_table(score_table(result, name=f"{arguments.against}, trainer {arguments.trainer}"))
        console.next_command(shlex.join((*arguments.command_line, "--json")))
    return EXIT_ANSWERED


def _refuse_beside_a_table(arguments: argparse.Namespace) -> None:
    """Raise UsageError for the first setting that was typed: the rows have theirs, on the published grid."""
    if arguments.explain:
        raise UsageError("a table has no one cell to explain", hint="leave `--explain` out")
    for name in typed_values(arguments):
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"the table of `--against` names its own settings, and {flag} is one", hint=f"leave `{flag}` out")


def _say_traced(numbers: Iterator[int], spec: TrialSpec) -> None:
    where = f"{spec.layout.gpus} GPUs{spec.layout.suffix}, " if spec.layout.gpus > 1 else ""
    what = f"{spec.model_name}, {spec.settings.label}, {where}{format_tokens(spec.length_tokens)} tokens"
    console.talk(f"{what}: trace {next(numbers)}, up to some minutes")


def _say_calibrated(trials: int, traces: int) -> None:
    console.talk(f"calibration: {trials} trials are traced, two at once; traces that are not kept yet: {traces}")


def _explain(arguments: argparse.Namespace, prediction: Prediction) -> None:
    if arguments.explain:
        console.answer("")
        console.answer_table(term_table(prediction.explained))


def _after_predict(arguments: argparse.Namespace, prediction: Prediction) -> str:
    """What explains it, and then what measures it, with the settings that were typed; another trainer is not ours to try."""
    if not arguments.explain:
        words = list(arguments.command_line)
        if arguments.timeline is not None:  # which is written
            at = next(index for index, word in enumerate(words) if word.startswith("--timeline"))
            del words[at : at + (1 if "=" in words[at] else 2)]
        return shlex.join((*words, "--explain"))
    model, settings = str(typed_values(arguments)["model"]), prediction.explained.cell.settings
    if prediction.trainer != "highwater":
        return shlex.join(("highwater", "predict", model, *words_again(arguments, drop=("--trainer",))))
    if not prediction.explained.capacity_tokens:
        return _remedies(arguments, prediction)
    if prediction.length_tokens is not None:
        return shlex.join(("highwater", "try", model, *trial_flags(prediction.explained.cell, prediction.length_tokens)))
    typed = {name: value for name, value in typed_values(arguments).items() if name != "model"}
    of_the_mark: dict[str, object] = {"ulysses": [str(prediction.explained.cell.layout.ulysses_degree)]}
    if settings.offload:  # which a search looks for only where it is asked to
        of_the_mark |= {"allocator": settings.allocator, "offload": True}
    return shlex.join(("highwater", "find", model, "--gpus", str(prediction.gpus), *words_of(of_the_mark | typed)))


def _remedies(arguments: argparse.Namespace, prediction: Prediction) -> str:
    """Where nothing fits: what would, at that length, or at the shortest that was asked about."""
    length = prediction.length_tokens or prediction.explained.does_not_fit_tokens
    words = words_again(arguments, drop=_NOT_RECOMMENDED, **{"--length": str(length)})
    return shlex.join(("highwater", "recommend", str(typed_values(arguments)["model"]), *words))
