"""Studies and single trials: where a search, a runner and a journal are put together."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from highwater.errors import UsageError
from highwater.memory.question import placed
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import Plan, alone, plan, plan_trial
from highwater.nouns.request import Request, request_from
from highwater.nouns.study import Question, Study
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import TrialResult, TrialSpec
from highwater.search.budget import Budget, time_notes
from highwater.search.cell_outcomes import SearchEvent
from highwater.search.predicted_study import cells_of_study, completed_study, gone_on
from highwater.search.scheduler import BudgetSpentError, recorded_search
from highwater.search.start_length import check_prediction, expectation, predicted_start
from highwater.search.tried_settings import dry_run_law, searched
from highwater.store.directory import study_path
from highwater.store.journal import open_journal, read_study
from highwater.trials import ray_runner
from highwater.trials.diagnosis import diagnose, undiagnosed
from highwater.trials.foreign_trial import check_foreign, launcher_in
from highwater.trials.local import LocalRunner, host_bytes
from highwater.trials.nodes import across_nodes
from highwater.trials.probe import environment, probe
from highwater.trials.ray_runner import RayRunner
from highwater.trials.readiness import check_directories, check_machine, check_request
from highwater.trials.simulated import SimulatedRunner
from highwater.trials.trial_process import LogLayout
from highwater.units import GIB, format_bytes, format_seconds, parse_tokens

Listener = Callable[[SearchEvent], None]


def find(model: str, *, on_event: Listener | None = None, **settings: Any) -> Study:
    """Search the longest context that ``model`` trains with, for each layout and rung: a study with
    a pair of real trials each. ``settings`` are the fields of ``Request``: ``gpus=[1, 2]``,
    ``memory="80GiB"``, ``loss="chunked"``, ``dry_run=True``. ``on_event`` is called when a trial
    starts or ends. Blocks until the trials have ended, or their ``budget`` is spent; called again,
    it resumes. A complete ``study`` is returned as it is on a machine without GPUs. After the
    answer the first out of memory is repeated once with its memory recorded, and a note of the
    study names the live tensors; ``no_diagnose=True`` leaves that out. Raises HighwaterError for
    invalid settings, before anything starts.
    """
    request = request_from({"model": model, **settings}, keywords=True)
    known = completed_study(request)
    if known is not None:
        return known
    study = answer(request, prepare(request), on_event=on_event)
    trial = undiagnosed(request, study) if study.complete else None
    if trial is None:
        return study
    note = diagnose(request, trial).note
    return study.replace(notes=(*study.notes, note))


def run_trial(model: str, length: int | str, **settings: Any) -> TrialResult:
    """Run one real trial of ``length`` tokens; returns its outcome and measurements. ``settings``
    as for ``find``. Raises HighwaterError for invalid settings, before anything starts.
    """
    request = request_from({"model": model, **settings}, keywords=True)
    return answer_trial(request, prepare_trial(request, length))


def open_study(path: str | Path) -> Study:
    """Read a study's file in its current state; StudyError if it is missing or damaged."""
    return read_study(Path(path))


def prepare(request: Request) -> Plan:
    """Plan a search and check what it needs before any trial. Raises HighwaterError."""
    machine, of_machine = where_trials_run(request)
    check_request(request, machine, steps=request.steps)
    machines = across_nodes(request)
    of_machine = (*(machines.notes if machines else ()), *of_machine)
    request, of_study = gone_on(request)
    planned = searched(request, machine, cells_of_study(request))
    question = planned.question
    unforeseen = check_prediction(request, question)
    check_machine(
        request,
        machine,
        question.cells[0].settings,
        question.device,
        gpus=max(cell.layout.machine_gpus for cell in question.cells),
    )
    check_directories(request, question.cells[0].settings, question.device)
    shortest = question.grid.start_tokens
    seen = check_foreign(question.trial(cell, shortest) for cell in question.cells)
    of_time = () if question.simulated else time_notes(question, planned.timeout_s)
    notes = (*of_machine, *of_study, *planned.notes, *unforeseen, *seen, *of_time)
    return planned.replace(notes=notes)


def prepare_trial(request: Request, length: int | str) -> TrialSpec:
    """The specification of one trial of ``length`` tokens, checked as ``prepare`` checks."""
    machine, _ = where_trials_run(request)
    check_request(request, machine, steps=request.steps)
    spec = plan_trial(request, machine, parse_tokens(str(length)))
    if request.activations == "auto":
        cell = placed(plan(alone(request, spec.length_tokens), machine).question, machine)
        spec = spec.replace(settings=cell.settings)
    check_machine(request, machine, spec.settings, spec.device, gpus=spec.layout.gpus)
    check_directories(request, spec.settings, spec.device)
    most_bytes, needed_bytes = spec.host_memory_bytes, host_bytes(spec)
    if most_bytes is not None and needed_bytes > most_bytes:
        raise UsageError(
            f"the trial takes {format_bytes(needed_bytes)} of host memory, and "
            f"{format_bytes(most_bytes)} is named",
            hint=f"use `--host-memory {-(-needed_bytes // GIB)}GiB`, or a shorter `--length`",
        )
    check_foreign([spec])
    return spec


