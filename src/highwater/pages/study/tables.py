"""Tables of a study: data to rows, and rows to plain text.

Every table says whether it was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from highwater.pages.text import plain
from highwater.spec.packing import NOT_MONOTONE
from highwater.spec.study import RANK_WORDS, Cell, CellAnswer, Limit, Question, Study, counted_ranks
from highwater.spec.trial import MemoryBudget, Outcome, RankReport, TrialResult, TrialSpec
from highwater.units import format_bytes, format_seconds, format_tokens

_LIMITS: dict[Limit, str] = {
    "memory": "out of memory",
    "host_memory": "host memory ran out",
    "ceiling": "the longest length tried",
    "time": "timed out",
    "inconclusive": "inconclusive",
}
OUTCOME_WORDS = {Outcome.MEMORY_ONLY_FIT: "memory-only fit: memory holds it, nothing was trained"}
"""Outcomes in more than their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text, before anybody decides how it is drawn."""

    title: str
    columns: tuple[str, ...]
    """Headings; empty for a table without."""
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...] = ()
    left_columns: int = 3
    """Columns that hold names: aligned left. The others hold figures."""


def answer_table(study: Study) -> TextTable:
    """The final table: for each cell its capacity, and what ended the search above it.

    The other figures are those at the capacity.
    """
    question = study.question
    memory = "peak data segment" if question.device == "cpu" else "peak reserved"
    answers = {answer.cell: answer for answer in study.answers}
    rows = (
        _answer_row(answers[cell], question) if cell in answers else _unfinished_row(cell, study)
        for cell in question.cells
    )
    return TextTable(
        title=f"{plain(question.model.name)} on {place(question)}: {provenance(question)}",
        columns=(
            *("rung", RANK_WORDS[question.device][1], "SP"),
            *(("capacity",) if question.proof == "full" else ("trained in full", "memory-only")),
            *("ended by", memory, "headroom", "tokens/s", "MFU"),
        ),
        rows=tuple(rows),
        footnotes=tuple(_footnotes(study)),
    )


def trial_table(spec: TrialSpec, result: TrialResult) -> TextTable:
    """One trial: how it ended, and what was measured."""
    rank = result.ranks[0] if result.ranks else RankReport(rank=0)
    rows = (
        ("outcome", OUTCOME_WORDS.get(result.outcome, str(result.outcome))),
        ("reason", result.reason),
        (
            "peak data segment" if spec.device == "cpu" else "peak reserved",
            format_bytes(result.peak_reserved_bytes),
        ),
        ("headroom", format_bytes(result.headroom_bytes)),
        (
            "memory budget",
            "-" if rank.budget is None or spec.device == "cpu" else _division(rank.budget),
        ),
        (
            "allocator",
            ", ".join(f"{name}={value}" for name, value in rank.allocator_settings.items()) or "-",
        ),
        ("attention", rank.attention_kernel or "-"),
        *(() if spec.is_memory_only else _speed(result)),
        ("saved", _saves(result) or "-"),
        ("launch to first step", format_seconds(result.launch_to_first_step_s)),
        ("log", result.log_path or "-"),
    )
    label = ("simulated" if result.simulated else "measured") + (
        ", memory-only" if spec.is_memory_only else ""
    )
    return TextTable(
        title=f"{plain(spec.model_name)}, {format_tokens(spec.length_tokens)} tokens, "
        f"{spec.settings.label}: {label}",
        columns=(),
        rows=tuple((name, plain(text)) for name, text in rows),
        left_columns=2,
    )


def published_tables(studies: Sequence[Study]) -> tuple[TextTable, ...]:
    """The published layout, ``#GPU | SP | models``, for each rung and place.

    ``*`` is past the native length, ``-`` none, ``?`` unknown.
    """
    groups: dict[str, list[tuple[Cell, Question, CellAnswer | None]]] = {}
    for study in studies:
        answers = {answer.cell: answer for answer in study.answers}
        for cell in study.question.cells:
            title = f"{cell.settings.label} ({place(study.question)}; {provenance(study.question)})"
            groups.setdefault(title, []).append((cell, study.question, answers.get(cell)))
    return tuple(_published_group(title, entries) for title, entries in groups.items())


def published_text(table: TextTable) -> str:
    """A table of the published layout as it was published."""
    grid = (table.columns, *table.rows)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in grid
    ]
    return "\n".join((table.title, *lines))


def published_lines(study: Study) -> str:
    """The published final line of every cell."""
    answers = {answer.cell: answer for answer in study.answers}
    return "\n".join(
        published_line(study.question, cell, answers.get(cell)) for cell in study.question.cells
    )


def published_line(question: Question, cell: Cell, answer: CellAnswer | None) -> str:
    """The line that users of the published search parse; ``?`` when no trial told the capacity."""
    capacity = (
        "?" if answer is None or answer.capacity_tokens is None else str(answer.capacity_tokens)
    )
    memory_only = (
        ""
        if answer is None or answer.memory_only is None
        else f", memory_only_len = {answer.memory_only.length_tokens}"
    )
    return (
        f"model_name = {plain(question.model.name)}, trainer_gpu_num = {cell.layout.gpus}, "
        f"sp_num = {cell.layout.ulysses_degree}, max_model_len = {capacity}{memory_only}"
    )


def plain_table(table: TextTable) -> str:
    """The table in aligned columns, for a file or a pipe; never wrapped."""
    grid = (table.columns, *table.rows) if table.columns else table.rows
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column < table.left_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]
    return "\n".join(
        (table.title, "", *lines, *(("", *table.footnotes) if table.footnotes else ()))
    )


def capacity_text(
    question: Question,
    answer: CellAnswer | None,
    *,
    none: str = "none",
    unknown: str = "?",
    commas: bool = True,
) -> str:
    """A capacity in a table: ``65,536``, with ``*`` past the native length."""
    if answer is None or answer.capacity_tokens is None:
        return unknown
    if answer.capacity_tokens == 0:
        return none
    return _length_text(question, answer.capacity_tokens, commas=commas)


def memory_only_text(
    question: Question, answer: CellAnswer | None, *, none: str = "-", commas: bool = True
) -> str:
    """A length by memory-only proof: ``643,072* memory-only``.

    ``none`` where the capacity itself is the longest that fit.
    """
    if answer is None or answer.memory_only is None:
        return none
    return f"{_length_text(question, answer.memory_only.length_tokens, commas=commas)} memory-only"


def place(question: Question) -> str:
    """``NVIDIA H200, 79.15 GiB per GPU``: where the trials ran, and under which budget."""
    each = RANK_WORDS[question.device][0]
    if question.memory_budget_bytes is None:
        return f"{plain(question.device_name)}, the whole card"
    return f"{plain(question.device_name)}, {format_bytes(question.memory_budget_bytes)} per {each}"


def provenance(question: Question) -> str:
    """The label of every figure: measured by real trials, or simulated from a memory law."""
    return "simulated, nothing was trained" if question.simulated else "measured"


def _length_text(question: Question, length_tokens: int, *, commas: bool) -> str:
    figure = format_tokens(length_tokens) if commas else str(length_tokens)
    return f"{figure}{'*' if length_tokens > question.model.shape.native_length_tokens else ''}"


def _speed(result: TrialResult) -> tuple[tuple[str, str], ...]:
    """Rows of what a training shows, and a memory-only trial has not."""
    return (
        ("step time", format_seconds(result.step_time_s)),
        ("tokens/s", _per_second(result.tokens_per_s)),
        ("MFU", _percent(result.mfu)),
    )


def _answer_row(answer: CellAnswer, question: Question) -> tuple[str, ...]:
    proofs = (capacity_text(question, answer),)
    if question.proof == "memory":
        proofs += (memory_only_text(question, answer),)
    ended = _LIMITS[answer.limit]
    if answer.does_not_fit_tokens is not None:
        ended = f"{format_tokens(answer.does_not_fit_tokens)}: {ended}"
    return (
        *_names(answer.cell),
        *proofs,
        ended,
        format_bytes(answer.peak_reserved_bytes),
        format_bytes(answer.headroom_bytes),
        _per_second(answer.tokens_per_s),
        _percent(answer.mfu),
    )


def _unfinished_row(cell: Cell, study: Study) -> tuple[str, ...]:
    """The row of a cell without an answer that trials bear out.

    The longest length that fit so far, ``≥36,864``, is at most its capacity.
    """
    trained, memory_only = (
        study.longest_fit_tokens(cell, outcome)
        for outcome in (Outcome.FIT, Outcome.MEMORY_ONLY_FIT)
    )
    proofs = ("?" if trained is None else _at_least(study.question, trained),)
    if study.question.proof == "memory":
        beyond = memory_only if (memory_only or 0) > (trained or 0) else None
        proofs += ("-" if beyond is None else f"{_at_least(study.question, beyond)} memory-only",)
    ended = "not finished" if study.trials_of(cell) else "not searched yet"
    return (
        *_names(cell),
        *proofs,
        "unproven" if study.unproven_of(cell) else ended,
        "-",
        "-",
        "-",
        "-",
    )


def _names(cell: Cell) -> tuple[str, str, str]:
    return cell.settings.label, str(cell.layout.gpus), cell.layout.sharing


def _at_least(question: Question, length_tokens: int) -> str:
    return f"≥{_length_text(question, length_tokens, commas=True)}"


def _saves(result: TrialResult) -> str:
    """Every checkpoint, its bytes over all ranks and the time of the slowest.

    ``sharded 6.66 GiB in 4.10 s``.
    """
    names = {"sharded": "sharded", "hf": "Hugging Face"}
    each = zip(
        *(rank.saves for rank in result.ranks), strict=False
    )  # a rank that failed may have fewer
    return ", ".join(
        f"{names[parts[0].kind]} {format_bytes(sum(part.written_bytes for part in parts))} "
        f"in {format_seconds(max(part.time_s for part in parts))}"
        for parts in each
    )


def _per_second(tokens: float | None) -> str:
    return "-" if tokens is None else f"{tokens:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _footnotes(study: Study) -> list[str]:
    question = study.question
    native = question.model.shape.native_length_tokens
    notes: list[str] = []
    if any(tokens > native for tokens in _lengths_shown(study)):
        notes.append(f"* past the native length of {format_tokens(native)}: YaRN")
    if question.margin_bytes:
        notes.append(f"a length counts when it leaves {format_bytes(question.margin_bytes)}")
    if any(cell.settings.token_budget_tokens is not None for cell in question.cells):
        notes.append(NOT_MONOTONE)
    notes.extend(_budgets(study))
    notes.extend(_mixed_versions(study))
    for answer in study.answers:
        name = answer.cell.label_on(question.device)
        notes.append(f"{name}: {plain(answer.reason)}")
        notes.extend(f"{name}: not monotone: {plain(text)}" for text in answer.contradictions)
    notes.extend(_memory_only_notes(study))
    notes.extend(_high_water_mark(study))
    return notes


def _lengths_shown(study: Study) -> Iterator[int]:
    """Every length that a row says fit, by either proof."""
    answers = {answer.cell: answer for answer in study.answers}
    for cell in study.question.cells:
        if cell in answers:
            yield answers[cell].reach_tokens or 0
        else:
            yield from (
                study.longest_fit_tokens(cell, outcome) or 0
                for outcome in (Outcome.FIT, Outcome.MEMORY_ONLY_FIT)
            )


def _high_water_mark(study: Study) -> Iterator[str]:
    """The longest length of all cells; with ``≥`` where its cell is not finished."""
    capacities = {answer.cell: answer.capacity_tokens for answer in study.answers}
    longest = {
        cell: capacities[cell] if cell in capacities else study.longest_fit_tokens(cell)
        for cell in study.question.cells
    }
    best = max(longest, key=lambda cell: longest[cell] or 0)
    if longest[best]:
        figure = f"{'' if best in capacities else '≥'}{format_tokens(longest[best])}"
        label = "simulated" if study.question.simulated else "measured"
        yield f"high-water mark: {figure} tokens ({best.label_on(study.question.device)}), {label}"


def _memory_only_notes(study: Study) -> list[str]:
    """What each memory-only proof says, and which length was also trained in full.

    Peak to MFU in the table are that one's.
    """
    notes: list[str] = []
    for answer in study.answers:
        proof = answer.memory_only
        if proof is not None:
            trained = (
                f"{format_tokens(answer.capacity_tokens)} tokens"
                if answer.capacity_tokens
                else "no length"
            )
            peak, headroom = (
                format_bytes(proof.peak_reserved_bytes),
                format_bytes(proof.headroom_bytes),
            )
            notes.append(
                f"{answer.cell.label_on(study.question.device)}: memory-only proof of "
                f"{format_tokens(proof.length_tokens)} tokens, "
                f"{peak} at the peak, {headroom} of headroom: attention over whole documents in "
                f"the last layer only, "
                f"nothing trained; trained in full: {trained}"
            )
    return notes


def _budgets(study: Study) -> list[str]:
    """How the budget was divided on each number of GPUs; none on the CPU.

    Where trials differ, as in the first.
    """
    if study.question.device == "cpu":
        return []
    budgets: dict[int, MemoryBudget] = {}
    for trial in study.trials:
        for rank in trial.result.ranks if trial.result else ():
            if rank.budget is not None:
                budgets.setdefault(trial.spec.layout.gpus, rank.budget)
    return [
        f"{counted_ranks(gpus, 'cuda')}: {_division(budget)}"
        for gpus, budget in sorted(budgets.items())
    ]


def _mixed_versions(study: Study) -> list[str]:
    """What the trials of a resumed study did not all run under, in the order in which they ran."""
    mixed = [
        f"{name} {' and '.join(found)}" for name, found in study.versions.items() if len(found) > 1
    ]
    return [f"the trials ran under several versions: {plain('; '.join(mixed))}"] if mixed else []


def _division(budget: MemoryBudget) -> str:
    context, nccl, cap = map(
        format_bytes, (budget.context_bytes, budget.nccl_bytes, budget.allocator_cap_bytes)
    )
    return (
        f"{format_bytes(budget.budget_bytes)} = {context} context + {nccl} NCCL + {cap} for "
        f"the allocator"
    )


def _published_figure(question: Question, answer: CellAnswer | None) -> str:
    """``131072*``; with a memory-only proof ``131072* (643072* memory-only)``."""
    memory_only = memory_only_text(question, answer, none="", commas=False)
    return capacity_text(question, answer, none="-", commas=False) + (
        f" ({memory_only})" if memory_only else ""
    )


def _published_group(
    title: str, entries: Sequence[tuple[Cell, Question, CellAnswer | None]]
) -> TextTable:
    models = list(dict.fromkeys(plain(question.model.name) for _, question, _ in entries))
    layouts = sorted({(cell.layout.gpus, cell.layout.ulysses_degree) for cell, _, _ in entries})
    figures = {
        (
            cell.layout.gpus,
            cell.layout.ulysses_degree,
            plain(question.model.name),
        ): _published_figure(question, answer)
        for cell, question, answer in entries
    }
    return TextTable(
        title=title,
        columns=("#GPU", "SP", *models),
        rows=tuple(
            (str(gpus), str(sp), *(figures.get((gpus, sp, model), "?") for model in models))
            for gpus, sp in layouts
        ),
        left_columns=2 + len(models),
    )
