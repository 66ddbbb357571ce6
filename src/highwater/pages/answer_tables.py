"""Tables of what trials found, the answers of a study and one trial, and their figures in words."""

from collections.abc import Iterator, Sequence

import msgspec

from highwater.nouns.corpus import NOT_MONOTONE
from highwater.nouns.settings import short_settings
from highwater.nouns.study import (
    RANK_WORDS,
    Cell,
    CellAnswer,
    Limit,
    Question,
    Study,
    counted_ranks,
)
from highwater.nouns.trainer import ForeignTrainer
from highwater.nouns.trial import Device, MemoryBudget, Outcome, RankReport, TrialResult, TrialSpec
from highwater.pages.study_commands import alive_rows, brief, request_line
from highwater.pages.table import TextTable, plain_table
from highwater.pages.text import plain
from highwater.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_tokens,
)


def capacity_text(
    question: Question, answer: CellAnswer | None, *, none: str = "none", commas: bool = True
) -> str:
    """A capacity in a table: ``65,536``, with ``*`` past the native length."""
    if answer is None or answer.capacity_tokens is None:
        return "?"
    if answer.capacity_tokens == 0:
        return none
    return length_text(question, answer.capacity_tokens, commas=commas)


def memory_only_text(
    question: Question, answer: CellAnswer | None, *, none: str = "-", commas: bool = True
) -> str:
    """A length by memory-only proof: ``643,072* memory-only``. ``none`` where the capacity itself
    is the longest that fit.
    """
    if answer is None or answer.memory_only is None:
        return none
    return f"{length_text(question, answer.memory_only.length_tokens, commas=commas)} memory-only"


def place(question: Question) -> str:
    """``NVIDIA H200, 79.15 GiB per GPU``: where the trials ran, and under which budget."""
    each = RANK_WORDS[question.device][0]
    by = "" if question.foreign is None else f", trained by {question.foreign.title}"
    if question.memory_budget_bytes is None:
        return f"{plain(question.device_name)}, the whole card{by}"
    memory = f"{format_bytes(question.memory_budget_bytes)} per {each}"
    return f"{plain(question.device_name)}, {memory}{by}"


def provenance(question: Question) -> str:
    """The label of every figure: measured by real trials, or simulated from a memory law."""
    return "simulated, nothing was trained" if question.simulated else "measured"


def length_text(question: Question, length_tokens: int, *, commas: bool = True) -> str:
    """A length in a table: ``65,536``, with ``*`` past the native length."""
    figure = format_tokens(length_tokens) if commas else str(length_tokens)
    is_scaled = length_tokens > question.model.shape.native_length_tokens
    return f"{figure}{'*' if is_scaled and question.foreign is None else ''}"


def peak_name(device: Device, foreign: ForeignTrainer | None) -> str:
    """What a trial's peak is: what was sampled from outside says so."""
    if foreign is not None:
        return f"{'data segment' if device == 'cpu' else 'device used'}, sampled"
    return "peak data segment" if device == "cpu" else "peak reserved"


_LIMITS: dict[Limit, str] = {
    "memory": "out of memory",
    "host_memory": "host memory ran out",
    "ceiling": "the longest length tried",
    "time": "out of time",
    "inconclusive": "inconclusive",
}
_SAMPLED = "memory is sampled from outside, a shorter peak is missed"
OUTCOME_WORDS = {Outcome.MEMORY_ONLY_FIT: "memory-only fit: memory holds it, nothing was trained"}
"""Outcomes in more than their names."""


def answer_table(study: Study) -> TextTable:
    """The final table: for each cell its capacity, and what ended the search above it. The other
    figures are those at the capacity.
    """
    question = study.question
    memory = peak_name(question.device, question.foreign)
    return TextTable(
        title=f"{plain(question.model.name)} on {place(question)}: {provenance(question)}",
        columns=(
            *("settings", RANK_WORDS[question.device][1], "SP"),
            *(("capacity",) if question.proof == "full" else ("trained in full", "memory-only")),
            *("ended by", memory, "headroom", "tokens/s", "MFU"),
        ),
        rows=tuple(_answer_row(cell, study) for cell in question.cells),
        footnotes=tuple(_footnotes(study)),
    )


