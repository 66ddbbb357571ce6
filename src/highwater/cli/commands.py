"""The commands: each prints its answer and the next command, and returns the exit code."""

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from highwater.api import search
from highwater.cli import console
from highwater.cli.console import exit_code_of
from highwater.cli.flags import request_of
from highwater.cli.progress import shown
from highwater.errors import (
    EXIT_ANSWERED,
    EXIT_ANSWERED_NO,
    EXIT_INCONCLUSIVE,
    StudyError,
    UsageError,
)
from highwater.model.model import load_model
from highwater.nouns.environment import ignored_options
from highwater.nouns.hardware import CPU_SEARCH
from highwater.nouns.plan import Plan
from highwater.nouns.plan_notes import (
    ON_THE_CPU_NOTE,
    foreign_notes,
    memory_notes,
    placement_notes,
    step_notes,
)
from highwater.nouns.request import Request
from highwater.nouns.settings import short_settings
from highwater.nouns.study import Cell, CellAnswer, Question, Study
from highwater.pages.study_answer import (
    answer_table,
    outlook_lines,
    published_line,
    published_notes,
    published_tables,
    published_text,
    study_answer,
    trial_answer,
    trial_table,
)
from highwater.pages.study_commands import resumed
from highwater.search.predicted_study import completed_study
from highwater.store.directory import newest_studies
from highwater.store.journal import read_study
from highwater.store.logs import snapshot_lines, study_snapshot_lines
from highwater.trials.diagnosis import diagnose, undiagnosed
from highwater.trials.foreign_trial import check_foreign
from highwater.units import MIB, format_tokens


def find(arguments: argparse.Namespace) -> int:
    """``highwater find``: search the longest context of every cell."""
    request = request_of(arguments)
    if arguments.print_config or arguments.print_sbatch:
        from highwater.cli.config import sbatch_script, to_yaml

        load_model(request.model)  # raises without the model: what is printed has to work
        in_a_job = not arguments.print_config
        text = sbatch_script(request, arguments.typed) if in_a_job else to_yaml(request)
        console.answer_exactly(text)
        return EXIT_ANSWERED
    known = completed_study(request)
    if known is not None:
        return _say_found(arguments, known, known.notes)
    planned = search.prepare(request)
    # notes come before trials start; a dry run's come after the answer that they are about
    first = [each for each in planned.notes if not request.dry_run or each == ON_THE_CPU_NOTE]
    console.notes((*ignored_options(os.environ, planned.question.device), *first))
    is_resumed = _note_resumed(request, planned.question)
    for line in outlook_lines(planned, is_resumed=is_resumed):
        console.talk(line)
    typed = with_memory(arguments.command_line, request, planned.question.memory_budget_bytes)
    try:
        with shown(planned) as listener:
            study = search.answer(request, planned, on_event=listener, command=typed)
    except KeyboardInterrupt as interrupt:
        say_interrupted(search.study_file(request, planned.question))
        return exit_code_of(interrupt)
    noted = [each for each in (*planned.notes, *study.notes) if each not in first]
    if request.memory_profiler is not None:
        console.notes(tuple(study_snapshot_lines(study, request.memory_profiler)))
    return _say_found(arguments, study, tuple(dict.fromkeys(noted)), request, planned)


