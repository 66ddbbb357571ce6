"""The parts of a study's report, as text before anybody decides how it is drawn.

Each is a table, or lines.
"""

from collections.abc import Iterator
from dataclasses import replace

from highwater.pages.prediction_tables import learned
from highwater.pages.study.study_order import file_and_folder, ordered_by, short_name
from highwater.pages.study.study_report import (
    CellReport,
    FailedTrial,
    Judgement,
    StudyReport,
    TrialReport,
)
from highwater.pages.study.tables import TextTable, answer_table, place, provenance
from highwater.spec.allocator import ALLOCATOR_VARIABLES
from highwater.spec.environment import Environment
from highwater.spec.study import Question, Study, counted_ranks
from highwater.spec.trial import Outcome
from highwater.units import format_bytes, format_seconds, format_tokens

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
    "question": "What was asked",
    "answers": "Answers",
    "environment": "Where it ran",
    "trials": "Trials",
    "brackets": "How brackets closed",
    "memory": "Memory at the peak",
    "predicted": "Predicted, and what trials showed",
    "failures": "What did not fit, or failed",
    "commands": "Do it again",
    "notes": "Notes",
}
"""The headings, in their order."""
NO_FAILURES = "Every trial that ended fit."
WORDS = (
    "**fit**: every step was done, with a finite loss. **Memory-only fit**: memory holds the "
    "length, nothing was trained.",
    "**bracket** of a cell: the longest length that fit, and the shortest above it that did not. "
    "Each trial can narrow it; a "
    "timeout or a crash says nothing about memory and leaves it as it was.",
    "**capacity**: the longest length that fit, with the next one tried and failed.",
    "**predicted** figures come from a formula or a trace, without a trial; every other figure is "
    "what the column's heading says.",
)
_LONGEST_REASON = 240
"""Characters of a reason in a list; the whole of it stands among the failures."""
_BESIDE: dict[Judgement, str] = {
    "inside": "inside the interval",
    "below": "below the interval",
    "above": "above the interval",
    "ran out, as the upper end allows": "ran out, as the upper end allows",
    "unknown": "-",
}


def title(report: StudyReport) -> str:
    """What the study is about, in a heading."""
    return f"{report.study.question.model.name} on {place(report.study.question)}"


def state(report: StudyReport) -> str:
    """How far the search is, and whether anything was trained."""
    study = report.study
    answers = study.answers_within(study.question.timeout_s)
    answered = f"{len(answers)} of {len(study.question.cells)} cells are answered"
    if len(answers) < len(study.answers):
        answered += f", {len(study.answers) - len(answers)} more in less time than there is now"
    if study.unproven:
        answered += f", {len(study.unproven)} more unproven: the trials do not bear them out"
    finished = f"{study.finished_trials} of {len(study.trials)} trials that started have ended"
    beginning = (
        "Finished"
        if report.is_complete
        else "**Unfinished**: the search is running, or was cut short"
    )
    return (
        f"{beginning}. {answered}; {finished}. Figures are {provenance(study.question)}, "
        f"unless they are called predicted."
    )


def question_table(report: StudyReport) -> TextTable:
    """The table of what was asked."""
    question = report.study.question
    grid, model = question.grid, question.model
    named = next(iter(question.cells)).settings
    rows = [
        ("model", f"{model.name}, {model.shape.model_type}, configuration {model.config_digest}"),
        ("native length", f"{format_tokens(grid.native_length_tokens)} tokens"),
        ("place", place(question)),
        ("memory of a GPU", format_bytes(question.device_total_bytes)),
        (
            "bound on it",
            format_bytes(question.memory_budget_bytes)
            if question.memory_budget_bytes
            else "none: the whole card",
        ),
        ("cells", "; ".join(cell.label_on(question.device) for cell in question.cells)),
        (
            "training",
            f"{named.objective}, {named.strategy}, entropy {named.entropy}, recompute "
            f"{named.recompute}",
        ),
        ("sequences", _sequences(question)),
        ("lengths", _lengths(question)),
        ("search", _search(report.study)),
        ("steps of a trial", f"{question.steps} of {question.micro_batches} micro-batches"),
        ("data", question.data or "synthetic sequences"),
        *(
            (("hyperparameters", " ".join(question.hyperparameters.flags)),)
            if question.hyperparameters.flags
            else ()
        ),
        ("ordered by", ordered_by(report)),
        (
            "study",
            "not recorded" if report.study.path is None else file_and_folder(report.study.path),
        ),
    ]
    return TextTable(
        title="the question", columns=("what", "value"), rows=tuple(rows), left_columns=2
    )