def trial_table(spec: TrialSpec, result: TrialResult) -> TextTable:
    """One trial: how it ended, and what was measured."""
    rank = result.ranks[0] if result.ranks else RankReport(rank=0)
    budget, foreign = rank.budget, spec.foreign
    speed = (  # what a memory-only trial has not
        ("step time", format_seconds(result.step_time_s)),
        ("tokens/s", format_rate(result.tokens_per_s)),
        ("MFU", format_share(result.mfu)),
    )
    allocator = [f"{name}={value}" for name, value in rank.allocator_settings.items()]
    line = request_line(result, spec.settings, spec.layout)
    alive = {} if line is None else alive_rows(result, spec.layout)
    rows = (
        ("outcome", OUTCOME_WORDS.get(result.outcome, str(result.outcome))),
        ("reason", result.reason),
        *((("out of memory", line), *alive.items()) if line is not None else ()),
        (peak_name(spec.device, spec.foreign), format_bytes(result.peak_reserved_bytes)),
        ("headroom", format_bytes(result.headroom_bytes)),
        *((("trainer", f"{foreign.title}{_typed(foreign)}"),) if foreign else ()),
        ("memory budget", _division(budget) if budget and spec.device != "cpu" else "-"),
        ("allocator", ", ".join(allocator) or "-"),
        ("attention", rank.attention_kernel or "-"),
        *(() if spec.is_memory_only else speed),
        ("saved", _saves(result) or "-"),
        ("launch to first step", format_seconds(result.launch_to_first_step_s)),
        ("log", result.log_path or "-"),
    )
    label = "simulated" if result.simulated else "measured"
    proof = ", memory-only" if spec.is_memory_only else ""
    return TextTable(
        title=f"{plain(spec.model_name)}, {format_tokens(spec.length_tokens)} tokens, "
        f"{short_settings(spec.settings)}: {label}{proof}",
        columns=(),
        rows=tuple((name, plain(text)) for name, text in rows),
        left_columns=2,
    )


def _answer_row(cell: Cell, study: Study) -> tuple[str, ...]:
    """The row of a cell; without an answer that trials bear out, the longest length that fit so
    far, ``≥36,864``, is at most its capacity.
    """
    question, answer = study.question, study.answer_of(cell)
    if answer is None:
        trained, memory_only = (
            study.longest_fit_tokens(cell, outcome)
            for outcome in (Outcome.FIT, Outcome.MEMORY_ONLY_FIT)
        )
        proofs = ["?" if trained is None else f"≥{length_text(question, trained)}", "-"]
        if memory_only is not None and memory_only > (trained or 0):
            proofs[1] = f"≥{length_text(question, memory_only)} memory-only"
        ended = "not finished" if study.trials_of(cell) else "not searched yet"
        figures = ("unproven" if study.unproven_of(cell) else ended, *"----")
    else:
        proofs = [capacity_text(question, answer), memory_only_text(question, answer)]
        fails = answer.does_not_fit_tokens
        ended = f"{'' if fails is None else f'{format_tokens(fails)}: '}{_LIMITS[answer.limit]}"
        figures = (
            *(ended, format_bytes(answer.peak_reserved_bytes), format_bytes(answer.headroom_bytes)),
            *(format_rate(answer.tokens_per_s), format_share(answer.mfu)),
        )
    names = (short_settings(cell.settings), str(cell.layout.gpus), cell.layout.sharing)
    return (*names, *proofs[: 1 + (question.proof == "memory")], *figures)


