"""The tables and lines of a study's report, before anybody decides how they are drawn: answers,
trials, brackets, memory; what was predicted of each trial and cell, and so ordered the trials; what
was asked; and on which machines.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from highwater.nouns.environment import ALLOCATOR_VARIABLES, Environment
from highwater.nouns.study import Question, Study, counted_ranks
from highwater.nouns.trial import Outcome
from highwater.pages.answer_tables import answer_table, place, provenance
from highwater.pages.prediction_tables import learned
from highwater.pages.study_report import (
    BracketStep,
    CellReport,
    FailedTrial,
    Judgement,
    StudyReport,
    TrialReport,
)
from highwater.pages.table import TextTable, table_of, values_table
from highwater.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
)

OUTCOMES: dict[Outcome | None, str] = {
    Outcome.FIT: "fit",
    Outcome.MEMORY_ONLY_FIT: "memory-only fit",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.HOST_OUT_OF_MEMORY: "host out of memory",
    Outcome.TIMEOUT: "timed out",
    Outcome.CRASHED: "crashed",
    None: "no end recorded",
}
HEADINGS = {
    "answers": "Answers",
    "memory": "Memory at the peak",
    "failures": "What did not fit, or failed",
    "brackets": "How brackets closed",
    "trials": "Trials",
    "predicted": "Predicted, and what trials showed",
    "commands": "Do it again",
    "question": "What was asked",
    "environment": "Where it ran",
    "notes": "Notes",
}
"""The headings, in their order."""
_LONGEST_REASON = 240
"""Characters of a reason in a list; the whole of it stands among the failures."""
_BESIDE: dict[Judgement, str] = {
    "inside": "inside the interval",
    "below": "below the interval",
    "above": "above the interval",
    "ran out, as the upper end allows": "ran out, as the upper end allows",
}


def title(report: StudyReport) -> str:
    """A heading that says what the study is about."""
    return f"{report.study.question.model.name} on {place(report.study.question)}"


def state(report: StudyReport) -> str:
    """Say how far the search is, and whether anything was trained."""
    study = report.study
    answers = study.answers_within(study.question.timeout_s)
    answered = f"{len(answers)} of {len(study.question.cells)} cells are answered"
    if len(answers) < len(study.answers):
        answered += f", {len(study.answers) - len(answers)} more in less time than there is now"
    if study.unproven:
        answered += f", {len(study.unproven)} more unproven: the trials do not bear them out"
    finished = f"{study.finished_trials} of {len(study.trials)} trials that started have ended"
    cut = "**Unfinished**: the search is running, or was cut short"
    beginning = "Finished" if report.is_complete else cut
    return (
        f"{beginning}. {answered}; {finished}. Figures are {provenance(study.question)}, "
        f"unless they are called predicted."
    )


def answers_table(report: StudyReport) -> TextTable:
    """The answers, their reasons short."""
    table = answer_table(report.study)
    notes = (
        note if len(note) <= _LONGEST_REASON else f"{note[:_LONGEST_REASON]}…"
        for note in table.footnotes
    )
    return replace(table, title=f"answers: {table.title}", footnotes=tuple(notes))


def _number(trial: TrialReport) -> str:
    number = f"{trial.number}, attempt {trial.attempt}" if trial.attempt > 1 else f"{trial.number}"
    return f"{number}, repeat {trial.repeat}" if trial.repeat else number


def _length(trial: TrialReport) -> str:
    return format_tokens(trial.length_tokens)


def trials_table(report: StudyReport) -> TextTable:
    """Every trial, in the order in which they started."""
    return table_of(
        f"trials in their order, {report.label}",
        report.trials,
        ("trial", _number),
        ("cell", lambda trial: trial.cell),
        ("proof", lambda trial: "memory-only" if trial.is_memory_only else "full"),
        ("outcome", outcome),
        ("length", _length),
        ("tokens/s", lambda trial: format_rate(trial.tokens_per_s)),
        ("MFU", lambda trial: format_share(trial.mfu)),
        ("step", lambda trial: format_seconds(trial.step_time_s)),
        ("to the first step", lambda trial: format_seconds(trial.launch_to_first_step_s)),
        ("whole trial", lambda trial: format_seconds(trial.wall_s)),
        names=4,
    )


def outcome(trial: TrialReport) -> str:
    """The outcome in words; of a fit that does not count, why."""
    return f"{OUTCOMES[trial.outcome]}{', too little headroom' if lacks_headroom(trial) else ''}"


def lacks_headroom(trial: TrialReport) -> bool:
    """Whether a trial fit, but with less headroom than was asked for."""
    return trial.outcome is not None and trial.outcome.is_fit and not trial.counts_as_fit


def bracket_table(report: StudyReport) -> TextTable:
    """How the brackets closed, cell by cell."""

    def trial(step: BracketStep) -> TrialReport:
        return report.trials[step.trial - 1]

    return table_of(
        f"the bracket of each cell after each of its trials, {report.label}",
        [(cell.label, step) for cell in report.cells for step in cell.bracket],
        ("cell", lambda each: each[0]),
        ("trial", lambda each: str(each[1].trial)),
        ("outcome", lambda each: outcome(trial(each[1]))),
        ("length", lambda each: _length(trial(each[1]))),
        ("longest that fit", lambda each: format_tokens(each[1].fits_tokens)),
        ("shortest that did not", lambda each: format_tokens(each[1].does_not_fit_tokens)),
    )


def memory_table(report: StudyReport) -> TextTable:
    """Peaks of the fullest rank beside the limit; of a trial that ran out up to then."""
    question = report.study.question
    is_gpu = question.device != "cpu"
    bound = "the whole card"
    if question.memory_budget_bytes is not None:
        bound = "the bound that was asked for"
    sampled = "" if question.foreign is None else ", sampled from outside"
    return table_of(
        f"memory at the peak of each trial, {report.label}{sampled}",
        report.trials,
        ("trial", lambda trial: str(trial.number)),
        ("cell", lambda trial: trial.cell),
        ("outcome", outcome),
        ("length", _length),
        ("allocated", lambda trial: format_bytes(trial.peak_allocated_bytes)) if is_gpu else None,
        (
            "reserved" if is_gpu else "data segment",
            lambda trial: format_bytes(trial.peak_reserved_bytes),
        ),
        ("device used", lambda trial: format_bytes(trial.device_used_bytes)) if is_gpu else None,
        ("limit", lambda trial: format_bytes(trial.limit_bytes)),
        ("headroom", lambda trial: format_bytes(trial.headroom_bytes)),
        (
            "allocator retries",
            lambda trial: "-" if trial.allocator_retries is None else str(trial.allocator_retries),
        )
        if is_gpu
        else None,
        footnotes=(
            "of a trial that ran out of memory: the most before the allocation that failed, which "
            "says nothing of what it needs",
            f"limit: what {counted_ranks(1, question.device)} may use, {bound}; headroom: what was "
            "left of it",
        ),
    )


def failure_lines(failed: FailedTrial) -> str:
    """A line that says where the trial was, and where its log is."""
    where = "No rank said where"
    if failed.rank is not None:
        where = f"Rank {failed.rank}, in {failed.phase or 'an unknown phase'}"
    known = "" if failed.out_of_memory is None else f" Out of memory: {failed.out_of_memory}."
    why = f"; {failed.log.reason}" if failed.log.reason else ""
    return f"{where}.{known} Log: {failed.log_path or 'none'}{why}."


def ordered_by(report: StudyReport) -> str:
    """Say what ordered the trials: as ``search.cell_search`` goes about it."""
    question, beginning = report.study.question, report.beginning
    named = "" if beginning is None else " and ".join(map(_prediction, beginning.predictions))
    if question.method == "linear":
        unheard = f"; {named} ordered nothing" if named else ""
        return f"its method: one length after the other{unheard}"
    first = ""
    if question.proof == "memory":
        first = ", after a full trial of the shortest length, by whose time others are judged"
    if beginning is None:
        return _unpredicted(report) + first
    if beginning.reason is not None:
        return f"{named}{first}; {beginning.reason}"
    is_silent = any(cell.bracket and cell.begun_at_tokens is None for cell in report.cells)
    silent = f"; where that says nothing, {_unpredicted(report)}" if is_silent else ""
    return f"{named}{first}{silent}"


def _unpredicted(report: StudyReport) -> str:
    """Say what orders a bisection without a prediction, as ``search.start_length`` does."""
    question = report.study.question
    if question.cells[0].settings.token_budget_tokens is not None:
        return "its token budget, from the longest length that it holds"
    if report.predictions.reason is None:
        return "the formula"
    if question.memory_bytes is None:
        return "its method, from the shortest length: nobody recorded how much memory there is"
    return "a guess of what a token takes up, which each answered cell corrects; no prediction"


def _prediction(named: str) -> str:
    if named == "trace":
        return "a trace made along the way"
    return f"the prediction {file_and_folder(named) if Path(named).is_absolute() else named}"


def file_and_folder(path: str) -> str:
    """A file's name, then its folder, however it was typed. The folder is as seen from here, or
    from your own home directory without its name.
    """
    name, folder = Path(path).name, Path(path).parent.resolve()
    home, root = Path(os.environ.get("HOME", "~")).resolve(), Path("/")
    # the later of equal ones: a home of `/` is nobody's
    starts = {home: Path("~"), Path.cwd(): Path(), root: root}
    start = next(above for above in (folder, *folder.parents) if above in starts)
    folder = starts[start] / folder.relative_to(start)
    return name if folder == Path() else f"{name}, in {folder}"


def predicted_tables(report: StudyReport) -> Iterator[TextTable]:
    """The tables of predictions, each where something was predicted."""
    if report.predictions.reason is None:
        yield predicted_trials(report)
    if _is_foretold(report) or report.predictions.reason is None:
        yield predicted_cells(report)


def predicted_trials(report: StudyReport) -> TextTable:
    """A table of each trial beside the formula's interval."""
    label = report.label
    return table_of(
        f"device used of the fullest GPU: predicted by formula, and {label}",
        report.trials,
        ("trial", lambda trial: str(trial.number)),
        ("cell", lambda trial: trial.cell),
        ("outcome", outcome),
        ("length", _length),
        ("predicted: interval", _interval),
        (
            "predicted: between its ends",
            lambda trial: format_bytes(trial.predicted and trial.predicted.device_used_bytes),
        ),
        (f"{label}: device used", _used),
        (f"{label} beside predicted", lambda trial: _BESIDE.get(trial.beside_prediction, "-")),
    )