def _sequences(question: Question) -> str:
    named = question.cells[0].settings
    if named.token_budget_tokens is not None:
        return (
            f"as many as a budget of {format_tokens(named.token_budget_tokens)} tokens holds, "
            f"for each GPU"
        )
    return f"{named.sequences_per_micro_batch} in each micro-batch"


def _lengths(question: Question) -> str:
    grid = question.grid
    step = f"steps of {format_tokens(grid.step_tokens)}"
    further = f", past the native length of {format_tokens(grid.beyond_step_tokens)}"
    beyond = further if grid.beyond_step_tokens != grid.step_tokens else ""
    return (
        f"{format_tokens(grid.start_tokens)} to {format_tokens(grid.max_tokens)} tokens in "
        f"{step}{beyond}"
    )


def _search(study: Study) -> str:
    question = study.question
    confirmed = (
        f", both trials of an edge repeated {question.confirm} times" if question.confirm else ""
    )
    margin = (
        f", a length has to leave {format_bytes(question.margin_bytes)}"
        if question.margin_bytes
        else ""
    )
    return f"{question.method}, proof {question.proof}{_within(study)}{confirmed}{margin}"


def _within(study: Study) -> str:
    """The longest time limit that the study met, and the others under which answers were given."""
    longest_s = study.longest_timeout_s
    if longest_s is None:
        return ""
    shorter = sorted(
        {limit_s for limit_s in study.answers_within_s if limit_s < longest_s}, reverse=True
    )
    count = study.answers_within_s.count
    counted = (
        f"{count(limit_s)} of {len(study.answers)} answers up to {format_seconds(limit_s)}"
        for limit_s in shorter
    )
    answers = f" ({', '.join(counted)})" if shorter else ""
    return f", full trials up to {format_seconds(longest_s)}{answers}"


def environment_tables(report: StudyReport) -> Iterator[TextTable]:
    """What the trials said of themselves, and each place where the search was started."""
    kernels = dict.fromkeys(
        trial.attention_kernel for trial in report.trials if trial.attention_kernel
    )
    allocators = dict.fromkeys(
        f"{trial.rung}: {trial.allocator}" for trial in report.trials if trial.allocator
    )
    rows = [
        ("device", ", ".join(report.device_names)),
        *((name, " and ".join(found)) for name, found in report.versions.items()),
    ]
    rows += [("attention", ", ".join(kernels)), ("allocator, as it told", "; ".join(allocators))]
    kept = tuple((name, value) for name, value in rows if value)
    if kept:
        yield TextTable(
            title="what the trials said that they ran with",
            columns=("what", "value"),
            rows=kept,
            left_columns=2,
        )
    environments = report.study.environments
    for number, found in enumerate(environments, 1):
        which = f", {number} of {len(environments)}" if len(environments) > 1 else ""
        yield TextTable(
            title=f"where the search was started{which}",
            columns=("what", "value"),
            rows=tuple(_environment(found)),
            left_columns=2,
        )


def _environment(found: Environment) -> Iterator[tuple[str, str]]:
    sizes = zip(found.gpu_names, found.gpu_memory_bytes, strict=True)
    counted = [f"{name}, {format_bytes(size)}" for name, size in sizes]
    yield (
        "GPUs",
        "; ".join(f"{counted.count(each)} x {each}" for each in dict.fromkeys(counted))
        or "none visible",
    )
    yield "driver", found.driver_version or "-"
    yield "host memory", format_bytes(found.host_memory_total_bytes)
    yield "CPU cores", str(found.cpu_cores)
    yield from found.versions.items()
    for name, value in found.variables.items():
        given = " (trials are given their rung's instead)" if name in ALLOCATOR_VARIABLES else ""
        yield f"{name} in the shell", f"{value}{given}"
    if not any(name in ALLOCATOR_VARIABLES for name in found.variables):
        yield f"{ALLOCATOR_VARIABLES[0]} in the shell", "not set (trials are given their rung's)"


def no_environment(report: StudyReport) -> str | None:
    """Why nobody knows where the search was started; None where it is known."""
    if report.study.environments:
        return None
    why = (
        "nothing ran in a dry run"
        if report.study.question.simulated
        else "the study is from before that was recorded"
    )
    return f"Where the search was started is not known: {why}."


def answers_table(report: StudyReport) -> TextTable:
    """The answers, their reasons short."""
    table = answer_table(report.study)
    notes = (
        note if len(note) <= _LONGEST_REASON else f"{note[:_LONGEST_REASON]}…"
        for note in table.footnotes
    )
    return replace(table, title=f"answers: {table.title}", footnotes=tuple(notes))