def _saves(result: TrialResult) -> str:
    """Every checkpoint, its bytes over all ranks and the time of the slowest."""
    names = {"sharded": "sharded", "hf": "Hugging Face"}
    # a rank that failed may have fewer
    each = zip(*(rank.saves for rank in result.ranks), strict=False)
    return ", ".join(
        f"{names[parts[0].kind]} {format_bytes(sum(part.written_bytes for part in parts))} "
        f"in {format_seconds(max(part.time_s for part in parts))}"
        for parts in each
    )


def _footnotes(study: Study) -> Iterator[str]:
    question = study.question
    native = question.model.shape.native_length_tokens
    if question.foreign is not None:
        yield f"trained by {question.foreign.title}{_typed(question.foreign)}; {_SAMPLED}"
    elif any(_reached(study, cell) > native for cell in question.cells):
        yield f"* past the native length of {format_tokens(native)}: YaRN"
    if question.margin_bytes:
        yield f"a length counts when it leaves {format_bytes(question.margin_bytes)}"
    if any(cell.settings.token_budget_tokens is not None for cell in question.cells):
        yield NOT_MONOTONE
    yield from _budgets(study)
    mixed = "; ".join(
        f"{name} {' and '.join(found)}" for name, found in study.versions.items() if len(found) > 1
    )
    if mixed:
        yield f"the trials ran under several versions: {plain(mixed)}"
    for answer in study.answers:
        name, why = answer.cell.label_on(question.device), plain(brief(answer.reason))
        for trial in study.trials_of(answer.cell):
            tokens = trial.spec.length_tokens
            if trial.result is not None and tokens == answer.does_not_fit_tokens:
                line = request_line(trial.result, answer.cell.settings, answer.cell.layout)
                why = why if line is None else f"{format_tokens(tokens)} tokens, {line}"
        yield f"{name}: {why}"
        yield from (f"{name}: not monotone: {plain(text)}" for text in answer.contradictions)
    yield from _memory_only_notes(study)
    yield from _high_water_mark(study)


def _typed(foreign: ForeignTrainer) -> str:
    return f": {plain(foreign.typed)}" if foreign.typed else ""


def _reached(study: Study, cell: Cell) -> int:
    """The longest length that a row says fits, by either proof; 0: none does."""
    answer = study.answer_of(cell)
    return (study.longest_fit_tokens(cell, None) if answer is None else answer.reach_tokens) or 0


def _high_water_mark(study: Study) -> Iterator[str]:
    """The longest length of all cells; with ``≥`` where its cell is not finished."""
    question = study.question
    longest = {cell: study.longest_fit_tokens(cell) for cell in question.cells}
    capacities = {answer.cell: answer.capacity_tokens for answer in study.answers}
    longest |= capacities
    best = max(longest, key=lambda cell: longest[cell] or 0)
    if longest[best]:
        figure = f"{'' if best in capacities else '≥'}{format_tokens(longest[best])} tokens"
        yield f"high-water mark: {figure} ({best.label_on(question.device)}), {question.figures}"


def _memory_only_notes(study: Study) -> Iterator[str]:
    """Say what each memory-only proof shows, and which length was also trained in full."""
    for answer in study.answers:
        proof = answer.memory_only
        if proof is not None:
            capacity, headroom = answer.capacity_tokens, format_bytes(proof.headroom_bytes)
            trained = f"{format_tokens(capacity)} tokens" if capacity else "no length"
            peak = format_bytes(proof.peak_reserved_bytes)
            yield (
                f"{answer.cell.label_on(study.question.device)}: memory-only proof of "
                f"{format_tokens(proof.length_tokens)} tokens, {peak} at the peak, {headroom} of "
                "headroom: attention over whole documents in the last layer only, nothing trained; "
                f"trained in full: {trained}"
            )


