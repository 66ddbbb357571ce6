"""``highwater train``: train on a user's data with a search's settings; saves a model."""

import argparse
import json
import shlex
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from highwater.api import training
from highwater.api.training import PreparedTraining
from highwater.cli import console
from highwater.cli.console import exit_code_of, heeding
from highwater.cli.flags import request_of, training_request_of, words_without
from highwater.cli.progress import training_progress
from highwater.errors import EXIT_ANSWERED, EXIT_TERMINATED
from highwater.model.held_bytes import trained_parameters
from highwater.model.model import load_model
from highwater.nouns.corpus import Corpus
from highwater.nouns.settings import Settings, short_settings
from highwater.nouns.study import counted_ranks
from highwater.nouns.training import TrainingRequest, TrainingResult, TrainingSpec
from highwater.pages.table import TextTable
from highwater.pages.text import plain
from highwater.recommendation.training_settings import has_lost_base
from highwater.trials.training_ranks import own_folder
from highwater.units import counted, format_bytes, format_seconds, format_tokens


def train(arguments: argparse.Namespace) -> int:
    """Train, or resume, and print the result; a terminal that closes stops it in order."""
    with heeding(signal.SIGHUP):
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    asked = training_request_of(arguments)
    request = request_of(arguments)
    with own_folder(Path(asked.output)):
        prepared = training.prepare_training(request, asked, on_phase=cache(console.talk))
        console.notes(prepared.notes)
        for line in prediction_lines(prepared):
            console.talk(line)
        try:
            with training_progress(prepared.spec, done_steps=prepared.done_steps) as listener:
                result = training.run_training(prepared, on_progress=listener)
        except KeyboardInterrupt as interrupt:
            _say_stopped(arguments, asked, training.result_so_far(prepared))
            return exit_code_of(interrupt)
    code = EXIT_ANSWERED if result.status == "done" else EXIT_TERMINATED
    if arguments.json:
        return console.answer_json(result, code)
    if result.status == "stopped":  # another machine was told to stop
        _say_stopped(arguments, asked, result)
        return code
    console.answer_page(training_answer(prepared.spec, result), training_table(result))
    if not has_lost_base(prepared.spec.trial):
        console.next_command(_next(result.model_directory or "", prepared.spec.trial.settings))
    return code


def _say_stopped(
    arguments: argparse.Namespace, asked: TrainingRequest, result: TrainingResult | None
) -> None:
    """Print what is kept, and what the same command would do next. ``asked``: the run that was
    stopped; ``result`` None: nothing is kept.
    """
    console.talk(stopped_sentence(result))
    then = "goes on where this stopped"
    if result is None:
        then = "begins anew"
    elif result.status == "done":
        then = "says what it came to"
    words: Sequence[str] = arguments.command_line
    if asked.resume_from is not None and result is not None:  # the run is past that checkpoint
        words = words_without(words, "--resume-from")
    console.next_command(f"{shlex.join(words)}  ({then})")


def _next(directory: str, settings: Settings) -> str:
    """A command that loads the trained model."""
    is_adapter = settings.lora is not None and not settings.lora_merged
    package, auto = ("peft", "AutoPeftModel") if is_adapter else ("transformers", "AutoModel")
    kind = f"{auto}For{'SequenceClassification' if settings.traits.gives_scalars else 'CausalLM'}"
    # In double quotes, so that a shell takes all of it in single ones.
    loaded = f"M.from_pretrained({json.dumps(directory, ensure_ascii=False)})"
    return shlex.join(("python", "-c", f"from {package} import {kind} as M; {loaded}"))