def _interval(trial: TrialReport) -> str:
    around = trial.predicted and trial.predicted.interval
    if around is None:
        return "-"
    return f"{format_bytes(around.low_bytes)} to {format_bytes(around.high_bytes)}"


def _used(trial: TrialReport) -> str:
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return f"more than {format_bytes(trial.limit_bytes)}"
    is_fit = trial.outcome is not None and trial.outcome.is_fit
    return format_bytes(trial.device_used_bytes) if is_fit else "-"


def _is_foretold(report: StudyReport) -> bool:
    return any(cell.expected_tokens is not None for cell in report.cells)


def predicted_cells(report: StudyReport) -> TextTable:
    """A table of each cell's capacity beside what was predicted of it: by the formula of today, and
    by what was asked before its trials.
    """
    today, label = "predicted by today's formula", report.label
    return table_of(
        f"longest length of each cell: predicted, and {label}",
        report.cells,
        ("cell", lambda cell: cell.label),
        (
            f"{today}: upper end fits",
            lambda cell: _tokens(cell.predicted and cell.predicted.capacity_tokens),
        ),
        (f"{today}: likely", lambda cell: _tokens(cell.predicted and cell.predicted.likely_tokens)),
        ("predicted before its trials: likely", _expected) if _is_foretold(report) else None,
        (f"{label}: longest that fit", lambda cell: _edge(cell)[0]),
        (f"{label}: next, did not", lambda cell: _edge(cell)[1]),
        names=1,
    )


