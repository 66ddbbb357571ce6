"""Planner: find the fastest plan that trains a length, or the plan with the lowest memory per GPU,
by formula. Plans are a search's cells, each with recomputed layers, recomputed attention or, for
speed, no recomputation, some of the last layers' activations on the GPU, and head groups.

Two monotone facts rule out most plans (tests/unit/test_recommendation.py compares with all). Each
further layer with activations on the GPU takes more GPU memory, less host memory, and no more time;
each further head group takes more time, and no more memory.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction
from highwater.memory.trainers import predict_untraced
from highwater.nouns.cells import simplicity
from highwater.nouns.plan import IN_HEAD_GROUPS
from highwater.nouns.recommendation import Aim, Candidate
from highwater.nouns.settings import Recompute
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import OURS
from highwater.recommendation.candidates import Goal, candidate_of, predicted_at
from highwater.speed import predicted_step, rates_of

_RECOMPUTED: dict[Aim, tuple[Recompute, ...]] = {
    "fastest": ("none", "layer", "all-but-attention"),
    "lightest": ("layer", "all-but-attention"),
}


def planned_candidates(goal: Goal, aim: Aim) -> tuple[Candidate, ...]:
    """The best plan of each kind (offload, activations, recompute, layout), the best first, also of
    kinds where none fits. UsageError: another trainer, or GPUs of unknown speed.
    """
    if goal.trainer != OURS:
        raise UsageError(
            f"plans are of our own step, and {goal.trainer} is asked about",
            hint=f"leave `--{aim}` or `--trainer` out",
        )
    if aim == "fastest" and rates_of(goal.where.device_name) is None:
        raise UsageError(
            f"nobody knows how fast {goal.where.device_name} computes",
            hint="use `--lightest`, or leave `--fastest` out",
        )
    found: dict[tuple[Any, ...], _PlannedCell] = {}
    for sequences in goal.budgets:
        question, _ = goal.question(sequences, length_tokens=goal.length_tokens)
        search = _PlanSearch(goal, question)
        for cell in chain.from_iterable(search.variants(each, aim) for each in question.cells):
            plan = search.best(cell, aim)
            settings = plan.cell.settings
            kind = (settings.offload, settings.activations, settings.recompute, cell.layout)
            if kind not in found or plan.key(aim) < found[kind].key(aim):
                found[kind] = plan
    return tuple(plan.candidate(goal) for plan in sorted(found.values(), key=partial(_place, aim)))


class _PlannedCell(NamedTuple):
    """A predicted cell with the time of its step, whether it fits or not."""

    predicted: CellPrediction

    @property
    def cell(self) -> Cell:
        return self.predicted.cell

    @property
    def fits(self) -> bool:
        return self.predicted.capacity_tokens > 0

    @property
    def token_s(self) -> float:
        """Seconds per token; 0 if the speed of such GPUs is unknown."""
        step = self.predicted.step
        return 0.0 if step is None else 1 / step.tokens_per_s

    def key(self, aim: Aim) -> tuple[Any, ...]:
        """Sort key of plans of one kind: those that fit, then by headroom, largest first."""
        if not self.fits:
            return (1, -self.predicted.headroom_bytes)
        return (0, *_place(aim, self))

    def candidate(self, goal: Goal) -> Candidate:
        """The plan as a candidate, with its longest length on the grid."""
        found = candidate_of(goal, self.predicted, predicted_at(goal, self.cell, None))
        return found if self.fits else found.replace(step_time=None)


def _place(aim: Aim, plan: _PlannedCell) -> tuple[Any, ...]:
    """Key that sorts plans: by the aim, time or memory; then by the other; then the simplest."""
    aims = [round(plan.token_s, 9), plan.predicted.device_used_bytes]
    simplest = simplicity(plan.cell)
    if aim == "fastest":  # memory that is left over is worth nothing
        return (aims[0], simplest, plan.cell.settings.layers_on_gpu)
    return (aims[1], aims[0], simplest)


class _PlanSearch(NamedTuple):
    """Plans for the cells of a question that has one length."""

    goal: Goal
    question: Question

    def variants(self, cell: Cell, aim: Aim) -> Iterator[Cell]:
        """Yield the cell, and the cell with every other recomputation unless the user named one."""
        yield cell
        if "recompute" not in self.goal.settings:
            for recompute in _RECOMPUTED[aim]:
                if recompute != cell.settings.recompute:
                    with suppress(UsageError):
                        yield cell.changed(recompute=recompute)

    def best(self, cell: Cell, aim: Aim) -> _PlannedCell:
        """The best of a cell's plans by head groups and layers on the GPU; else the roomiest."""
        plans: list[_PlannedCell] = []
        for groups in self._head_groups(cell):
            plans.append(self._placed(cell.changed(attention_head_groups=groups), aim))
            if aim == "fastest" and plans[-1].fits:
                break
        return min(plans, key=lambda plan: plan.key(aim))

    def _head_groups(self, cell: Cell) -> Sequence[int]:
        shape, layout = self.question.model.shape, cell.layout
        named = "attention_head_groups" in self.goal.settings
        if named or layout.ring_degree > 1 or shape.model_type not in IN_HEAD_GROUPS:
            return (cell.settings.attention_head_groups,)
        if cell.settings.recompute == "none" or cell.settings.pattern is not None:
            return (1,)
        heads = shape.kv_heads // layout.ulysses_degree
        return tuple(each for each in range(1, heads + 1) if heads % each == 0) or (1,)

    def _placed(self, cell: Cell, aim: Aim) -> _PlannedCell:
        """The plan with the best number of last layers on the GPU: the fewest that host memory
        allows or, if the aim is ``fastest``, as many more as save time and fit.
        """
        fewest = self._predicted(cell)
        if cell.settings.activations == "gpu" or "layers_on_gpu" in self.goal.settings:
            return fewest
        counts = range(1, self.question.model.shape.layers + 1)
        at = cache(lambda layers: self._predicted(cell.changed(layers_on_gpu=layers)))
        limit = self.goal.memory_limit.host_bytes
        first = bisect_left(counts, 1, key=lambda n: at(n).predicted.footprint.fits_host(limit))
        if first == len(counts):
            return fewest
        fewest = at(counts[first])
        if aim == "lightest" or not fewest.fits:
            return fewest
        more = counts[first:]
        most = at(more[bisect_left(more, 1, key=lambda n: not at(n).fits) - 1])
        as_fast = bisect_left(more, 1, key=lambda n: at(n).token_s <= most.token_s)
        return at(more[as_fast])

    def _predicted(self, cell: Cell) -> _PlannedCell:
        goal, question = self.goal, self.question.replace(cells=(cell,))
        known = goal.known(question)
        (found,) = predict_untraced(question, goal.memory_limit, goal.trainer, known, extent="fit")
        step = predicted_step(
            *(question.model.shape, cell.settings, cell.layout),
            length_tokens=goal.length_tokens,
            device_name=question.device_name,
            micro_batches=question.micro_batches if cell.settings.accumulates else 1,
        )
        return _PlannedCell(found.replace(step=step))
