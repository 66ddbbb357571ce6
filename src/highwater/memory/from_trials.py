"""Candidates judged by a study's trials: whether each fits, its headroom, the time of its step."""

from collections.abc import Sequence
from math import log
from typing import Literal

from highwater.memory.capacity import MemoryLimit
from highwater.model.held_bytes import step_flops
from highwater.model.model import Model
from highwater.nouns.capacities import Capacity, cell_capacities
from highwater.nouns.hardware import SAME_MEMORY, kind_name
from highwater.nouns.recommendation import Candidate, StepTime
from highwater.nouns.study import Cell, RecordedTrial, Study
from highwater.nouns.trainer import OURS, AnyTrainer
from highwater.nouns.trial import Outcome
from highwater.units import format_bytes


def obstacle(
    study: Study,
    model: Model,
    device_name: str,
    memory_limit: MemoryLimit,
    trainer: AnyTrainer = OURS,
) -> str | None:
    """Reason why a study does not count for a model on these GPUs; None if it does."""
    question, foreign = study.question, study.question.foreign
    theirs: AnyTrainer = OURS if foreign is None else foreign.trainer
    if theirs != trainer and foreign is not None:
        return f"its trainer is {foreign.title}; `--trainer {theirs}` recommends from it"
    if theirs != trainer:
        return "its trainer is this package's engine"
    if question.simulated:
        return "its trials were simulated: nothing was measured"
    if question.device != "cuda":
        return "its trials ran on the CPU"
    if question.model.config_digest != model.config_digest:
        return f"its model is {question.model.name}, or that name with another config"
    if kind_name(question.device_name) != kind_name(device_name):
        return f"its GPUs are {question.device_name}"
    memory_bytes = question.memory_bytes
    if memory_bytes is None or abs(memory_bytes / memory_limit.device_bytes - 1) > SAME_MEMORY:
        return (
            f"its trials had {format_bytes(memory_bytes)} of each GPU, and "
            f"{format_bytes(memory_limit.device_bytes)} are asked about"
        )
    if question.data is not None:
        return "its trials read data of their own"
    return None


def with_margin(study: Study, margin_bytes: int) -> Study:
    """The study judged with another headroom: only trials that left ``margin_bytes`` fit."""
    if study.question.margin_bytes == margin_bytes:
        return study
    question = study.question.replace(margin_bytes=margin_bytes)
    return study.replace(question=question, answers=(), unproven=())


def as_measured(candidate: Candidate, study: Study, length_tokens: int) -> Candidate | None:
    """The candidate with a study's measurements; None if no trial shows whether it fits."""
    if candidate.cell not in study.question.cells:
        return None
    capacities = cell_capacities(study, candidate.cell)
    known = [fits for each in capacities if (fits := each.fits(length_tokens)) is not None]
    if not known:
        return None
    fits, cell = any(known), candidate.cell
    headroom = _headroom(study, cell, length_tokens) if fits else (None, None)
    longest = max(each.capacity_tokens for each in capacities)
    return candidate.replace(
        fits=fits,
        risk=None,
        source="measured",
        found_in=study.path or "a study",
        is_memory_only=fits and not _is_trained(study, capacities, length_tokens),
        headroom_bytes=headroom[0],
        headroom_length_tokens=headroom[1],
        lacks_bytes=None if fits else _lacked_bytes(study, cell, length_tokens),
        lacks_of=None if fits else _lacks_of(study, cell),
        capacity_tokens=max(longest, length_tokens if fits else 0),
        capacity_source="measured",
        is_at_least=all(each.does_not_fit_tokens is None for each in capacities),
        step_time=step_time(study, candidate, length_tokens) or candidate.step_time,
    )


