"""Candidates: every cell at one length, predicted with the default token budget and a lowered one,
the simplest first.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.interval.calibration import Calibration
from highwater.memory.question import default_fields, predicted_question
from highwater.memory.trainers import calibration_of, predict_by_formula
from highwater.nouns.cluster import Cluster
from highwater.nouns.hardware import kind_of
from highwater.nouns.objective import TRAITS
from highwater.nouns.recommendation import Candidate, StepTime, order
from highwater.nouns.request import DECLARED, setting_flags
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import TRAINERS, TrainerName
from highwater.trainers.trl_files import expressible


def trainer_question(
    model: str,
    where: Cluster,
    trainer: TrainerName,
    length_tokens: int | None,
    settings: dict[str, Any],
) -> tuple[Question, tuple[str, ...]]:
    """What ``predicted_question`` gives, less what the trainer's own configuration has no words
    for, which the notes say; raises UsageError, as a trial does, where nothing is left.
    """
    question, notes = predicted_question(model, where, trainer, length_tokens, settings)
    question, skipped = expressible(question, trainer)
    return question, (*notes, *skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is recommended for: a model and a length on some GPUs."""

    model: str
    where: Cluster
    trainer: TrainerName
    length_tokens: int
    memory_limit: MemoryLimit
    settings: Mapping[str, Any]
    """Fields of ``Request``, as for a prediction."""
    may_lower: bool = True
    """Whether a token budget below the default may be taken."""

    @property
    def sequences(self) -> int:
        """Sequences that the default token budget holds, as many as a prediction takes."""
        default = Settings().sequences_per_micro_batch
        named = {**default_fields(self.trainer, self.settings), **self.settings}
        return int(named.get("sequences_per_micro_batch", default))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Sequences of each token budget, the default first; pairs stay together."""
        traits = TRAITS.get(self.settings.get("objective", "sft"))  # another name is refused later
        least = 1 if traits is None else traits.documents_together
        lowered = min(self.sequences, least) if self.may_lower else self.sequences
        return tuple(dict.fromkeys((self.sequences, lowered)))

    def question(
        self, sequences: int, *, length_tokens: int | None
    ) -> tuple[Question, tuple[str, ...]]:
        """Every rung and degree with a token budget for ``sequences``, and its plan's notes."""
        settings = {**self.settings, "sequences_per_micro_batch": sequences}
        return trainer_question(self.model, self.where, self.trainer, length_tokens, settings)

    def known(self, question: Question) -> Calibration | None:
        """What the intervals of predictions are learned from."""
        return calibration_of(question, self.trainer)


def predicted_candidates(goal: Goal) -> tuple[Candidate, ...]:
    """Predict every cell with either budget, its longest length on the published grid."""
    found: list[Candidate] = []
    for sequences in goal.budgets:
        question, _ = goal.question(sequences, length_tokens=goal.length_tokens)
        known = goal.known(question)
        on_a_grid, _ = goal.question(sequences, length_tokens=None)
        here = predict_by_formula(question, goal.memory_limit, goal.trainer, known, asked="longest")
        longest = _longest(on_a_grid, goal.memory_limit, goal.trainer, known)
        # a length that is too short for some layouts has fewer cells than the grid
        by_cell = {each.cell: each for each in longest}
        found += (_candidate(goal, question, each, by_cell[each.cell]) for each in here)
    return tuple(sorted(found, key=lambda candidate: candidate.order))


def first_fit(goal: Goal) -> Candidate | None:
    """The simplest candidate that fits; its longest length is not looked for."""
    questions = [
        goal.question(sequences, length_tokens=goal.length_tokens)[0] for sequences in goal.budgets
    ]
    known = [goal.known(question) for question in questions]
    cells = [
        (order(cell, is_lowered=_is_lowered(goal, cell)), budget, cell)
        for budget, question in enumerate(questions)
        for cell in question.cells
    ]
    for _, budget, cell in sorted(cells, key=lambda each: each[0]):
        question = questions[budget]
        (predicted,) = predict_by_formula(
            msgspec.structs.replace(question, cells=(cell,)),
            goal.memory_limit,
            goal.trainer,
            known[budget],
            asked="fit",
        )
        if predicted.capacity_tokens:
            return _candidate(goal, question, predicted)
    return None