def trials_table(report: StudyReport) -> TextTable:
    """Every trial, in the order in which they started."""
    return TextTable(
        title=f"trials in their order, {report.label}",
        columns=(
            "trial",
            "cell",
            "proof",
            "outcome",
            "length",
            "tokens/s",
            "MFU",
            "step",
            "to the first step",
            "whole trial",
        ),
        rows=tuple(_trial_row(trial) for trial in report.trials),
        left_columns=4,
    )


def _trial_row(trial: TrialReport) -> tuple[str, ...]:
    again = [
        f"attempt {trial.attempt}" if trial.attempt > 1 else "",
        f"repeat {trial.repeat}" if trial.repeat else "",
    ]
    return (
        ", ".join((str(trial.number), *filter(None, again))),
        trial.cell,
        "memory-only" if trial.is_memory_only else "full",
        outcome(trial),
        format_tokens(trial.length_tokens),
        "-" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}",
        "-" if trial.mfu is None else f"{trial.mfu:.1%}",
        format_seconds(trial.step_time_s),
        format_seconds(trial.launch_to_first_step_s),
        format_seconds(trial.wall_s),
    )


def outcome(trial: TrialReport) -> str:
    """The outcome in words; of a fit that does not count, why."""
    lacks = trial.outcome is not None and trial.outcome.is_fit and not trial.counts_as_fit
    return f"{OUTCOMES[trial.outcome]}{', too little headroom' if lacks else ''}"


def bracket_table(report: StudyReport) -> TextTable:
    """How the brackets closed, cell by cell."""
    rows = (
        (
            *(cell.label, str(step.trial), outcome(trial), format_tokens(trial.length_tokens)),
            *(format_tokens(step.fits_tokens), format_tokens(step.does_not_fit_tokens)),
        )
        for cell in report.cells
        for step in cell.bracket
        for trial in (report.trials[step.trial - 1],)
    )
    return TextTable(
        title=f"the bracket of each cell after each of its trials, {report.label}",
        columns=("cell", "trial", "outcome", "length", "longest that fit", "shortest that did not"),
        rows=tuple(rows),
        left_columns=3,
    )


def memory_table(report: StudyReport) -> TextTable:
    """Peaks of the fullest rank beside the limit; of a trial that ran out up to then."""
    on_cpu = report.study.question.device == "cpu"
    rows = (
        (
            *(str(trial.number), trial.cell, outcome(trial), format_tokens(trial.length_tokens)),
            *map(format_bytes, () if on_cpu else (trial.peak_allocated_bytes,)),
            *map(format_bytes, (trial.peak_reserved_bytes,)),
            *map(format_bytes, () if on_cpu else (trial.device_used_bytes,)),
            format_bytes(trial.limit_bytes),
            format_bytes(trial.headroom_bytes),
            *(
                ()
                if on_cpu
                else ("-" if trial.allocator_retries is None else str(trial.allocator_retries),)
            ),
        )
        for trial in report.trials
    )
    names = ("data segment",) if on_cpu else ("allocated", "reserved", "device used")
    return TextTable(
        title=f"memory at the peak of each trial, {report.label}",
        columns=(
            "trial",
            "cell",
            "outcome",
            "length",
            *names,
            "limit",
            "headroom",
            *(() if on_cpu else ("allocator retries",)),
        ),
        rows=tuple(rows),
        footnotes=(
            "of a trial that ran out of memory: the most before the allocation that failed, which "
            "says nothing of what it needs",
            *_limit(report),
        ),
        left_columns=3,
    )


def _limit(report: StudyReport) -> tuple[str, ...]:
    question = report.study.question
    each = counted_ranks(1, question.device)
    bound = (
        "the bound that was asked for"
        if question.memory_budget_bytes is not None
        else "the whole card"
    )
    return (f"limit: what {each} may use, {bound}; headroom: what was left of it",)


def predicted_trials(report: StudyReport) -> TextTable | None:
    """Each trial beside the formula's interval; None where the formula says nothing."""
    if report.predictions.reason is not None:
        return None
    return TextTable(
        title=f"device used of the fullest GPU: predicted by formula, and {report.label}",
        columns=(
            *(
                "trial",
                "cell",
                "outcome",
                "length",
                "predicted: interval",
                "predicted: between its ends",
            ),
            *(f"{report.label}: device used", f"{report.label} beside predicted"),
        ),
        rows=tuple(_predicted_row(trial) for trial in report.trials),
        left_columns=3,
    )


