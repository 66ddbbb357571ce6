"""A study's report about three things: what was predicted of each trial and cell, and so ordered
the trials; what was asked; and on which machines.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from highwater.nouns.environment import ALLOCATOR_VARIABLES, Environment
from highwater.nouns.study import Question, Study
from highwater.nouns.trial import Outcome
from highwater.pages.prediction_tables import learned
from highwater.pages.study.study_parts import outcome
from highwater.pages.study.study_report import CellReport, Judgement, StudyReport, TrialReport
from highwater.pages.study.tables import place
from highwater.pages.text import TextTable
from highwater.units import format_bytes, format_seconds, format_tokens


def ordered_by(report: StudyReport) -> str:
    """What ordered the trials, in words: as ``search.cell_search`` goes about it."""
    question, beginning = report.study.question, report.beginning
    named = "" if beginning is None else " and ".join(map(_prediction, beginning.predictions))
    if question.method == "linear":
        unheard = f"; {named} ordered nothing" if named else ""
        return f"its method: one length after the other{unheard}"
    first = (
        ", after a full trial of the shortest length, by whose time others are judged"
        if question.proof == "memory"
        else ""
    )
    if beginning is None:
        return _unpredicted(report) + first
    if beginning.reason is not None:
        return f"{named}{first}; {beginning.reason}"
    is_silent = any(cell.bracket and cell.begun_at_tokens is None for cell in report.cells)
    return (
        f"{named}{first}{f'; where that says nothing, {_unpredicted(report)}' if is_silent else ''}"
    )


def _unpredicted(report: StudyReport) -> str:
    """What orders the trials of a bisection without a prediction: ``search.start_length`` does."""
    question = report.study.question
    if question.cells[0].settings.token_budget_tokens is not None:
        return "its token budget, from the longest length that it holds"
    if report.predictions.reason is None:
        return "the formula"
    if question.memory_budget_bytes is None and question.device_total_bytes is None:
        return "its method, from the shortest length: nobody recorded how much memory there is"
    return "a guess of what a token takes up, which each answered cell corrects; no prediction"


def _prediction(named: str) -> str:
    if named == "trace":
        return "a trace made along the way"
    return f"the prediction {file_and_folder(named) if Path(named).is_absolute() else named}"


def short_name(named: str) -> str:
    """A prediction's name in a table: a file's name without its folder."""
    return {"formula": "the formula then", "trace": "a trace"}.get(named, Path(named).name)


def file_and_folder(path: str) -> str:
    """A file's name, then its folder, however it was typed. The folder is as seen from here, or
    from your own home directory without its name.
    """
    name, folder = Path(path).name, Path(path).parent.resolve()
    home, root = Path(os.environ.get("HOME", "~")).resolve(), Path("/")
    starts = {
        home: Path("~"),
        Path.cwd(): Path(),
        root: root,
    }  # the later of equal ones: a home of `/` is nobody's
    start = next(above for above in (folder, *folder.parents) if above in starts)
    folder = starts[start] / folder.relative_to(start)
    return name if folder == Path() else f"{name}, in {folder}"


_BESIDE: dict[Judgement, str] = {
    "inside": "inside the interval",
    "below": "below the interval",
    "above": "above the interval",
    "ran out, as the upper end allows": "ran out, as the upper end allows",
}


def predicted_tables(report: StudyReport) -> Iterator[TextTable]:
    """The tables of predictions, each where something was predicted."""
    yield from filter(None, (predicted_trials(report), predicted_cells(report)))


def predicted_trials(report: StudyReport) -> TextTable | None:
    """A table of each trial beside the formula's interval; None where the formula says nothing."""
    if report.predictions.reason is not None:
        return None
    return TextTable(
        title=f"device used of the fullest GPU: predicted by formula, and {report.label}",
        columns=(
            *("trial", "cell", "outcome", "length"),
            *("predicted: interval", "predicted: between its ends"),
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
    elif trial.outcome is None or not trial.outcome.is_fit:
        used = "-"
    ends = around and f"{format_bytes(around.low_bytes)} to {format_bytes(around.high_bytes)}"
    return (
        *(str(trial.number), trial.cell, outcome(trial), format_tokens(trial.length_tokens)),
        *(ends or "-", "-" if predicted is None else format_bytes(predicted.device_used_bytes)),
        *(used, _BESIDE.get(trial.beside_prediction, "-")),
    )


def predicted_cells(report: StudyReport) -> TextTable | None:
    """A table of each cell's capacity beside what was predicted of it. Predictions are by the
    formula of today, and those from before its trials. None where neither says anything.
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
            *("cell", "predicted by today's formula: upper end fits"),
            "predicted by today's formula: likely",
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
    """What was predicted when, and what the intervals promise. Also how far these trials are a test
    of them.
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
    bound = format_bytes(budget_bytes) if budget_bytes else "none: the whole card"
    rows = [
        ("model", f"{model.name}, {model.shape.model_type}, configuration {model.config_digest}"),
        ("native length", f"{format_tokens(grid.native_length_tokens)} tokens"),
        ("place", place(question)),
        ("memory of a GPU", format_bytes(question.device_total_bytes)),
        ("bound on it", bound),
        ("cells", "; ".join(cell.label_on(question.device) for cell in question.cells)),
        *_of(question),
        ("lengths", _lengths(question)),
        ("search", _search(report.study)),
        (
            "steps of a trial",
            f"{question.steps} of {question.micro_batches} micro-batch{'es' * named.accumulates}",
        ),
        *((("hyperparameters", " ".join(typed)),) if typed else ()),
        ("ordered by", ordered_by(report)),
        ("study", "not recorded" if path is None else file_and_folder(path)),
    ]
    return _values("the question", rows)


def _values(title: str, rows: Iterable[tuple[str, str]]) -> TextTable:
    return TextTable(title=title, columns=("what", "value"), rows=tuple(rows), left_columns=2)


def _of(question: Question) -> Iterator[tuple[str, str]]:
    """What this package's engine trains, or what is known of another trainer."""
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
    yield (
        "training",
        f"{named.objective}, {named.strategy}, entropy {named.entropy}, recompute "
        f"{named.recompute}",
    )
    sequences = f"{named.sequences_per_micro_batch} in each micro-batch"
    if named.token_budget_tokens is not None:
        budget = format_tokens(named.token_budget_tokens)
        sequences = f"as many as a budget of {budget} tokens holds, for each GPU"
    yield "sequences", sequences
    yield "data", question.data or "synthetic sequences"


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
    """What the trials said of themselves, and each place where the search was started."""
    trials = report.trials
    kernels = dict.fromkeys(each.attention_kernel for each in trials if each.attention_kernel)
    allocators = dict.fromkeys(
        f"{each.rung}: {each.allocator}" for each in trials if each.allocator
    )
    rows = [
        ("device", ", ".join(report.device_names)),
        *((name, " and ".join(found)) for name, found in report.versions.items()),
    ]
    rows += [("attention", ", ".join(kernels)), ("allocator, as it told", "; ".join(allocators))]
    kept = tuple((name, value) for name, value in rows if value)
    if kept:
        yield _values("what the trials said that they ran with", kept)
    environments = report.study.environments
    for number, found in enumerate(environments, 1):
        which = f", {number} of {len(environments)}" if len(environments) > 1 else ""
        yield _values(f"where the search was started{which}", _environment(found))


def _environment(found: Environment) -> Iterator[tuple[str, str]]:
    sizes = zip(found.gpu_names, found.gpu_memory_bytes, strict=True)
    counted = [f"{name}, {format_bytes(size)}" for name, size in sizes]
    gpus = "; ".join(f"{counted.count(each)} x {each}" for each in dict.fromkeys(counted))
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


def no_environment(report: StudyReport) -> str | None:
    """Why nobody knows where the search was started; None where it is known."""
    if report.study.environments:
        return None
    why = "the study is from before that was recorded"
    if report.study.question.simulated:
        why = "nothing ran in a dry run"
    return f"Where the search was started is not known: {why}."
