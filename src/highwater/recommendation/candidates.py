"""Candidates: every cell at one length, with the default token budget and a lowered one, the
simplest first; and the queries that ``recommend`` accepts for a study, a prediction or a capacity.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, Literal

from highwater.errors import ModelError, UsageError
from highwater.memory.capacity import NOT_MODELLED, CellPrediction, MemoryLimit, Prediction
from highwater.memory.interval.calibration import Calibration
from highwater.memory.question import assumed_attention, predicted_question, with_most_share
from highwater.memory.trainers import MEMORY, calibration_of, predict_untraced
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.capacities import Capacity
from highwater.nouns.cells import simplicity
from highwater.nouns.cluster import Cluster, nameless
from highwater.nouns.declaration import words_of
from highwater.nouns.hardware import kind_of
from highwater.nouns.objective import TRAITS, RolloutRequest
from highwater.nouns.recommendation import Candidate, Query, Recommendation, StepTime
from highwater.nouns.request import DECLARED, setting_flags, taken_by
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, Study, counted_ranks
from highwater.nouns.trainer import TRAINERS, TrainerName, predicted_trainer


def trainer_question(
    model: str,
    where: Cluster,
    trainer: TrainerName,
    length_tokens: int | None,
    settings: dict[str, Any],
    *,
    is_file: bool = False,
) -> tuple[Question, tuple[str, ...]]:
    """The question and notes of ``predicted_question``, without cells that the trainer's
    configuration cannot express, which notes name. Unless the number of sequences in a micro-batch
    is named, or the user's file is predicted, every cell is there with the trainer's and with the
    fewest. Raises UsageError if no cell is left.
    """
    question, said = predicted_question(model, where, trainer, length_tokens, settings)
    usual, named = question.cells[0].settings, {"sequences_per_micro_batch", "token_budget"}
    together = usual.traits.documents_together
    if usual.sequences_per_micro_batch > together and not is_file and named.isdisjoint(settings):
        fewer = (e.changed(sequences_per_micro_batch=together) for e in question.cells)
        cells = tuple(sorted((*question.cells, *fewer), key=simplicity))
        question = question.replace(cells=cells)
    refuse = MEMORY[trainer].refuse
    if refuse is None:
        return question, said
    kept: list[Cell] = []
    refused: list[UsageError] = []
    notes = list(said)
    for cell in question.cells:
        try:
            spec = question.trial(cell, question.grid.start_tokens)
            refuse(spec, question.model.shape)
        except UsageError as error:
            refused.append(error)
            ranks = f"{counted_ranks(cell.layout.gpus, question.device)}{cell.layout.suffix}"
            notes.append(f"{ranks} is skipped: {error.problem}")
        else:
            kept.append(cell)
    if not kept:
        raise refused[0]
    return question.replace(cells=tuple(kept)), tuple(dict.fromkeys(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a recommendation is about: a model, a length, GPUs, a trainer and settings."""

    model: str
    where: Cluster
    trainer: TrainerName
    length_tokens: int
    memory_limit: MemoryLimit
    settings: Mapping[str, Any]
    """Fields of ``Request``, as for ``predict``."""
    may_lower: bool = True
    """True if a token budget below the default may be taken."""
    _questions: dict[tuple[int, int | None], tuple[Question, tuple[str, ...]]] = field(
        default_factory=dict, init=False, compare=False
    )
    """Questions by sequences and length: each is planned once."""

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch by default, as a prediction takes them."""
        named = {**MEMORY[self.trainer].fixed_fields(self.settings), **self.settings}
        least = 1 if "token_budget" in named else self._together
        return int(named.get("sequences_per_micro_batch", least))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Sequences a micro-batch may have, the default first; pairs stay together."""
        lowered = min(self.sequences, self._together) if self.may_lower else self.sequences
        return tuple(dict.fromkeys((self.sequences, lowered)))

    @property
    def _together(self) -> int:
        """Documents that the objective must keep in one micro-batch."""
        traits = TRAITS.get(self.settings.get("objective", "sft"))  # others are refused later
        return 1 if traits is None else traits.documents_together

    def question(
        self, sequences: int, *, length_tokens: int | None
    ) -> tuple[Question, tuple[str, ...]]:
        """The question with every cell, for micro-batches of ``sequences``; and notes."""
        key = sequences, length_tokens
        if key not in self._questions:
            settings = {**self.settings, "sequences_per_micro_batch": sequences}
            asked = self.model, self.where, self.trainer, length_tokens, settings
            self._questions[key] = trainer_question(*asked)
        return self._questions[key]

    def known(self, question: Question) -> Calibration | None:
        """What intervals of a question are learned from; None without recorded trials."""
        return calibration_of(question, self.trainer)