def token_budget(cell: Cell, length_tokens: int) -> int:
    """Tokens of a micro-batch for each GPU that hold the cell's sequences of this length."""
    return -(-cell.settings.sequences_per_micro_batch * length_tokens // cell.layout.context_degree)


def unknown_candidate(
    cell: Cell,
    token_budget_tokens: int,
    *,
    source: Literal["measured", "predicted"] = "predicted",
    found_in: str = "",
) -> Candidate:
    """A candidate of which nobody knows yet whether it fits."""
    return Candidate(
        cell=cell,
        is_lowered=False,
        token_budget_tokens=token_budget_tokens,
        fits=False,
        source=source,
        found_in=found_in,
        headroom_bytes=None,
        capacity_tokens=0,
        capacity_source=source,
    )


@lru_cache(maxsize=64)
def _longest(
    question: Question, memory_limit: MemoryLimit, trainer: TrainerName, known: Calibration | None
) -> tuple[CellPrediction, ...]:
    """The longest length of every cell: the same whatever length is asked, so kept for a guide."""
    return predict_by_formula(question, memory_limit, trainer, known, asked="longest")


def _candidate(
    goal: Goal, question: Question, predicted: CellPrediction, longest: CellPrediction | None = None
) -> Candidate:
    fits = predicted.capacity_tokens > 0
    host_bytes, step = predicted.footprint.host_bytes, predicted.step
    lacks_bytes = None
    if not fits and predicted.binding == "host":
        lacks_bytes = host_bytes - (goal.memory_limit.host_bytes or 0)
    elif not fits:
        lacks_bytes = predicted.lacks_bytes
    return Candidate(
        cell=predicted.cell,
        is_lowered=_is_lowered(goal, predicted.cell),
        token_budget_tokens=token_budget(predicted.cell, goal.length_tokens),
        fits=fits,
        risk=predicted.risk,
        source="predicted",
        found_in=_command(goal, question, predicted.cell),
        headroom_bytes=predicted.headroom_bytes,
        lacks_bytes=lacks_bytes,
        lacks_of=None if fits else "host" if predicted.binding == "host" else "device",
        host_bytes=host_bytes,
        capacity_tokens=max(longest.capacity_tokens if longest else 0, predicted.capacity_tokens),
        capacity_source="predicted",
        is_at_least=longest is None or longest.binding == "ceiling",
        step_time=step
        and StepTime(
            time_s=step.time_s,
            source="predicted",
            step_tokens=step.step_tokens,
            tokens_per_s=step.tokens_per_s,
            measured_length_tokens=None,
        ),
    )


def _is_lowered(goal: Goal, cell: Cell) -> bool:
    return cell.settings.sequences_per_micro_batch < goal.sequences


def _command(goal: Goal, question: Question, cell: Cell) -> str:
    """The command that predicts this cell again."""
    where, memory_limit, settings = goal.where, goal.memory_limit, cell.settings
    kind = kind_of(where.device_name)
    words = ["highwater", "predict", goal.model, "--gpus", where.typed]
    if kind is None or kind.usable_bytes != where.device_bytes:
        words += ["--gpu-memory", str(where.device_bytes)]
    traits = TRAINERS[goal.trainer]
    if traits.knows_every_setting:
        words += setting_flags(settings)
    elif traits.is_run:
        words += ["--trainer", goal.trainer]
        words += setting_flags(settings, but_not=traits.refused(DECLARED))
    else:
        words += ["--trainer", goal.trainer, "--allocator", settings.allocator]
        words += ["--offload"] if settings.offloads_model else []
        words += ["--sequences-per-micro-batch", str(settings.sequences_per_micro_batch)]
        words += [] if settings.rope == "auto" else ["--rope", settings.rope]
    limits = {
        "--reserved": where.device_bytes - memory_limit.device_bytes,
        "--host-memory": 0 if memory_limit.usual_host else memory_limit.host_bytes or 0,
    }
    words += [word for flag, value in limits.items() if value for word in (flag, str(value))]
    if "headroom" in goal.settings:
        words += ["--headroom", str(question.margin_bytes)]
    if goal.settings.get("prompt_tokens"):
        words += ["--prompt-tokens", str(question.prompt_tokens)]
    words += ["--length", str(goal.length_tokens), *cell.layout.degree_flags]
    return shlex.join(words)
