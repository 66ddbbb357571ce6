"""Candidates: every cell at one length, with the default token budget and with a lowered one, predicted; the simplest first."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from highwater.prediction.asked import calibration_of, predict_by_formula, predicted_question
from highwater.prediction.calibration import Calibration
from highwater.prediction.capacity import CellPrediction, Room
from highwater.spec.cluster import Cluster
from highwater.spec.events import Trainer
from highwater.spec.hardware import kind_of
from highwater.spec.model import STATE_BYTES_PER_PARAMETER
from highwater.spec.published import PUBLISHED_SETTINGS
from highwater.spec.recommendation import Candidate
from highwater.spec.request import setting_flags
from highwater.spec.study import Cell, Question

DEFAULT_SEQUENCES = PUBLISHED_SETTINGS["vanilla"].sequences_per_micro_batch
"""That the default token budget holds, ``ceil(2 x length / SP)``. Source: Trinity-RFT's ``max_token_len_per_gpu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is recommended for: a model and a length on some GPUs."""

    model: str
    where: Cluster
    trainer: Trainer
    length_tokens: int
    room: Room
    settings: Mapping[str, Any]
    """Fields of ``Request``, as for a prediction."""

    @property
    def sequences(self) -> int:
        """That the default token budget holds."""
        return int(self.settings.get("sequences_per_micro_batch", DEFAULT_SEQUENCES))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Sequences that each token budget holds, the default first: a reward model is trained on pairs."""
        least = 2 if self.settings.get("objective") == "rw" else 1
        return tuple(dict.fromkeys((self.sequences, min(self.sequences, least))))

    def question(self, sequences: int, *, length_tokens: int | None) -> tuple[Question, tuple[str, ...]]:
        """Every rung and degree with a token budget for this many sequences; and the notes of its plan."""
        settings = {**self.settings, "sequences_per_micro_batch": sequences}
        return predicted_question(self.model, self.where, self.trainer, length_tokens, settings)

    def known(self, question: Question) -> Calibration | None:
        """What the intervals are learned from."""
        return calibration_of(question, self.room, self.trainer)


def predicted_candidates(asked: Asked) -> tuple[Candidate, ...]:
    """Every cell with either budget; what each trains at the longest is on the published grid."""
    found: list[Candidate] = []
    for sequences in asked.budgets:
        question, _ = asked.question(sequences, length_tokens=asked.length_tokens)
        known = asked.known(question)
        on_a_grid, _ = asked.question(sequences, length_tokens=None)
        here = predict_by_formula(question, asked.room, asked.trainer, known)
        longest = _longest(on_a_grid, asked.room, asked.trainer, known)
        found += (_candidate(asked, question, a, b) for a, b in zip(here, longest, strict=True))
    return tuple(sorted(found, key=lambda candidate: candidate.order))


def first_fit(asked: Asked) -> Candidate | None:
    """The simplest that fits; what it trains at the longest is not asked."""
    found = (
        _candidate(asked, question, predicted)
        for question in _at_length(asked)
        for predicted in predict_by_formula(question, asked.room, asked.trainer, asked.known(question))
        if predicted.capacity_tokens
    )
    return min(found, key=lambda candidate: candidate.order, default=None)


def token_budget(cell: Cell, length_tokens: int) -> int:
    """Tokens of a micro-batch for each GPU that hold the cell's sequences of this length."""
    return -(-cell.settings.sequences_per_micro_batch * length_tokens // cell.layout.context_degree)


@lru_cache(maxsize=64)
def _longest(question: Question, room: Room, trainer: Trainer, known: Calibration | None) -> tuple[CellPrediction, ...]:
    """The same whatever length is asked about: who asks about many, as a guide does, waits once."""
    return predict_by_formula(question, room, trainer, known)


def _at_length(asked: Asked) -> Iterator[Question]:
    for sequences in asked.budgets:
        yield asked.question(sequences, length_tokens=asked.length_tokens)[0]


def _candidate(asked: Asked, question: Question, predicted: CellPrediction, longest: CellPrediction | None = None) -> Candidate:
    fits = predicted.capacity_tokens > 0
    host_bytes = predicted.footprint.host_bytes
    lacks_bytes = None
    if not fits and predicted.binding == "host":
        lacks_bytes = host_bytes - (asked.room.host_bytes or 0)
    elif not fits:
        lacks_bytes = question.margin_bytes - predicted.headroom_bytes
    return Candidate(
        cell=predicted.cell,
        is_lowered=predicted.cell.settings.sequences_per_micro_batch < asked.sequences,
        token_budget_tokens=token_budget(predicted.cell, asked.length_tokens),
        fits=fits,
        source="predicted",
        found_in=_command(asked, question, predicted.cell),
        headroom_bytes=predicted.headroom_bytes,
        lacks_bytes=lacks_bytes,
        lacks_of=None if fits else "host" if predicted.binding == "host" else "device",
        host_bytes=host_bytes,
        capacity_tokens=max(longest.capacity_tokens if longest else 0, predicted.capacity_tokens),
        capacity_source="predicted",
        is_at_least=longest is None or longest.binding == "ceiling",
    )


def _command(asked: Asked, question: Question, cell: Cell) -> str:
    """What predicts this cell again."""
    where, room, settings = asked.where, asked.room, cell.settings
    states = room.state_bytes_per_parameter
    is_known = (kind := kind_of(where.device_name)) is not None and kind.usable_bytes == where.device_bytes
    words = ["highwater", "predict", asked.model, "--gpus", f"{where.gpus}x{where.device_name}" if kind else str(where.gpus)]
    words += [] if is_known else ["--gpu-memory", str(where.device_bytes)]
    if asked.trainer == "highwater":
        words += setting_flags(settings)
    else:
        words += ["--trainer", asked.trainer, "--allocator", settings.allocator, *(["--offload"] if settings.offload else [])]
        words += ["--sequences-per-micro-batch", str(settings.sequences_per_micro_batch)]
        words += [] if settings.rope == "auto" else ["--rope", settings.rope]
    limits = (
        ("--margin", question.margin_bytes),
        ("--reserved", where.device_bytes - room.device_bytes),
        ("--host-memory", room.host_bytes or 0),
        ("--state-bytes-per-param", 0 if states == STATE_BYTES_PER_PARAMETER else states),
    )
    words += [word for flag, value in limits if value for word in (flag, str(value))]
    return shlex.join((*words, "--length", str(asked.length_tokens), "--ulysses", str(cell.layout.ulysses_degree)))