def try_(arguments: argparse.Namespace) -> int:
    """``highwater try``: run one trial, and print its outcome."""
    request = request_of(arguments)
    spec = search.prepare_trial(request, arguments.length)
    if request.device is None and spec.device == "cpu":
        console.notes([ON_THE_CPU_NOTE])
    console.notes(search.where_trials_run(request)[1])
    of_memory = memory_notes(request, spec.device, spec.memory_budget_bytes)
    if spec.foreign is not None:
        of_trial = (*foreign_notes(request, spec.foreign, spec.device), *check_foreign([spec]))
    else:
        of_step = load_model(request.model), request, spec.settings, spec.device, spec.length_tokens
        of_trial = (*placement_notes(request, spec.settings), *step_notes(*of_step))
    console.notes((*ignored_options(os.environ, spec.device), *of_memory, *of_trial))
    console.talk(
        f"{spec.model_name}: {format_tokens(spec.length_tokens)} tokens, "
        f"{short_settings(spec.settings)}, {spec.layout.gpus} x {spec.device}"
    )
    try:
        result = search.answer_trial(request, spec)
    except KeyboardInterrupt as interrupt:
        console.talk("interrupted: nothing of the trial runs any more")
        return exit_code_of(interrupt)
    if request.memory_profiler is not None:
        console.notes(tuple(snapshot_lines(spec, result, request.memory_profiler)))
    code = EXIT_ANSWERED_NO if result.outcome.is_memory else EXIT_INCONCLUSIVE
    code = EXIT_ANSWERED if result.outcome.is_fit else code
    if arguments.json:
        return console.answer_json({"schema_version": 1, "spec": spec, "result": result}, code)
    console.answer_page(trial_answer(spec, result), trial_table(spec, result))
    typed = with_memory(arguments.command_line, request, spec.memory_budget_bytes)
    console.next_command(_after_try(typed))
    return code


def show(arguments: argparse.Namespace) -> int:
    """``highwater show``: studies as a table, as published, as their final lines, or as JSON."""
    studies = [read_study(Path(name)) for name in arguments.studies] or [
        newest_study(Path(arguments.log_dir))
    ]
    for study in studies:
        console.notes(study.notes)
    if arguments.as_ == "json":
        if len(studies) > 1:
            raise UsageError(
                f"{len(studies)} studies are no one document",
                hint=f"`highwater show {shlex.quote(studies[0].path or '')} --as json`",
            )
        return console.answer_json(studies[0])
    if arguments.as_ == "table":
        for study in studies:
            console.answer_page(study_answer(study), answer_table(study))
    elif arguments.as_ == "published":
        for number, table in enumerate(published_tables(studies)):
            if number:
                console.answer("")
            console.answer_table(table, drawn=published_text)
    is_read = arguments.as_ != "table"  # programs read these forms
    for study in studies if is_read else ():
        for cell in study.question.cells:
            answer = study.answer_of(cell)
            if arguments.as_ == "lines":
                say_line(study.question, cell, answer)
            elif answer is None or answer.capacity_tokens is None:
                console.notes(published_notes(study.question, cell, answer))
    other = "table" if arguments.as_ == "published" else "published"
    after = f"highwater show {shlex.quote(studies[0].path or '')} --as {other}"
    if not studies[0].complete and studies[0].command:
        after = f"{shlex.join(resumed(studies[0]))}  (answers the rest)"
    console.next_command(after)
    is_open = any(exit_code(study) == EXIT_INCONCLUSIVE for study in studies)
    return EXIT_INCONCLUSIVE if is_read and is_open else EXIT_ANSWERED


def say_line(question: Question, cell: Cell, answer: CellAnswer | None) -> None:
    """Print notes on a cell, and the published final line of its answer, if there is one."""
    line = published_line(question, cell, answer)
    console.notes(published_notes(question, cell, answer))
    if line is not None:
        console.answer(line)


def schema(_: argparse.Namespace) -> int:
    """``highwater schema``: the JSON Schema of a configuration file."""
    from highwater.cli.config import config_schema

    return console.answer_json(config_schema())


def exit_code(study: Study, *, has_budget: bool = False) -> int:
    """Exit code of a study: 0 if every cell has an answer and a length fits, 1 if no length fits, 4
    if a cell has no answer. ``has_budget``, which may end before all answers: 0 if any trial fits.
    """
    answers, results = study.answers, (trial.result for trial in study.trials)
    if has_budget and any(each and study.question.counts_as_fit(each) for each in results):
        return EXIT_ANSWERED
    is_open = any(answer.reach_tokens is None or answer.is_undecided for answer in answers)
    if is_open or not study.complete:
        return EXIT_INCONCLUSIVE
    return EXIT_ANSWERED if any(answer.reach_tokens for answer in answers) else EXIT_ANSWERED_NO


