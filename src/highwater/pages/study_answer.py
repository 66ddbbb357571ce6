"""The answer of a study: in a sentence or two (longest length, GPUs, settings, headroom, speed), as
a table, and in the published layout; one trial as a table; and, before a search, its expected
trials. Notes below tables are in ``answer.txt.j2``.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress

import msgspec

from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.nouns.corpus import NOT_MONOTONE
from highwater.nouns.layout import Layout
from highwater.nouns.plan import Plan
from highwater.nouns.settings import settings_in_words, shared_training, short_settings
from highwater.nouns.study import (
    RANK_WORDS,
    Cell,
    CellAnswer,
    Limit,
    Question,
    Study,
    counted_ranks,
)
from highwater.nouns.trial import MemoryBudget, Outcome, RankReport, TrialResult, TrialSpec
from highwater.pages.page import template_lines
from highwater.pages.study_commands import alive_rows, brief, request_line
from highwater.pages.table import TextTable, field_text, plain_table, values_table
from highwater.pages.text import plain
from highwater.search.budget import CellOutlook, expected_s, outlook
from highwater.units import format_bytes, format_rate, format_seconds, format_share, format_tokens


def study_answer(study: Study) -> str:
    """Sentences on the longest length that a model trains, by the trials so far."""
    question = study.question
    answer = max(study.answers, key=_reach, default=None)
    unanswered = [cell for cell in question.cells if study.answer_of(cell) is None]
    so_far = {cell: study.longest_fit_tokens(cell, None) or 0 for cell in unanswered}
    unfinished = max(unanswered, key=lambda cell: so_far[cell], default=None)
    if unfinished is not None and so_far[unfinished] > (0 if answer is None else _reach(answer)):
        return _at_least(study, unfinished, so_far[unfinished])
    if answer is None or answer.reach_tokens is None:
        return f"Not known yet: no trial of {plain(question.model.name)} told what fits."
    if answer.reach_tokens == 0:
        return _nothing(study)
    return _sentences(study, answer)


def _sentences(study: Study, answer: CellAnswer) -> str:
    """Sentences on the longest length, its proof and its figures. The simplest settings come first
    if they reach the native length (on the fewest GPUs that do), else last.
    """
    question, reach = study.question, answer.reach_tokens or 0
    model, proof, left = plain(question.model.name), answer.memory_only, partial(_left, question)
    how, known = _how(question, answer.cell, reach), (_speed(answer), _end(answer))

    def trained(each: CellAnswer, *more: str) -> str:
        tokens, where = each.reach_tokens or 0, f"on {_place(question, each.cell)}"
        said = f"{model} trains up to {format_tokens(tokens)} tokens {where}, {question.figures}"
        figures = _sentence(left(each.headroom_bytes), *more)
        return f"{said}, with {_how(question, each.cell, tokens)}.{figures}"

    if proof is None:
        simple = _simplest(study, answer)
        if simple is None:
            return trained(answer, *known)
        if (simple.reach_tokens or 0) < question.model.shape.native_length_tokens:
            plainly = settings_in_words(simple.cell.settings, simple.cell.layout)
            shorter = f" With {plainly} {format_tokens(simple.reach_tokens or 0)}."
            return f"{trained(answer, *known)}{shorter}"
        longest, device = f"{_or_longer(question, answer)}{format_tokens(reach)}", question.device
        is_alike = answer.cell.layout.gpus == simple.cell.layout.gpus
        by = f" with {how}" if is_alike else f": {answer.cell.label_on(device)}"
        figures = _sentence(left(answer.headroom_bytes), *known)
        return f"{trained(simple, _speed(simple))} The longest is {longest} tokens{by}.{figures}"
    full = "no length was trained in full"
    if answer.capacity_tokens:
        full = f"trained in full was {format_tokens(answer.capacity_tokens)}"
        full += f", at {_speed(answer)}" if _speed(answer) else ""
    return (
        f"Memory holds {model} at {format_tokens(reach)} tokens on "
        f"{_place(question, answer.cell)}, {question.figures} by memory-only trials, "
        f"with {how}; {full}.{_sentence(left(proof.headroom_bytes), _end(answer))}"
    )


def _simplest(study: Study, best: CellAnswer) -> CellAnswer | None:
    """Answer of the simplest settings that reach less than ``best``: those on the fewest GPUs that
    reach the native length, else on as many GPUs as ``best``. None if there is none.
    """
    native = study.question.model.shape.native_length_tokens
    answers = [each for each in map(study.answer_of, study.question.cells) if each is not None]
    alike = (each for each in answers if each.cell.layout.gpus == best.cell.layout.gpus)
    plainest = next((each for each in alike if each.reach_tokens), best)
    native_first = next((each for each in answers if _reach(each) >= native), best)
    found = native_first if _reach(native_first) < _reach(best) else plainest
    return found if _reach(found) < _reach(best) and found.memory_only is None else None


def _nothing(study: Study) -> str:
    question = study.question
    cell = question.cells[-1]
    shortest = format_tokens(question.grid.length(1))
    left = len(question.cells) - len(study.answers)
    others = f" {left} of {len(question.cells)} searches are not finished." if left else ""
    return (
        f"No: {plain(question.model.name)} does not train at {shortest} tokens on "
        f"{_place(question, cell)}, {question.figures}, with any of the settings tried.{others}"
    )


def _at_least(study: Study, cell: Cell, length_tokens: int) -> str:
    question = study.question
    failed = (
        trial.spec.length_tokens
        for trial in study.trials_of(cell)
        if trial.result is not None and trial.result.outcome.is_memory
    )
    above = min((length for length in failed if length > length_tokens), default=None)
    end = "" if above is None else f", and does not at {format_tokens(above)}"
    return (
        f"{plain(question.model.name)} fits at {format_tokens(length_tokens)} tokens{end}, on "
        f"{_place(question, cell)}, {question.figures}, with "
        f"{_how(question, cell, length_tokens)}; the search in between is not finished."
    )


def _how(question: Question, cell: Cell, length_tokens: int) -> str:
    """Settings and degrees in words, with predicted bytes in host memory, and YaRN if used."""
    place, prompt_tokens = (cell.settings, cell.layout, length_tokens), question.prompt_tokens
    step = Step(question.model.shape, *place, question.device, prompt_tokens)
    on_host, is_scaled = upper_footprint(step).host_bytes, _is_scaled(question, length_tokens)
    return settings_in_words(cell.settings, cell.layout, host_bytes=on_host, is_scaled=is_scaled)


def _is_scaled(question: Question, length_tokens: int) -> bool:
    """True if this engine scales positions at that length; other trainers decide by themselves."""
    return question.foreign is None and length_tokens > question.model.shape.native_length_tokens


def _rank(question: Question) -> str:
    return RANK_WORDS[question.device][0]


def _place(question: Question, cell: Cell) -> str:
    count, budget_bytes = cell.layout.gpus, question.memory_budget_bytes
    if question.device == "cpu":
        where = f"{count} {RANK_WORDS['cpu'][count != 1]} on the CPU"
    else:
        where = f"{count} x {plain(question.device_name)}"
    if budget_bytes is not None:
        where += f" with {format_bytes(budget_bytes)}"
    return where if question.foreign is None else f"{where} by {question.foreign.title}"


def _left(question: Question, headroom_bytes: int | None) -> str:
    each = _rank(question)
    if headroom_bytes is None:
        return ""
    if headroom_bytes < 0:  # the bound of another trainer is partial
        over = f"{format_bytes(-headroom_bytes)} more of each {each} was taken"
        return f"{over} than it was given, outside PyTorch's allocator"
    return f"{format_bytes(headroom_bytes)} of each {each} is left"


def _speed(answer: CellAnswer) -> str:
    return "" if answer.tokens_per_s is None else f"{answer.tokens_per_s:,.0f} tokens/s"


def _end(answer: CellAnswer) -> str:
    """Text on why the search ended above the longest length."""
    if answer.does_not_fit_tokens is not None:
        return f"{format_tokens(answer.does_not_fit_tokens)} ran out of memory"
    return {
        "ceiling": "no longer length was tried",
        "time": "longer ones take too long to tell",
    }.get(answer.limit, "trials of longer ones only crashed")


def _sentence(*parts: str) -> str:
    said = "; ".join(part for part in parts if part)
    return f" {said[0].upper()}{said[1:]}." if said else ""


def _reach(answer: CellAnswer) -> int:
    return -1 if answer.reach_tokens is None else answer.reach_tokens


_MOST_LINES = 12
"""Most cells that are listed one by one."""
_LONGER = 4
"""Factor of the larger budget that is suggested."""


def outlook_lines(planned: Plan, *, is_resumed: bool) -> tuple[str, ...]:
    """Lines on the trials that a search expects, if they take time; ``is_resumed``: some exist."""
    question = planned.question
    if question.simulated:
        return ()
    cells = outlook(question, planned.timeout_s)
    lines = [f"{_outlook_line(planned, cells)}{' (less what is recorded)' if is_resumed else ''}"]
    lines += [f"  {_of_cell(question, cell)}" for cell in cells[:_MOST_LINES]]
    more = len(cells) - _MOST_LINES
    return (*lines, *([f"  and {more} more"] if more > 0 else []))


def _outlook_line(planned: Plan, cells: Sequence[CellOutlook]) -> str:
    """Line on the number of searches, and the time that they will take and may take."""
    what, in_all_s = f"{len(cells)} search{'' if len(cells) == 1 else 'es'}", expected_s(cells)
    takes = (
        f"nobody knows beforehand how long a trial takes on {plain(planned.question.device_name)}"
        if in_all_s is None
        else f"about {format_seconds(in_all_s)} in all"
    )
    in_full = ""
    if planned.question.proof == "memory":
        in_full = (
            f"; a length whose trial would take more than {format_seconds(planned.timeout_s)} in "
            "full is proven by a memory-only trial"
        )
    if planned.budget_s is None:
        return f"{what}, {takes}{in_full}"
    more = f"`--budget {_LONGER * planned.budget_s / 60:.0f}m` gives more"
    ends = f"ends after {format_seconds(planned.budget_s)} at the latest, {more}"
    return f"{what}, {takes}; {ends}{in_full}"


def _of_cell(question: Question, cell: CellOutlook) -> str:
    how = ""
    if question.proof == "memory" and cell.edge_s is not None:
        how = ", memory-only" if cell.memory_only else ", in full"
    full = "" if cell.full_tokens is None else f", then {format_tokens(cell.full_tokens)} in full"
    takes = "" if cell.expected_s is None else f": about {format_seconds(cell.expected_s)}"
    name = cell.cell.label_on(question.device)
    return f"{name}: from {format_tokens(cell.first_tokens)} tokens{how}{full}{takes}"


def capacity_text(
    question: Question, answer: CellAnswer | None, *, none: str = "none", commas: bool = True
) -> str:
    """A capacity in a table: ``65,536``, with ``*`` past the native length; ``?``: unknown."""
    if answer is None or answer.capacity_tokens is None:
        return "?"
    if answer.capacity_tokens == 0:
        return none
    return length_text(question, answer.capacity_tokens, commas=commas)


def memory_only_text(question: Question, answer: CellAnswer | None, *, commas: bool = True) -> str:
    """A memory-only length, ``643,072* memory-only``; empty if no such length is longer."""
    if answer is None or answer.memory_only is None:
        return ""
    return f"{length_text(question, answer.memory_only.length_tokens, commas=commas)} memory-only"


def place(question: Question) -> str:
    """GPUs of a study's trials, and their memory budget: ``NVIDIA H200, 79.15 GiB per GPU``."""
    memory = "the whole card"
    if question.memory_budget_bytes is not None:
        memory = f"{format_bytes(question.memory_budget_bytes)} per {_rank(question)}"
    by = "" if question.foreign is None else f", trained by {question.foreign.title}"
    return f"{plain(question.device_name)}, {memory}{by}"