def _budgets(study: Study) -> Iterator[str]:
    """Say how the budget was divided on each number of GPUs; nothing on the CPU."""
    budgets: dict[int, MemoryBudget] = {}
    for trial in study.trials if study.question.device != "cpu" else ():
        for rank in trial.result.ranks if trial.result else ():
            if rank.budget is not None:
                budgets.setdefault(trial.spec.layout.gpus, rank.budget)
    for gpus, budget in sorted(budgets.items()):
        yield f"{counted_ranks(gpus, 'cuda')}: {_division(budget)}"


def _division(budget: MemoryBudget) -> str:
    whole, context, nccl = budget.budget_bytes, budget.context_bytes, budget.nccl_bytes
    return (
        f"{format_bytes(whole)} = {format_bytes(context)} context + {format_bytes(nccl)} NCCL + "
        f"{format_bytes(budget.allocator_cap_bytes)} for the allocator"
    )


def published_tables(studies: Sequence[Study]) -> tuple[TextTable, ...]:
    """The published layout, ``#GPU | SP | models``, for each rung and place. ``*`` is past the
    native length, ``-`` none, ``≥`` that no longer one failed. A figure that no trial told is left
    out, and a line without any.
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
    return plain_table(table, gap=" | ").replace("\n\n", "\n", 1)


def published_line(question: Question, cell: Cell, answer: CellAnswer | None) -> str | None:
    """The line that users of the published search parse; None when no trial told the capacity."""
    if answer is None or answer.capacity_tokens is None:
        return None
    proof = answer.memory_only
    memory_only = "" if proof is None else f", memory_only_len = {proof.length_tokens}"
    return (
        f"model_name = {plain(question.model.name)}, trainer_gpu_num = {cell.layout.gpus}, sp_num "
        f"= {cell.layout.ulysses_degree}, max_model_len = {answer.capacity_tokens}{memory_only}"
    )


def published_notes(question: Question, cell: Cell, answer: CellAnswer | None) -> tuple[str, ...]:
    """What a cell's line does not say, a number alone: that a longer length may fit, or of 0 that
    shorter ones were not tried, or why there is no line.
    """
    label = f"{plain(question.model.name)}, {cell.label_on(question.device)}"
    if answer is None or answer.capacity_tokens is None:
        why = "it has no answer" if answer is None else plain(answer.reason)
        return (f"{label}: no line, as no trial told its capacity: {why}",)
    if answer.reach_tokens == 0:
        return (
            f"{label}: 0: the start length itself, {question.grid.start_tokens:,} tokens, did not "
            f"fit, and nothing shorter was tried: ask again with a shorter start length",
        )
    least = "≥" if answer.is_at_least else ""
    return (f"{label}: {least}{answer.reach_tokens}: {plain(answer.reason)}",) if least else ()


def _published_figure(question: Question, answer: CellAnswer) -> str:
    """``131072*``, ``≥131072*``; with a memory-only proof ``131072* (643072* memory-only)``."""
    memory_only = memory_only_text(question, answer, none="", commas=False)
    least = "≥" if answer.is_at_least else ""
    capacity = capacity_text(question, answer, none="-", commas=False)
    return f"{capacity} ({least}{memory_only})" if memory_only else f"{least}{capacity}"


def _published_group(
    title: str, entries: Sequence[tuple[Cell, Question, CellAnswer | None]]
) -> TextTable:
    models = list(dict.fromkeys(plain(question.model.name) for _, question, _ in entries))
    figures = {
        (cell.layout, plain(question.model.name)): _published_figure(question, answer)
        for cell, question, answer in entries
        if answer is not None and answer.capacity_tokens is not None
    }
    layouts = sorted({layout for layout, _ in figures}, key=msgspec.structs.astuple)
    return TextTable(
        title=title,
        columns=("#GPU", "SP", *models),
        rows=tuple(
            (
                *(str(layout.gpus), layout.sharing),
                *(figures.get((layout, model), "") for model in models),
            )
            for layout in layouts
        ),
        left_columns=2 + len(models),
    )
