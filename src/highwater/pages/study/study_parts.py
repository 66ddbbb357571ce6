"""The parts of a study's report, tables or lines, before anybody decides how they are drawn."""

from dataclasses import replace

from highwater.nouns.study import counted_ranks
from highwater.nouns.trial import Outcome
from highwater.pages.study.study_report import FailedTrial, StudyReport, TrialReport
from highwater.pages.study.tables import answer_table, place, provenance
from highwater.pages.text import TextTable
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


def trials_table(report: StudyReport) -> TextTable:
    """Every trial, in the order in which they started."""
    return TextTable(
        title=f"trials in their order, {report.label}",
        columns=(
            *("trial", "cell", "proof", "outcome", "length", "tokens/s", "MFU", "step"),
            *("to the first step", "whole trial"),
        ),
        rows=tuple(_trial_row(trial) for trial in report.trials),
        left_columns=4,
    )


def _trial_row(trial: TrialReport) -> tuple[str, ...]:
    number = f"{trial.number}, attempt {trial.attempt}" if trial.attempt > 1 else f"{trial.number}"
    return (
        f"{number}, repeat {trial.repeat}" if trial.repeat else number,
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
    return f"{OUTCOMES[trial.outcome]}{', too little headroom' if lacks_headroom(trial) else ''}"


def lacks_headroom(trial: TrialReport) -> bool:
    """Whether a trial fit, but with less headroom than was asked for."""
    return trial.outcome is not None and trial.outcome.is_fit and not trial.counts_as_fit


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
    question = report.study.question
    on_cpu, is_sampled = question.device == "cpu", question.foreign is not None
    rows = (
        (
            *(str(trial.number), trial.cell, outcome(trial), format_tokens(trial.length_tokens)),
            *(() if on_cpu else (format_bytes(trial.peak_allocated_bytes),)),
            format_bytes(trial.peak_reserved_bytes),
            *(() if on_cpu else (format_bytes(trial.device_used_bytes),)),
            *(format_bytes(trial.limit_bytes), format_bytes(trial.headroom_bytes)),
            *(
                ()
                if on_cpu
                else ("-" if trial.allocator_retries is None else str(trial.allocator_retries),)
            ),
        )
        for trial in report.trials
    )
    is_bound = question.memory_budget_bytes is not None
    bound = "the bound that was asked for" if is_bound else "the whole card"
    names = ("data segment",) if on_cpu else ("allocated", "reserved", "device used")
    sampled = ", sampled from outside" if is_sampled else ""
    return TextTable(
        title=f"memory at the peak of each trial, {report.label}{sampled}",
        columns=(
            *("trial", "cell", "outcome", "length", *names, "limit", "headroom"),
            *(() if on_cpu else ("allocator retries",)),
        ),
        rows=tuple(rows),
        footnotes=(
            "of a trial that ran out of memory: the most before the allocation that failed, which "
            "says nothing of what it needs",
            f"limit: what {counted_ranks(1, question.device)} may use, {bound}; headroom: what was "
            "left of it",
        ),
        left_columns=3,
    )


def failure_heading(failed: FailedTrial) -> str:
    """A heading that says which trial it was, and how it ended."""
    return (
        f"Trial {failed.trial}: {failed.cell}, {format_tokens(failed.length_tokens)} tokens, "
        f"{OUTCOMES[failed.outcome]}"
    )


def failure_lines(failed: FailedTrial) -> str:
    """A line that says where the trial was, and where its log is."""
    where = (
        "No rank said where"
        if failed.rank is None
        else f"Rank {failed.rank}, in {failed.phase or 'an unknown phase'}"
    )
    known = "" if failed.out_of_memory is None else f" Out of memory: {failed.out_of_memory}."
    return (
        f"{where}.{known} Log: "
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