def provenance(question: Question) -> str:
    """Label of a study's figures: measured by real trials, or simulated from a memory law."""
    return "simulated, nothing was trained" if question.simulated else "measured"


def length_text(question: Question, length_tokens: int, *, commas: bool = True) -> str:
    """A length in a table: ``65,536``, with ``*`` past the native length."""
    figure = format_tokens(length_tokens) if commas else str(length_tokens)
    return f"{figure}{'*' if _is_scaled(question, length_tokens) else ''}"


def peak_name(asked: Question | TrialSpec) -> str:
    """Return the name of the memory peak that trials report: ``peak reserved``, on the CPU
    ``peak data segment`` or, for another trainer, what was sampled from outside.
    """
    if asked.foreign is not None:
        return f"{'data segment' if asked.device == 'cpu' else 'device used'}, sampled"
    return "peak data segment" if asked.device == "cpu" else "peak reserved"


def proven_lengths(question: Question, answer: CellAnswer) -> tuple[str, str]:
    """Texts of the length trained in full and of the memory-only one. ``≥`` is before the longer
    one if no longer length was tried although one could be.
    """
    or_longer, trained = _or_longer(question, answer), capacity_text(question, answer)
    if answer.memory_only is None:
        return f"{or_longer}{trained}", "-"
    return trained, f"{or_longer}{memory_only_text(question, answer)}"