def say_interrupted(path: Path | None) -> None:
    """After Ctrl-C, print the trials that the study keeps, and the command to resume it."""
    study = None
    with suppress(StudyError):
        study = None if path is None else read_study(path)
    if study is None:
        console.talk("interrupted: no trial had finished")
        return
    finished = f"the study keeps every finished trial, {study.finished_trials} so far"
    console.talk(f"interrupted: {finished}: {path}")
    again = shlex.join(study.command) or "the same command"
    console.next_command(f"{again}  (goes on where this stopped)")


def _say_found(
    arguments: argparse.Namespace,
    study: Study,
    noted: Sequence[str],
    request: Request | None = None,
    planned: Plan | None = None,
) -> int:
    """Print the answer, as JSON or as a sentence, a table and the next command; the exit code."""
    if arguments.json:
        console.answer_json(study)
        console.notes(noted)
    else:
        console.answer_page(study_answer(study), answer_table(study), noted=noted)
    if request is not None and study.complete:
        _diagnose(request, study)
    if not arguments.json:
        after = f"highwater show {shlex.quote(study.path or '')} --as published"
        if study.path is None:
            after = shlex.join(word for word in study.command if word != "--dry-run")
        elif not study.complete:
            after = f"{shlex.join(arguments.command_line)}  (goes on where the budget ended)"
        console.next_command(after)
    return exit_code(study, has_budget=planned is not None and planned.budget_s is not None)


def _diagnose(request: Request, study: Study) -> None:
    """Repeat the first trial that ran out of memory, with a snapshot; print its live tensors."""
    trial = undiagnosed(request, study)
    if trial is None:
        return
    console.talk(
        f"recording what was alive when {format_tokens(trial.spec.length_tokens)} tokens ran out "
        "of memory: one more launch, in no study; Ctrl-C ends it, `--no-diagnose` leaves it out"
    )
    try:
        console.notes([diagnose(request, trial).note])
    except KeyboardInterrupt:
        console.talk("interrupted: the answer stands, nothing of the launch runs any more")


def _note_resumed(request: Request, question: Question) -> bool:
    """Print a note if the request's study file has finished trials of the question; True if so."""
    path = search.study_file(request, question)
    # os.path.exists raises nothing for a name too long, or a folder without rights
    if path is None or not os.path.exists(path):  # noqa: PTH110
        return False
    with suppress(StudyError):  # a file that cannot be read: the search reports it
        study = read_study(path)
        if study.question.key == question.key and study.finished_trials:
            now_s = question.timeout_s or 0.0
            late = sum(trial.ran_out_of_less_than(now_s) for trial in study.trials)
            again = f"; of these {late} ran out of less time than there is now, and may be"
            said = f"finished trials are not run again, {study.finished_trials} so far"
            console.notes([f"resuming {path}: {said}{again if late else ''}"])
            return True
    return False


def with_memory(words: Sequence[str], request: Request, budget_bytes: int | None) -> list[str]:
    """Add ``--memory`` if the user did not type it, so that the words repeat the same question."""
    if request.memory is not None or budget_bytes is None:
        return list(words)
    return [*words, "--memory", f"{budget_bytes // MIB}MiB"]


def _after_try(command: Sequence[str]) -> str:
    """A ``find`` command with the flags of a trial; after a memory-only trial with its proof."""
    words = iter(command)
    kept: list[str] = []
    for word in words:
        name, is_joined, _ = word.partition("=")
        if name in ("--length", "--attention-depth"):
            if not is_joined:
                next(words)
            kept += ["--proof", "memory"] if name == "--attention-depth" else []
        elif word != "--dry-run":
            kept.append("find" if word == "try" and len(kept) == 1 else word)
    return shlex.join(kept)


def newest_study(log_directory: Path) -> Study:
    """The newest study that can be read, with notes on the others; StudyError if there is none."""
    paths = newest_studies(log_directory)
    for path in paths:
        try:
            return read_study(path)
        except StudyError as error:
            console.notes([f"not shown: {error.problem}"])
    raise StudyError(
        f"no study under {log_directory} can be read",
        hint=f"restore one from a copy; `{CPU_SEARCH}` makes another",
    )