def _predicted_row(trial: TrialReport) -> tuple[str, ...]:
    predicted = trial.predicted
    around = None if predicted is None else predicted.interval
    used = format_bytes(trial.device_used_bytes)
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        used = f"more than {format_bytes(trial.limit_bytes)}"
    return (
        *(str(trial.number), trial.cell, outcome(trial), format_tokens(trial.length_tokens)),
        "-"
        if around is None
        else f"{format_bytes(around.low_bytes)} to {format_bytes(around.high_bytes)}",
        "-" if predicted is None else format_bytes(predicted.device_used_bytes),
        used
        if trial.outcome is not None
        and (trial.outcome.is_fit or trial.outcome is Outcome.OUT_OF_MEMORY)
        else "-",
        _BESIDE[trial.beside_prediction],
    )


def predicted_cells(report: StudyReport) -> TextTable | None:
    """Each cell's capacity beside what was predicted of it.

    Predictions are by the formula of today, and those before its trials.
    """
    is_foretold = any(cell.expected_tokens is not None for cell in report.cells)
    if report.predictions.reason is not None and not is_foretold:
        return None
    rows = (
        (
            cell.label,
            "-" if cell.predicted is None else _tokens(cell.predicted.capacity_tokens),
            "-" if cell.predicted is None else _tokens(cell.predicted.likely_tokens),
            *((_expected(cell),) if is_foretold else ()),
            *_edge(cell),
        )
        for cell in report.cells
    )
    return TextTable(
        title=f"longest length of each cell: predicted, and {report.label}",
        columns=(
            *(
                "cell",
                "predicted by today's formula: upper end fits",
                "predicted by today's formula: likely",
            ),
            *(("predicted before its trials: likely",) if is_foretold else ()),
            *(f"{report.label}: longest that fit", f"{report.label}: next, did not"),
        ),
        rows=tuple(rows),
        left_columns=1,
    )


def _expected(cell: CellReport) -> str:
    """The expected length with what said so, which may differ from cell to cell."""
    if cell.expected_tokens is None or cell.expected_by is None:
        return "-"
    return f"{_tokens(cell.expected_tokens)} by {short_name(cell.expected_by)}"


def _edge(cell: CellReport) -> tuple[str, str]:
    """The longest length that fit and the next one, which did not.

    Of a cell without an answer, as far as its bracket has closed.
    """
    if cell.answer is not None:
        return _tokens(cell.answer.reach_tokens), format_tokens(cell.answer.does_not_fit_tokens)
    if not cell.bracket:
        return "-", "-"
    return format_tokens(cell.bracket[-1].fits_tokens), format_tokens(
        cell.bracket[-1].does_not_fit_tokens
    )


def _tokens(count: int | None) -> str:
    return "none" if count == 0 else format_tokens(count)


def prediction_notes(report: StudyReport) -> Iterator[str]:
    """What was predicted when, and what the intervals promise.

    Also how far these trials are a test of them.
    """
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
        shared = (
            f"{predictions.shared_trials} of these trials are among those that the intervals "
            f"were learned from"
        )
        yield f"{shared}: they are no test of them"
    other = [
        version
        for version in report.versions.get("highwater", ())
        if version != predictions.highwater_version
    ]
    if other:
        yield (
            f"the trials ran under highwater {', '.join(other)}; the formula is that of "
            f"{predictions.highwater_version}"
        )


def failure_heading(failed: FailedTrial) -> str:
    """Which trial it was, and how it ended."""
    return (
        f"Trial {failed.trial}: {failed.cell}, {format_tokens(failed.length_tokens)} tokens, "
        f"{OUTCOMES[failed.outcome]}"
    )


def failure_lines(failed: FailedTrial) -> str:
    """Where the trial was, and the log's place, in a line."""
    where = (
        "No rank said where"
        if failed.rank is None
        else f"Rank {failed.rank}, in {failed.phase or 'an unknown phase'}"
    )
    return (
        f"{where}. Log: "
        f"{failed.log_path or 'none'}{f'; {failed.log.reason}' if failed.log.reason else ''}."
    )


def not_monotone(report: StudyReport) -> tuple[str, ...]:
    """Each observation that is not monotone."""
    return tuple(
        f"{cell.label}: {text}"
        for cell in report.cells
        if cell.answer
        for text in cell.answer.contradictions
    )


def notes(report: StudyReport) -> tuple[str, ...]:
    """What a reader should know about the record."""
    return report.study.notes


def made_by(report: StudyReport) -> str:
    """The last line of a report."""
    return f"Made by highwater {report.highwater_version} from the study; nothing was run for it."