def _or_longer(question: Question, answer: CellAnswer) -> str:
    """``≥`` if no longer length failed although one could be tried; else empty."""
    native, is_end = question.model.shape.native_length_tokens, answer.limit == "ceiling"
    is_last = is_end and answer.reach_tokens == native  # as for a model with a scaling of its own
    return "≥" if answer.is_at_least and not is_last else ""


_LIMITS: dict[Limit, str] = {
    "memory": "out of memory",
    "host_memory": "host memory ran out",
    "ceiling": "the longest length tried",
    "time": "out of time",
    "inconclusive": "inconclusive",
}


def answer_table(study: Study) -> TextTable:
    """Table of each cell's capacity, its measured figures, and why its search ended."""
    question = study.question
    trained = shared_training(cell.settings for cell in question.cells)
    named = f", {trained}" if trained else ""
    columns = (
        *("settings", RANK_WORDS[question.device][1], "Ulysses"),
        *(("capacity",) if question.proof == "full" else ("trained in full", "memory-only")),
        *("ended by", peak_name(question), "headroom", "tokens/s", "MFU"),
    )
    rows = [_answer_row(cell, study, trained) for cell in question.cells]
    known = [{*column} != {"-"} for column in zip(*rows, strict=True)]
    return TextTable(
        title=f"{plain(question.model.name)} on {place(question)}{named}: {provenance(question)}",
        columns=tuple(compress(columns, known)),
        rows=tuple(tuple(compress(row, known)) for row in rows),
        footnotes=_footnotes(study),
        spare=("ended by", peak_name(question), "headroom"),
    )