def trainers_gpus(where: Cluster, rollout_gpus: int) -> Cluster:
    """The GPUs without those for rollout; raises UsageError if none is left."""
    if rollout_gpus < 0:
        raise UsageError(f"{rollout_gpus} GPUs for rollout", hint="use `--rollout-gpus 0` or more")
    if rollout_gpus and where.machines > 1:
        one = where.on_one_machine()
        rollout = min(rollout_gpus, max(1, one.gpus // 2))
        raise UsageError(
            f"GPUs for rollout are set aside of one machine, and {where.gpus} are of several",
            hint=f"use `--gpus {one.typed} --rollout-gpus {rollout}`",
        )
    if rollout_gpus >= where.gpus:
        fewer = f"use `--rollout-gpus {where.gpus - 1}` or fewer"
        hint = fewer if where.gpus > 1 else "leave `--rollout-gpus` out"
        have = counted_ranks(where.gpus, "cuda")
        raise UsageError(
            f"{have}, {rollout_gpus} for rollout: none is left for the trainer", hint=hint
        )
    return where.replace(gpus=where.gpus - rollout_gpus)


def predicted_candidates(goal: Goal) -> tuple[Candidate, ...]:
    """Every cell as a candidate, with the usual and with fewer sequences, and how far it goes."""
    found: list[Candidate] = []
    for sequences in goal.budgets:
        question, _ = goal.question(sequences, length_tokens=goal.length_tokens)
        known = goal.known(question)
        on_a_grid, _ = goal.question(sequences, length_tokens=None)
        here = predict_untraced(question, goal.memory_limit, goal.trainer, known, extent="longest")
        longest = _longest(on_a_grid, goal.memory_limit, goal.trainer, known)
        # a length that is too short for some layouts has fewer cells than the grid
        by_cell = {each.cell: each for each in longest}
        found += (candidate_of(goal, each, by_cell[each.cell]) for each in here)
    return tuple(sorted(found, key=lambda candidate: candidate.order))


def first_fit(goal: Goal) -> Candidate | None:
    """Simplest candidate that fits, else one that may; how far it goes is not looked for."""
    may_fit: Candidate | None = None
    every = [
        (simplicity(cell), question, known, cell)
        for sequences in goal.budgets
        for question, _ in (goal.question(sequences, length_tokens=goal.length_tokens),)
        for known in (goal.known(question),)
        for cell in question.cells
    ]
    for _, question, known, cell in sorted(every, key=itemgetter(0)):
        one = question.replace(cells=(cell,))
        (found,) = predict_untraced(one, goal.memory_limit, goal.trainer, known, extent="fit")
        if found.capacity_tokens or (may_fit is None and found.risk in ("likely", "tight")):
            may_fit = candidate_of(goal, found)
        if found.capacity_tokens:
            break
    return may_fit


def predicted_at(goal: Goal, cell: Cell, length_tokens: int | None) -> CellPrediction:
    """Prediction of a cell at a length; None: at the longest that it trains on the grid."""
    sequences = cell.settings.sequences_per_micro_batch
    question, _ = goal.question(sequences, length_tokens=length_tokens)
    question = question.replace(cells=(cell,))
    return _longest(question, goal.memory_limit, goal.trainer, goal.known(question))[0]


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
    """A candidate of a cell of which nobody knows whether it fits."""
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


_longest = lru_cache(maxsize=64)(partial(predict_untraced, extent="longest"))
"""The longest length of every cell; kept, as it is the same for every length of a guide."""


def candidate_of(
    goal: Goal, predicted: CellPrediction, longest: CellPrediction | None = None
) -> Candidate:
    """A predicted cell as a candidate; ``longest`` is its prediction without a length."""
    fits = predicted.capacity_tokens > 0
    host_bytes, step = predicted.footprint.host_bytes, predicted.step
    rollout = predicted.footprint.rollout
    may = max((e for e in (longest, predicted) if e), key=lambda e: e.likely_edge_tokens)
    may = None if fits or (longest and longest.capacity_tokens) else may
    lacks_bytes = None
    if not fits and predicted.binding == "host":
        lacks_bytes = predicted.footprint.host_needed_bytes - (goal.memory_limit.host_bytes or 0)
    elif not fits:
        lacks_bytes = predicted.lacks_bytes
    return Candidate(
        cell=predicted.cell,
        is_lowered=predicted.cell.settings.sequences_per_micro_batch < goal.sequences,
        token_budget_tokens=token_budget(predicted.cell, goal.length_tokens),
        fits=fits,
        risk=predicted.risk,
        source="predicted",
        found_in=_command(goal, predicted.cell),
        headroom_bytes=predicted.headroom_bytes,
        peak_bytes=predicted.peak_bytes,
        lacks_bytes=lacks_bytes,
        lacks_of=None if fits else "host" if predicted.binding == "host" else "device",
        host_bytes=host_bytes,
        rollout_sequences=rollout and rollout.sequences,
        capacity_tokens=max(longest.capacity_tokens if longest else 0, predicted.capacity_tokens),
        likely_tokens=0 if may is None else may.likely_edge_tokens,
        likely_risk=may and may.risk,
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


def recommendation_of(
    goal: Goal, question: Question, candidates: tuple[Candidate, ...], **told: Any
) -> Recommendation:
    """The recommendation for a goal: its candidates, of which the first that fits is chosen.
    ``told``: other fields of the recommendation, such as ``accuracy``.
    """
    rope, limit = question.cells[0].settings.rope, goal.memory_limit
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    cell = question.cells[0] if chosen is None else chosen.cell
    if chosen is not None and limit.rollout is not None:
        alone = question.replace(cells=(cell,))
        limit = with_most_share(alone, limit, goal.trainer, goal.known(question))
    return Recommendation(
        model_name=question.model.name,
        native_length_tokens=question.grid.native_length_tokens,
        trainer=goal.trainer,
        length_tokens=goal.length_tokens,
        gpus=goal.where.gpus,
        device_name=goal.where.device_name,
        device_bytes=goal.where.device_bytes,
        host_memory_bytes=limit.host_bytes,
        usual_host=limit.usual_host,
        rollout=limit.rollout,
        margin_bytes=question.margin_bytes,
        default_sequences=goal.sequences,
        chosen=chosen,
        candidates=candidates,
        yarn=yarn(question.model, length_tokens=goal.length_tokens, rope=rope),
        assumed=assumed_attention(question, cell, goal.length_tokens, goal.trainer),
        not_modelled=NOT_MODELLED,
        **told,
    )


def _command(goal: Goal, cell: Cell) -> str:
    """The command that predicts this cell again."""
    where, memory_limit, settings = goal.where, goal.memory_limit, cell.settings
    kind = kind_of(where.device_name)
    words = ["highwater", "predict", goal.model, "--gpus", where.typed]
    if kind is None or kind.usable_bytes != where.device_bytes:
        words += ["--gpu-memory", str(where.device_bytes)]
    traits = TRAINERS[goal.trainer]
    if traits.settings is None:
        words += setting_flags(settings)
    elif traits.traces != "bundled":
        words += ["--trainer", goal.trainer]
        words += setting_flags(settings, but_not=traits.refused(DECLARED))
    else:
        words += ["--trainer", goal.trainer, "--allocator", settings.allocator]
        words += ["--offload"] if settings.offloads_model else []
        words += ["--sequences-per-micro-batch", str(settings.sequences_per_micro_batch)]
        words += [] if settings.rope == "auto" else ["--rope", settings.rope]
    more = {
        "reserved": where.device_bytes - memory_limit.device_bytes or None,
        "host_memory": None if memory_limit.usual_host else memory_limit.host_bytes or None,
        "headroom": goal.settings.get("headroom"),
        "prompt_tokens": goal.settings.get("prompt_tokens") or None,
        "length": goal.length_tokens,
    }
    if memory_limit.rollout is not None and not memory_limit.rollout.own_gpus:
        more |= {name: goal.settings.get(name) for name in RolloutRequest.__struct_fields__}
    degrees = cell.layout.degree_settings
    more |= {name: degrees[name] for name in degrees if not traits.refused([name])}
    return shlex.join((*words, *words_of({n: v for n, v in more.items() if v is not None})))


_RECOMMENDED = ("allocator", "loss", "offload", "activations")
"""Settings that differ among candidates."""
_ASKED = {
    row.sets: row
    for row in taken_by("recommend")
    if row.name not in _RECOMMENDED and row.sets in Settings.__struct_fields__
}
"""Other settings of a rung that ``recommend`` can be asked for, by the rung's field."""
_NOT_ASKED = tuple(
    field for field in Settings.__struct_fields__ if field not in (*_ASKED, *_RECOMMENDED)
)
"""Fields of a rung that it cannot be asked for."""


def query_of_study(study: Study) -> Query | None:
    """The question to ask ``recommend`` about a study's model and GPUs; None: it has no words."""
    question, kind = study.question, kind_of(study.question.device_name)
    if question.foreign is not None:
        return None
    names = (question.model.name, question.model.directory)
    model = _model_words(names, question.model.config_digest)
    settings = _settings(question.cells)
    if model is None or kind is None or settings is None or question.data is not None:
        return None
    margin = (("headroom", question.margin_bytes),) if question.margin_bytes else ()
    return Query(
        model=model,
        kind=kind.name,
        gpu_memory_bytes=question.memory_budget_bytes,
        studies=() if study.path is None else (study.path,),
        settings=(*settings, *margin),
    )


def query_of_prediction(prediction: Prediction, model: str | None = None) -> Query | None:
    """The query for a prediction's model and GPUs; None if ``recommend`` cannot express it, as for
    a prediction by trace. ``model`` is the user's name of the model.
    """
    kind = kind_of(prediction.device_name)
    words = _model_words((model or prediction.model_name,), prediction.config_digest)
    cells = tuple(each.cell for each in prediction.cells)
    settings = _settings(cells)
    if TRAINERS[prediction.trainer].traces == "bundled":  # its only setting
        has_yarn = any(cell.settings.rope == "yarn" for cell in cells)
        settings = (("rope", "yarn"),) if has_yarn else ()
    is_nameless = prediction.device_name == nameless(prediction.device_bytes)
    if words is None or settings is None or prediction.method == "trace":
        return None
    if any(cell.layout.is_several_machines for cell in cells):  # they are no part of a query
        return None
    if kind is None and not is_nameless:
        return None
    is_whole = kind is not None and kind.usable_bytes == prediction.device_bytes
    margin = () if prediction.has_default_headroom else (("headroom", prediction.margin_bytes),)
    return Query(
        model=words,
        kind=None if kind is None else kind.name,
        gpu_memory_bytes=None if is_whole else prediction.device_bytes,
        reserved_bytes=prediction.device_bytes - prediction.memory_limit.device_bytes,
        trainer=prediction.trainer,
        settings=(*settings, *margin),
    )


def query_of_table(capacity: Capacity) -> Query | None:
    """The question to ask ``recommend`` about a published row; None: it is not predicted."""
    kind = kind_of(capacity.device_name)
    trainer = predicted_trainer(capacity.trainer)
    if kind is None or trainer is None:
        return None
    return Query(model=capacity.model_name, kind=kind.name, trainer=trainer)


def _model_words(names: Sequence[str], config_digest: str | None) -> str | None:
    """The first of the names that loads the model with this digest; None: no name does."""
    for name in names:
        with suppress(ModelError):
            if config_digest in (None, load_model(name).config_digest):
                return name
    return None


def _settings(cells: Sequence[Cell]) -> tuple[tuple[str, str | int | bool], ...] | None:
    """Non-default settings that all cells share; None if ``recommend`` has no name for some."""
    if any(not cell.settings.named.isdisjoint(_NOT_ASKED) for cell in cells):
        return None
    found: list[tuple[str, str | int | bool]] = []
    for name, row in _ASKED.items():
        values = {getattr(cell.settings, name) for cell in cells}
        if len(values) == 1 and name in cells[0].settings.named:
            found.append((row.name, row.typed_for(values.pop())))
    return tuple(found)
