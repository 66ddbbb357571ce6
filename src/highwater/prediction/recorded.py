"""Recorded: what a study's trials say of a candidate: whether its length fits, what is left of the GPU, the time of a step."""

from math import log

import msgspec

from highwater.prediction.capacity import Room
from highwater.spec.capacities import OF_MEMORY, cell_capacities
from highwater.spec.flops import step_flops
from highwater.spec.hardware import kind_of
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, Model
from highwater.spec.recommendation import Candidate, StepTime
from highwater.spec.study import CellAnswer, RecordedTrial, Study
from highwater.spec.trial import Outcome
from highwater.units import format_bytes

_SAME_MEMORY = 0.02
"""Share that two GPUs' memories may differ by and still be the same: drivers keep back a little."""


def obstacle(study: Study, *, model: Model, device_name: str, room: Room, margin_bytes: int) -> str | None:
    """Why a study says nothing of a model on such GPUs, in words; None when it does."""
    question = study.question
    if question.simulated:
        return "its trials were simulated: nothing was measured"
    if question.device != "cuda":
        return "its trials ran on the CPU"
    if question.model.config_digest != model.config_digest:
        return f"its model is {question.model.name}, or that name with another config"
    if _kind(question.device_name) != _kind(device_name):
        return f"its GPUs are {question.device_name}"
    memory_bytes = question.memory_budget_bytes or question.device_total_bytes
    if memory_bytes is None or abs(memory_bytes / room.device_bytes - 1) > _SAME_MEMORY:
        return f"its trials had {format_bytes(memory_bytes)} of each GPU, and {format_bytes(room.device_bytes)} are asked about"
    if question.data is not None:
        return "its trials read data of their own"
    if room.state_bytes_per_parameter != STATE_BYTES_PER_PARAMETER:
        return "its trials had float32 states with AdamW, and others are asked about"
    if question.margin_bytes != margin_bytes:
        return f"its lengths leave {format_bytes(question.margin_bytes)}, and {format_bytes(margin_bytes)} are asked for"
    return None


def as_measured(candidate: Candidate, study: Study, length_tokens: int) -> Candidate | None:
    """The candidate as the study's trials have it; None where they do not tell of this length in this cell."""
    answer = next((answer for answer in study.answers if answer.cell == candidate.cell), None)
    if answer is None or answer.capacity_tokens is None:
        return None
    known = [fits for each in cell_capacities(study, answer.cell) if (fits := each.fits(length_tokens)) is not None]
    if not known:
        return None
    fits = any(known)
    headroom_bytes, headroom_length_tokens = _headroom(study, answer, length_tokens) if fits else (None, None)
    is_memory_only = fits and not _is_trained(study, answer, length_tokens)
    return msgspec.structs.replace(
        candidate,
        fits=fits,
        source="measured",
        found_in=study.path or "a study",
        is_memory_only=is_memory_only,
        headroom_bytes=headroom_bytes,
        headroom_length_tokens=headroom_length_tokens,
        lacks_bytes=None,
        lacks_of=None if fits else "host" if answer.limit == "host_memory" else "device",
        capacity_tokens=max(answer.reach_tokens or 0, length_tokens if fits else 0),
        capacity_source="measured",
        is_at_least=answer.limit not in OF_MEMORY,
        step_time=step_time(study, candidate, length_tokens),
    )


def step_time(study: Study, candidate: Candidate, length_tokens: int) -> StepTime | None:
    """From the trial of the cell that trained the nearest length: measured there, and elsewhere predicted at the same FLOP/s."""
    timed = [trial for trial in study.trials_of(candidate.cell) if _speed(trial)]
    if not timed:
        return None
    nearest = min(timed, key=lambda trial: abs(log(trial.spec.length_tokens / length_tokens)))
    spec, tokens_per_s = nearest.spec, _speed(nearest)
    sequences = spec.micro_batches * candidate.cell.settings.sequences_per_micro_batch * spec.layout.data_parallel_degree

    def flops(tokens: int) -> int:
        return step_flops(study.question.model.shape, length_tokens=tokens, sequences=sequences, settings=spec.settings)

    measured_s = sequences * spec.length_tokens / tokens_per_s
    return StepTime(
        time_s=measured_s * flops(length_tokens) / flops(spec.length_tokens),
        source="measured" if spec.length_tokens == length_tokens else "predicted",
        step_tokens=sequences * length_tokens,
        tokens_per_s=tokens_per_s,
        measured_length_tokens=spec.length_tokens,
    )


def _is_trained(study: Study, answer: CellAnswer, length_tokens: int) -> bool:
    trained = any(
        trial.result is not None and trial.result.outcome is Outcome.FIT for trial in _trials(study, answer, length_tokens)
    )
    return trained or length_tokens <= (answer.capacity_tokens or 0)


def _headroom(study: Study, answer: CellAnswer, length_tokens: int) -> tuple[int | None, int | None]:
    """That the shortest fit of this length or above left, which leaves no more, and its length; without one, the answer's."""
    fits = [
        (trial.spec.length_tokens, trial.result.headroom_bytes)
        for trial in study.trials_of(answer.cell)
        if trial.result is not None and study.question.counts_as_fit(trial.result) and trial.result.headroom_bytes is not None
    ]
    left = min((fit for fit in fits if fit[0] >= length_tokens), default=None)
    if left is not None:
        return left[1], left[0]
    if length_tokens <= (answer.capacity_tokens or 0):
        return answer.headroom_bytes, answer.capacity_tokens
    return (None, None) if answer.memory_only is None else (answer.memory_only.headroom_bytes, answer.memory_only.length_tokens)


def _trials(study: Study, answer: CellAnswer, length_tokens: int) -> list[RecordedTrial]:
    return [trial for trial in study.trials_of(answer.cell) if trial.spec.length_tokens == length_tokens]


def _speed(trial: RecordedTrial) -> float:
    """Tokens a second of a trial that trained in full; 0 where nobody measured it."""
    result = trial.result
    if result is None or result.outcome is not Outcome.FIT or trial.spec.is_memory_only:
        return 0.0
    return result.tokens_per_s or 0.0


def _kind(device_name: str) -> str:
    kind = kind_of(device_name)
    return device_name if kind is None else kind.name
