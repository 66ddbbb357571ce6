"""Figures of a search in words: a capacity, a length by memory-only proof, where and how found."""

from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.study import RANK_WORDS, CellAnswer, Question
from highwater.nouns.trial import Device
from highwater.pages.text import plain
from highwater.units import format_bytes, format_tokens


def capacity_text(
    question: Question,
    answer: CellAnswer | None,
    *,
    none: str = "none",
    commas: bool = True,
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
    """A length by memory-only proof: ``643,072* memory-only``.

    ``none`` where the capacity itself is the longest that fit.
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