def step_time(study: Study, candidate: Candidate, length_tokens: int) -> StepTime | None:
    """Time of a step at a length, from the cell's trial of the nearest length: measured if that is
    the length itself, else predicted at the same FLOP/s. None if no trial was timed.
    """
    timed = [trial for trial in study.trials_of(candidate.cell) if _speed(trial)]
    if not timed:
        return None
    nearest = min(timed, key=lambda trial: abs(log(trial.spec.length_tokens / length_tokens)))
    spec, tokens_per_s = nearest.spec, _speed(nearest)
    shape, settings = study.question.model.shape, spec.settings
    sequences = spec.micro_batches * candidate.cell.settings.sequences_per_micro_batch
    sequences *= spec.layout.data_parallel_degree

    def flops(tokens: int) -> int:
        return step_flops(shape, length_tokens=tokens, sequences=sequences, settings=settings)

    measured_s = sequences * spec.length_tokens / tokens_per_s
    return StepTime(
        time_s=measured_s * flops(length_tokens) / flops(spec.length_tokens),
        source="measured" if spec.length_tokens == length_tokens else "predicted",
        step_tokens=sequences * length_tokens,
        tokens_per_s=tokens_per_s,
        measured_length_tokens=spec.length_tokens,
    )


def _is_trained(study: Study, capacities: Sequence[Capacity], length_tokens: int) -> bool:
    """True if a full trial of this length, or of a longer one, trained it."""
    trained = any(
        trial.result is not None and trial.result.outcome is Outcome.FIT
        for trial in study.trials_of(capacities[0].cell)
        if trial.spec.length_tokens == length_tokens
    )
    return trained or any(
        length_tokens <= each.capacity_tokens for each in capacities if not each.is_memory_only
    )


def _lacks_of(study: Study, cell: Cell) -> Literal["device", "host"]:
    """Return whose memory a study found too small, a GPU's or the host's, by answer or trials."""
    answer = study.answer_of(cell)
    if answer is not None:
        return "host" if answer.limit == "host_memory" else "device"
    outcomes = {trial.result.outcome for trial in study.trials_of(cell) if trial.result is not None}
    is_host = Outcome.HOST_OUT_OF_MEMORY in outcomes and Outcome.OUT_OF_MEMORY not in outcomes
    return "host" if is_host else "device"


def _headroom(study: Study, cell: Cell, length_tokens: int) -> tuple[int | None, int | None]:
    """Headroom in bytes and length in tokens of the shortest fit of at least this length, which
    itself leaves no less. Without such a fit, those of the study's answer; None if unknown.
    """
    fits = [
        (trial.spec.length_tokens, trial.result.headroom_bytes)
        for trial in study.trials_of(cell)
        if trial.result is not None
        and study.question.counts_as_fit(trial.result)
        and trial.result.headroom_bytes is not None
    ]
    left = min((fit for fit in fits if fit[0] >= length_tokens), default=None)
    if left is not None and left[1] < 0:  # watched from outside, where a bound is the allocator's
        return None, None
    answer = study.answer_of(cell)
    if left is not None:
        return left[1], left[0]
    if answer is not None and length_tokens <= (answer.capacity_tokens or 0):
        return answer.headroom_bytes, answer.capacity_tokens
    if answer is None or answer.memory_only is None:
        return None, None
    return answer.memory_only.headroom_bytes, answer.memory_only.length_tokens


def _lacked_bytes(study: Study, cell: Cell, length_tokens: int) -> int | None:
    """Bytes of headroom that the longest trial up to here lacked; None if none, or unknown."""
    told = [
        (trial.spec.length_tokens, trial.result)
        for trial in study.trials_of(cell)
        if trial.result is not None
        and trial.result.outcome.tells
        and trial.spec.length_tokens <= length_tokens
    ]
    if not told or any(result.outcome.is_memory for _, result in told):
        return None
    left_bytes = max(told, key=lambda each: each[0])[1].headroom_bytes
    if left_bytes is None or left_bytes >= study.question.margin_bytes:
        return None
    return study.question.margin_bytes - left_bytes


def _speed(trial: RecordedTrial) -> float:
    """Tokens per second of a trial that trained in full; 0.0 if it did not, or was not timed."""
    result = trial.result
    if result is None or result.outcome is not Outcome.FIT or trial.spec.is_memory_only:
        return 0.0
    return result.tokens_per_s or 0.0