def prediction_lines(prepared: PreparedTraining) -> list[str]:
    """Lines on the model, its training, and the predicted memory and time."""
    spec = prepared.spec
    trial, corpus = spec.trial, spec.corpus
    gpus = "GPU" if trial.device == "cuda" else "process"
    length, sequences = format_tokens(trial.length_tokens), trial.sequences
    row = length if sequences == 1 else f"{sequences} x {length}"
    # Rows are a little shorter than the length: this is the most that documents come up.
    tokens = spec.steps * spec.micro_batches * trial.length_tokens * sequences
    epochs = f"up to {tokens / max(1, corpus.tokens):.1f} epochs"
    # The line says how many rows a step has: no need to name one micro-batch.
    settings = trial.settings.replace(accumulates=True)
    shape = load_model(trial.model_directory).shape
    trained = trained_parameters(shape, trial.settings)
    lines = [
        f"{trial.model_name}: {counted(spec.steps, 'step')} of "
        f"{counted(spec.micro_batches, 'row')} of {row} tokens, {short_settings(settings)}, "
        f"{counted_ranks(trial.layout.gpus, trial.device)}{trial.layout.suffix}",
        f"learning rate {trial.hyperparameters.learning_rate:g}, "
        f"{trained:,} of {shape.parameters:,} parameters trained",
        f"data: {counted(corpus.documents, 'document')}, {corpus.tokens:,} tokens, longest "
        f"{corpus.longest_tokens:,}; {epochs}",
    ]
    lines += _left_out(corpus)
    used_bytes = prepared.predicted.device_used_bytes + prepared.rows_bytes
    lines.append(
        f"predicted: {format_bytes(used_bytes)} of a {gpus}'s memory"
        + (f", {format_seconds(prepared.expected_s)}" if prepared.expected_s else "")
    )
    if prepared.done_steps:
        lines.append(f"goes on after step {prepared.done_steps}")
    return lines


def _left_out(corpus: Corpus) -> list[str]:
    """A note on documents that were cut, split or dropped; empty if none were."""
    said: list[str] = []
    if corpus.truncated:
        said.append(
            f"{counted(corpus.truncated, 'document')} cut at the length, "
            f"{corpus.truncated_tokens:,} tokens left out"
        )
    if corpus.split:
        said.append(f"{counted(corpus.split, 'document')} trained in pieces")
    if corpus.empty:
        said.append(f"{counted(corpus.empty, 'record')} without a token to train on left out")
    return [f"note: {'; '.join(said)}"] if said else []


def training_answer(spec: TrainingSpec, result: TrainingResult) -> str:
    """The answer's first line: the trained model, its loss, and its folder."""
    settings = spec.trial.settings
    kind = "adapter" if settings.lora and not settings.lora_merged else "model"
    return plain(
        f"Trained {spec.trial.model_name} for {counted(result.step, 'step')}: the loss went from "
        f"{result.losses[0]:.3f} to {result.losses[-1]:.3f}. The {kind} is in "
        f"{result.model_directory}."
    )


def training_table(result: TrainingResult) -> TextTable:
    """Figures of a run, a row each."""
    evaluations, best, peak = result.evaluations, result.best_step, result.peak_bytes
    speed = result.tokens_per_s
    rows = {
        "held-out loss": _held_out(evaluations) if evaluations else None,
        "best held-out loss": f"{dict(evaluations)[best]:.3f}, after step {best}"
        if evaluations and best is not None
        else None,
        "tokens per second": None if speed is None else f"{speed:,.0f}",
        "most memory in use": None if peak is None else format_bytes(peak),
        "folder": plain(result.output_directory),
    }
    told = tuple((name, value) for name, value in rows.items() if value is not None)
    title = f"{counted(result.step, 'step')}: measured"
    return TextTable(title=title, columns=(), rows=told, left_columns=2)


def _held_out(evaluations: Sequence[tuple[int, float]]) -> str:
    """The first and the last held-out loss; a run that was resumed may have none at its start."""
    (first_step, first), (last_step, last) = evaluations[0], evaluations[-1]
    if first_step == last_step:
        return f"{first:.3f} after step {first_step}"
    if first_step == 0:
        return f"{first:.3f} before, {last:.3f} after"
    return f"{first:.3f} after step {first_step}, {last:.3f} after step {last_step}"


def stopped_sentence(result: TrainingResult | None) -> str:
    """Sentence on what is kept of a training that was stopped."""
    if result is None:
        return "stopped: no step was saved"
    if result.status == "done":
        return f"stopped after the last step: the model is in {result.model_directory}"
    return (
        f"stopped after step {result.step} of {result.steps}: its checkpoint is in "
        f"{result.output_directory}"
    )