def _expected(cell: CellReport) -> str:
    """The expected length with what said so, which may differ from cell to cell."""
    if cell.expected_tokens is None or cell.expected_by is None:
        return "-"
    by = {"formula": "the formula then", "trace": "a trace"}.get(
        cell.expected_by, Path(cell.expected_by).name
    )
    return f"{_tokens(cell.expected_tokens)} by {by}"


def _edge(cell: CellReport) -> tuple[str, str]:
    """The longest length that fit and the next one, which did not."""
    if cell.answer is not None:
        return _tokens(cell.answer.reach_tokens), format_tokens(cell.answer.does_not_fit_tokens)
    if not cell.bracket:
        return "-", "-"
    last = cell.bracket[-1]
    return format_tokens(last.fits_tokens), format_tokens(last.does_not_fit_tokens)


def _tokens(count: int | None) -> str:
    return "none" if count == 0 else format_tokens(count)


def prediction_notes(report: StudyReport) -> Iterator[str]:
    """Say what was predicted when, what the intervals promise, and how far these trials test it."""
    predictions = report.predictions
    if any(cell.expected_by == "formula" for cell in report.cells):
        yield (
            "the formula then: that of the highwater which searched, as the study recorded it "
            "before the cell's first trial"
        )
    if predictions.reason is not None:
        yield f"nothing is predicted by formula: {predictions.reason}"
        return
    if report.study.question.simulated:
        yield "nothing was measured: the trials were simulated by this very formula"
    if predictions.calibration is None or not predictions.calibration.factors:
        return
    yield from learned(predictions.calibration)
    if predictions.shared_trials:
        yield (
            f"{predictions.shared_trials} of these trials are among those that the intervals were "
            "learned from: they are no test of them"
        )
    versions = report.versions.get("highwater", ())
    other = [version for version in versions if version != predictions.highwater_version]
    if other:
        yield (
            f"the trials ran under highwater {', '.join(other)}; the formula is that of "
            f"{predictions.highwater_version}"
        )