def answer(
    request: Request,
    planned: Plan,
    *,
    on_event: Listener | None = None,
    log_layout: LogLayout = "rung",
    command: Sequence[str] = (),
) -> Study:
    """Answer the question: run the trials that its study lacks, and return the study.

    ``command`` is the user's command line, kept in the study for resuming it. Every finished trial
    is on disk when this raises, KeyboardInterrupt included. If the plan's budget ends the search,
    the study is incomplete, and a note says so.
    """
    path = study_file(request, planned.question)
    try:
        runner = _runner(request, log_layout, planned.question)
        asked = partial(_search, request, planned, runner, on_event=on_event, command=command)
        if path is not None:
            return asked(path)
        # a dry run leaves nothing behind
        with tempfile.TemporaryDirectory(prefix="highwater-") as folder:
            return asked(Path(folder, "study.jsonl")).replace(path=None)
    finally:
        ray_runner.leave()


def answer_trial(request: Request, spec: TrialSpec) -> TrialResult:
    """Run one prepared trial; it is recorded in no study."""
    question = plan(alone(request, spec.length_tokens), where_trials_run(request)[0]).question
    try:
        return _runner(request, "rung", question).run(spec)
    finally:
        ray_runner.leave()


def study_file(request: Request, question: Question) -> Path | None:
    """File of a question's study; None for a dry run that names no file."""
    if request.study is not None:
        return Path(request.study)
    return None if request.dry_run else study_path(Path(request.log_dir), question)


def _search(
    request: Request,
    planned: Plan,
    runner: LocalRunner | RayRunner | SimulatedRunner,
    path: Path,
    *,
    on_event: Listener | None,
    command: Sequence[str],
) -> Study:
    question = planned.question
    # A dry run depends on no machine.
    whole = request.replace(host_memory=None)  # the machine as it is
    where = None if question.simulated else environment(where_trials_run(whole)[0])
    opened = partial(
        open_journal, command=command, environment=where, retry_crashed=request.retry_crashed
    )
    budget, spent = _budget(request, planned, runner), ()
    with (
        predicted_start(request, question) as expected,
        opened(path, question) as journal,
        closing(runner),
    ):
        events = recorded_search(
            question,
            budget or runner,
            journal,
            expectation=lambda cell: expectation(request, question, cell, expected(cell)),
            expected=expected,
            may_start=(lambda _: True) if budget is None else budget.allows,
            order=None if budget is None else budget.order,
            timeout_s=None if question.simulated else planned.timeout_s,
            begins_shortest=planned.begins_shortest,
        )
        try:
            for event in events:
                if on_event is not None:
                    on_event(event)
        except BudgetSpentError:
            spent = (_spent_note(planned, journal.snapshot()),)
        study = journal.snapshot()
    return study.replace(notes=(*planned.notes, *study.notes, *spent))


def _budget(
    request: Request, planned: Plan, runner: LocalRunner | RayRunner | SimulatedRunner
) -> Budget | None:
    """The time budget of trials on this machine; None without a limit, and for a dry run."""
    if planned.budget_s is None or isinstance(runner, SimulatedRunner):
        return None
    return Budget(
        planned.question,
        runner,
        planned.budget_s,
        timeout_s=planned.timeout_s,
        same_timeout=request.timeout is not None,
    )


def _spent_note(planned: Plan, study: Study) -> str:
    """A note that names the cells left without an answer when the budget was spent."""
    question = planned.question
    answered = {answer.cell for answer in study.answers_within(question.timeout_s)}
    left = [cell for cell in question.cells if cell not in answered]
    names = "; ".join(cell.label_on(question.device) for cell in left)
    return (
        f"the budget of {format_seconds(planned.budget_s)} is spent, {len(left)} of "
        f"{len(question.cells)} searches are not finished: {names}; finished trials are kept"
    )


def where_trials_run(request: Request) -> tuple[Machine, tuple[str, ...]]:
    """The machine that trials run on, this one or a Ray cluster's, and notes on it."""
    machine, notes = probe(), ()
    if request.on_ray:
        chosen = ray_runner.nodes_of(request)
        machine, notes = chosen.machine, chosen.notes
    return machine.with_memory(request.host_memory_bytes or sys.maxsize), notes


def _runner(
    request: Request, log_layout: LogLayout, question: Question
) -> LocalRunner | RayRunner | SimulatedRunner:
    if request.dry_run:
        is_roomy = request.headroom is None
        law = dry_run_law(question, where_trials_run(request)[0], is_roomy=is_roomy)
        return SimulatedRunner(law, device_total_bytes=question.device_total_bytes)
    if request.on_ray:
        return ray_runner.runner_of(request, log_layout)
    at_once = request.max_concurrent_trials if request.nodes == 1 else 1
    if at_once is None and request.trainer != OURS:
        at_once = 1  # launchers meet on a port that is the same for all, unless they are told one
    return LocalRunner(
        launcher_in(request)(log_directory=Path(request.log_dir), log_layout=log_layout),
        most_trials=at_once,
    )
