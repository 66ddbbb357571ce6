"""``highwater train``: the settings that were found, on a user's data, to a model that loads."""

import argparse
import json
import shlex
import signal
from pathlib import Path

from highwater.api import training
from highwater.cli import console
from highwater.cli.config import request_of
from highwater.cli.console import exit_code_of, heeding
from highwater.cli.flags import training_request_of
from highwater.cli.progress import training_progress
from highwater.errors import EXIT_ANSWERED, EXIT_TERMINATED
from highwater.nouns.settings import Settings
from highwater.nouns.training import TrainingRequest, TrainingResult
from highwater.pages.training_lines import (
    prediction_lines,
    stopped_sentence,
    training_answer,
    training_table,
)
from highwater.recommendation.training_settings import has_lost_base
from highwater.trials.training_ranks import own_folder

_RESUME_FROM = "--resume-from"


def train(arguments: argparse.Namespace) -> int:
    """Train, or go on with it, and say what it came to. Where its terminal closes it stops in
    order, too: a run takes days, and a connection drops.
    """
    with heeding(signal.SIGHUP):
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    asked = training_request_of(arguments)
    request = request_of(arguments)
    with own_folder(Path(asked.output)):
        prepared = training.prepare_training(request, asked, on_phase=_Phases().hear)
        console.notes(prepared.notes)
        for line in prediction_lines(prepared):
            console.talk(line)
        try:
            with training_progress(prepared.spec, done_steps=prepared.done_steps) as listener:
                result = training.run_training(prepared, on_progress=listener)
        except KeyboardInterrupt as interrupt:
            _say_stopped(arguments, asked, training.stopped_result(prepared))
            return exit_code_of(interrupt)
    if arguments.json:
        console.answer_json(result)
        return EXIT_ANSWERED if result.status == "done" else EXIT_TERMINATED
    if result.status == "stopped":  # another machine was told to
        _say_stopped(arguments, asked, result)
        return EXIT_TERMINATED
    console.answer(training_answer(prepared.spec, result))
    console.answer("")
    console.answer_table(training_table(result))
    if not has_lost_base(prepared.spec.trial):
        console.next_command(_next(result.model_directory or "", prepared.spec.trial.settings))
    return EXIT_ANSWERED


def _say_stopped(
    arguments: argparse.Namespace, asked: TrainingRequest, result: TrainingResult | None
) -> None:
    """What is kept, and what the same command does; None: nothing is kept."""
    console.talk(stopped_sentence(result))
    then = "goes on where this stopped"
    if result is None:
        then = "begins anew"
    elif result.status == "done":
        then = "says what it came to"
    console.next_command(f"{_same_command(arguments, asked, result)}  ({then})")


class _Phases:
    """Says what is done to the data, each phase once."""

    def __init__(self) -> None:
        self._last = ""

    def hear(self, phase: str) -> None:
        if phase != self._last:
            console.talk(phase)
        self._last = phase


def _same_command(
    arguments: argparse.Namespace, asked: TrainingRequest, stopped: TrainingResult | None
) -> str:
    """What was typed, but for the checkpoint that it went back to: the run is past that now."""
    words = list(arguments.command_line)
    if asked.resume_from is not None and stopped is not None:
        at = next(i for i, word in enumerate(words) if word.partition("=")[0] == _RESUME_FROM)
        del words[at : at + (1 if "=" in words[at] else 2)]
    return shlex.join(words)


def _next(directory: str, settings: Settings) -> str:
    """How what was trained is opened."""
    is_adapter = settings.lora is not None and not settings.lora_merged
    package, auto = ("peft", "AutoPeftModel") if is_adapter else ("transformers", "AutoModel")
    kind = f"{auto}For{'SequenceClassification' if settings.traits.gives_scalars else 'CausalLM'}"
    # In double quotes, so that a shell takes all of it in single ones.
    loaded = f"M.from_pretrained({json.dumps(directory, ensure_ascii=False)})"
    return shlex.join(("python", "-c", f"from {package} import {kind} as M; {loaded}"))