def question_table(report: StudyReport) -> TextTable:
    """The table of what was asked."""
    question = report.study.question
    grid, model = question.grid, question.model
    named, path = question.cells[0].settings, report.study.path
    budget_bytes, typed = question.memory_budget_bytes, question.hyperparameters.flags
    steps = f"{question.steps} of {question.micro_batches} micro-batch{'es' * named.accumulates}"
    rows = [
        ("model", f"{model.name}, {model.shape.model_type}, configuration {model.config_digest}"),
        ("native length", f"{format_tokens(grid.native_length_tokens)} tokens"),
        ("place", place(question)),
        ("memory of a GPU", format_bytes(question.device_total_bytes)),
        ("bound on it", format_bytes(budget_bytes) if budget_bytes else "none: the whole card"),
        ("cells", "; ".join(cell.label_on(question.device) for cell in question.cells)),
        *_trained(question),
        ("lengths", _lengths(question)),
        ("search", _search(report.study)),
        ("steps of a trial", steps),
        *((("hyperparameters", " ".join(typed)),) if typed else ()),
        ("ordered by", ordered_by(report)),
        ("study", "not recorded" if path is None else file_and_folder(path)),
    ]
    return values_table("the question", rows)


def _trained(question: Question) -> Iterator[tuple[str, str]]:
    """Rows on what this package's engine trains, or what is known of another trainer."""
    named, foreign = question.cells[0].settings, question.foreign
    if foreign is not None:
        yield "trainer", foreign.title
        if foreign.typed:
            yield "command", foreign.typed
        if foreign.base_config_path is not None:
            name = file_and_folder(foreign.base_config_path)
            yield "its configuration", f"{name}, {foreign.base_config_digest}"
        if foreign.done_pattern is not None:
            yield "steps are done", foreign.done_pattern or "by exit status 0"
        return
    how = f"{named.strategy}, entropy {named.entropy}, recompute {named.recompute}"
    yield "training", f"{named.objective}, {how}"
    sequences = f"{named.sequences_per_micro_batch} in each micro-batch"
    if named.token_budget_tokens is not None:
        budget = format_tokens(named.token_budget_tokens)
        sequences = f"as many as a budget of {budget} tokens holds, for each GPU"
    yield "sequences", sequences
    yield "data", question.data or "synthetic sequences"