def trial_answer(spec: TrialSpec, result: TrialResult) -> str:
    """Sentence on whether the trial trained its length, on which GPUs and with which settings."""
    model, how = plain(spec.model_name), settings_in_words(spec.settings, spec.layout)
    first = f"Yes: {model} trains" if result.outcome.is_fit else f"No: {model} does not train"
    if not result.outcome.tells:
        first = f"{result.outcome}, so that nobody knows whether {model} trains"
    by = "simulated, nothing was trained" if result.simulated else "measured"
    ranks = counted_ranks(spec.layout.gpus, spec.device)
    return f"{first} {format_tokens(spec.length_tokens)} tokens on {ranks} with {how}: {by}."


def trial_table(spec: TrialSpec, result: TrialResult) -> TextTable:
    """Table of one trial: its outcome and measurements."""
    label = "simulated" if result.simulated else "measured"
    proof = ", memory-only" if spec.is_memory_only else ""
    lines = template_lines(
        "answer.txt.j2",
        "trial",
        spec=spec,
        result=result,
        rank=result.ranks[0] if result.ranks else RankReport(rank=0),
        request=request_line(result, spec.settings, spec.layout),
        alive=alive_rows(result, spec.layout),
        peak_name=peak_name(spec),
        speed=format_rate(result.tokens_per_s),
        mfu=format_share(result.mfu),
        # checkpoints by number; a rank that failed may have fewer
        saves=list(zip(*(rank.saves for rank in result.ranks), strict=False)),
    )
    title = (
        f"{plain(spec.model_name)}, {format_tokens(spec.length_tokens)} tokens, "
        f"{short_settings(spec.settings)}: {label}{proof}"
    )
    return values_table(title, [each for each in lines if not each.endswith(": -")], columns=())


def _answer_row(cell: Cell, study: Study, but: str) -> tuple[str, ...]:
    """A cell's row; without a proven answer, the longest length that fit so far: ``≥36,864``."""
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
        proofs = [*proven_lengths(question, answer)]
        fails = answer.does_not_fit_tokens
        ended = f"{'' if fails is None else f'{format_tokens(fails)}: '}{_LIMITS[answer.limit]}"
        names = ("peak_reserved_bytes", "headroom_bytes", "tokens_per_s", "mfu")
        figures = (ended, *(field_text(answer, name) for name in names))
    names = (short_settings(cell.settings, but=but), str(cell.layout.gpus), cell.layout.sharing)
    return (*names, *proofs[: 1 + (question.proof == "memory")], *figures)


def _footnotes(study: Study) -> tuple[str, ...]:
    question, reached = study.question, [_reach(answer) for answer in study.answers]
    unanswered = [cell for cell in question.cells if study.answer_of(cell) is None]
    reached += [study.longest_fit_tokens(cell, None) or 0 for cell in unanswered]
    budgets: dict[int, MemoryBudget] = {}
    for trial in study.trials if question.device != "cpu" else ():
        for rank in trial.result.ranks if trial.result else ():
            if rank.budget is not None:
                budgets.setdefault(trial.spec.layout.gpus, rank.budget)
    return template_lines(
        "answer.txt.j2",
        "footnotes",
        study=study,
        reached_tokens=max(reached, default=0),
        not_monotone=NOT_MONOTONE,
        budgets=sorted(budgets.items()),
        best=max(study.answers, key=_reach, default=None),
        reasons=[(each, _reason(study, each)) for each in study.answers],
    )


def _reason(study: Study, answer: CellAnswer) -> str:
    """Reason of an answer; if a trial ran out of memory, with the request that failed."""
    why = brief(answer.reason)
    for trial in study.trials_of(answer.cell):
        tokens = trial.spec.length_tokens
        if trial.result is not None and tokens == answer.does_not_fit_tokens:
            line = request_line(trial.result, answer.cell.settings, answer.cell.layout)
            why = why if line is None else f"{format_tokens(tokens)} tokens, {line}"
    return why


def published_tables(studies: Sequence[Study]) -> tuple[TextTable, ...]:
    """Tables in the published layout, ``#GPU | SP | models``, by rung and GPUs: ``*`` past the
    native length, ``-`` none fits, ``≥`` no longer length failed. Unknown capacities are left out.
    """
    groups: dict[str, dict[str, dict[Layout, str]]] = {}
    for study in studies:
        question, model = study.question, plain(study.question.model.name)
        for cell in question.cells:
            title = f"{cell.settings.label} ({place(question)}; {provenance(question)})"
            figures = groups.setdefault(title, {}).setdefault(model, {})
            answer = study.answer_of(cell)
            if answer is not None and answer.capacity_tokens is not None:
                memory_only = memory_only_text(question, answer, commas=False)
                least = "≥" if answer.is_at_least else ""
                capacity = capacity_text(question, answer, none="-", commas=False)
                both = f"{capacity} ({least}{memory_only})"  # ``131072* (643072* memory-only)``
                figures[cell.layout] = both if memory_only else f"{least}{capacity}"
    return tuple(
        layout_table(title, figures, heads=("#GPU", "SP"), names=2 + len(figures))
        for title, figures in groups.items()
    )


def layout_table(
    title: str, figures: Mapping[str, Mapping[Layout, str]], *, heads: tuple[str, str], names: int
) -> TextTable:
    """Table with a row for each layout and a column for each model; ``figures``: by both."""
    layouts = {layout for own in figures.values() for layout in own}
    return TextTable(
        title=title,
        columns=(*heads, *figures),
        rows=tuple(
            (str(each.gpus), each.sharing, *(own.get(each, "") for own in figures.values()))
            for each in sorted(layouts, key=msgspec.structs.astuple)
        ),
        left_columns=names,
    )


def published_text(table: TextTable) -> str:
    """Draw a table as the published guides do."""
    return plain_table(table, gap=" | ").replace("\n\n", "\n", 1)


def published_line(question: Question, cell: Cell, answer: CellAnswer | None) -> str | None:
    """The final line that scripts around the published search parse; None without a capacity."""
    if answer is None or answer.capacity_tokens is None:
        return None
    proof = answer.memory_only
    memory_only = "" if proof is None else f", memory_only_len = {proof.length_tokens}"
    return (
        f"model_name = {plain(question.model.name)}, trainer_gpu_num = {cell.layout.gpus}, sp_num "
        f"= {cell.layout.ulysses_degree}, max_model_len = {answer.capacity_tokens}{memory_only}"
    )


def published_notes(question: Question, cell: Cell, answer: CellAnswer | None) -> tuple[str, ...]:
    """Notes on what a cell's published line leaves out, or on why there is no line."""
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