def _lengths(question: Question) -> str:
    grid = question.grid
    said = f"{format_tokens(grid.start_tokens)} to {format_tokens(grid.max_tokens)} tokens in "
    said += f"steps of {format_tokens(grid.step_tokens)}"
    if grid.beyond_step_tokens != grid.step_tokens:
        said += f", past the native length of {format_tokens(grid.beyond_step_tokens)}"
    return said


def _search(study: Study) -> str:
    question = study.question
    said = f"{question.method}, proof {question.proof}{_within(study)}"
    if question.confirm:
        said += f", both trials of an edge repeated {question.confirm} times"
    if question.margin_bytes:
        said += f", a length has to leave {format_bytes(question.margin_bytes)}"
    return said


def _within(study: Study) -> str:
    """The longest time limit that the study met, and the others under which answers were given."""
    longest_s = study.longest_timeout_s
    if longest_s is None:
        return ""
    shorter = Counter(limit_s for limit_s in study.answers_within_s if limit_s < longest_s)
    counted = ", ".join(
        f"{shorter[limit_s]} of {len(study.answers)} answers up to {format_seconds(limit_s)}"
        for limit_s in sorted(shorter, reverse=True)
    )
    answers = f" ({counted})" if counted else ""
    return f", full trials up to {format_seconds(longest_s)}{answers}"


def environment_tables(report: StudyReport) -> Iterator[TextTable]:
    """Tables of what the trials said of themselves, and of where the search was started."""
    trials = report.trials
    kernels = dict.fromkeys(each.attention_kernel for each in trials if each.attention_kernel)
    allocators = dict.fromkeys(
        f"{each.rung}: {each.allocator}" for each in trials if each.allocator
    )
    rows = (
        ("device", ", ".join(report.device_names)),
        *((name, " and ".join(found)) for name, found in report.versions.items()),
        ("attention", ", ".join(kernels)),
        ("allocator, as it told", "; ".join(allocators)),
    )
    told = [row for row in rows if row[1]]
    if told:
        yield values_table("what the trials said that they ran with", told)
    environments = report.study.environments
    for number, found in enumerate(environments, 1):
        which = f", {number} of {len(environments)}" if len(environments) > 1 else ""
        yield values_table(f"where the search was started{which}", _environment(found))


def _environment(found: Environment) -> Iterator[tuple[str, str]]:
    sizes = zip(found.gpu_names, found.gpu_memory_bytes, strict=True)
    counted = Counter(f"{name}, {format_bytes(size)}" for name, size in sizes)
    gpus = "; ".join(f"{count} x {each}" for each, count in counted.items())
    yield "GPUs", gpus or "none visible"
    yield "driver", found.driver_version or "-"
    yield "host memory", format_bytes(found.host_memory_total_bytes)
    yield "CPU cores", str(found.cpu_cores)
    yield from found.versions.items()
    for name, value in found.variables.items():
        given = " (trials are given their rung's instead)" if name in ALLOCATOR_VARIABLES else ""
        yield f"{name} in the shell", f"{value}{given}"
    if not any(name in ALLOCATOR_VARIABLES for name in found.variables):
        yield f"{ALLOCATOR_VARIABLES[0]} in the shell", "not set (trials are given their rung's)"
