"""Trials that the edge of a cell takes, and the time that a search without flags does: simulated.

``python docs/results/find/trials.py`` (no GPU, seconds) prints two tables. The first plays each
search beside this file again, with the edge that was measured and the times that are predicted. The
second asks whole searches of several models and GPUs. Their memory follows the formula of the dry
run, which is not the one that says where a search begins; their trials take as long as predicted,
or half as long again.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

import highwater
from highwater.nouns.hardware import Gpu, Machine, kind_of
from highwater.nouns.plan import Plan, plan
from highwater.nouns.request import request_from
from highwater.nouns.study import Cell, CellAnswer, Question, Study
from highwater.nouns.trial import (
    Launch,
    OnPhase,
    Outcome,
    RankReport,
    TrialResult,
    TrialSpec,
    unheard,
)
from highwater.search.budget import Budget, expected_s, outlook
from highwater.search.cell_outcomes import CellAnswered, TrialFinished
from highwater.search.proof import ran_out_s, step_time_s, trial_s
from highwater.search.scheduler import BudgetSpentError, search_cells
from highwater.trials.simulated import Law, OneByOne, SimulatedRunner, UpperFormula
from highwater.units import format_seconds, format_tokens

HERE = Path(__file__).parent
MODELS = (
    "Qwen3-0.6B",
    "SmolLM2-1.7B",
    "Llama-3.2-3B",
    "Qwen3-4B",
    "Qwen2.5-7B",
    "Qwen3-30B-A3B",
)
KINDS = ("L4-24GB", "A100-80GB", "H100-80GB", "H200-141GB")
SLOWER = 1.5
"""Times the predicted time that trials take on a machine with other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What a recorded search saw of a cell: the longest length that fit, and the next, which did
    not.
    """

    cell: Cell
    fit_tokens: int


@dataclass(slots=True)
class Clock:
    """Time that passes while trials run."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Seconds since the search began."""
        return self.now_s


class TimedRunner(OneByOne):
    """Trials by a law of memory, which take their predicted time, times ``slower``."""

    def __init__(
        self, question: Question, law: Law, clock: Clock, *, timeout_s: float, slower: float = 1.0
    ) -> None:
        self.timeout_s = timeout_s
        self._question = question
        self._runner = SimulatedRunner(law, device_total_bytes=question.device_total_bytes)
        self._clock = clock
        self._slower = slower

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """As any, within the time that the launch has."""
        self.timeout_s = self.timeout_s if launch.timeout_s is None else launch.timeout_s
        return super().submit(launch, on_phase=on_phase)

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """The result by the law, or a timeout."""
        result = self._runner.run(spec, attempt=attempt, repeat=repeat)
        result = msgspec.structs.replace(result, simulated=self._question.simulated)
        told = trial_s if result.outcome.is_fit else ran_out_s
        seconds = (told(self._question, spec) or 0.0) * self._slower
        if seconds > self.timeout_s:
            self._clock.now_s += self.timeout_s
            return TrialResult(outcome=Outcome.TIMEOUT, reason="simulated", wall_s=self.timeout_s)
        self._clock.now_s += seconds
        if result.outcome is not Outcome.FIT:
            return msgspec.structs.replace(result, wall_s=seconds)
        ranks = result.ranks or (RankReport(rank=0),)
        step_s = step_time_s(self._question, spec)
        step_s = seconds / (spec.steps + 1) if step_s is None else step_s * self._slower
        steps_s = (step_s,) * spec.steps
        ranks = tuple(msgspec.structs.replace(rank, step_times_s=steps_s) for rank in ranks)
        return msgspec.structs.replace(result, ranks=ranks, wall_s=seconds)


def edges(study: Study) -> Iterator[Edge]:
    """Cells whose edge a recorded study saw, whether its search was finished or not."""
    grid = study.question.grid
    for cell in study.question.cells:
        results = [
            (trial.spec.length_tokens, trial.result.outcome)
            for trial in study.trials_of(cell)
            if trial.result is not None
        ]
        fit = max((length for length, outcome in results if outcome.is_fit), default=0)
        index = grid.index_at_most(fit) if fit else 0
        if index < grid.size and (grid.length(index + 1), Outcome.OUT_OF_MEMORY) in results:
            yield Edge(cell=cell, fit_tokens=fit)


def played_again(study: Study) -> list[tuple[Cell, int, int]]:
    """Each cell of a recorded search with the trials that its edge takes now, and took then."""
    found = {edge.cell: edge for edge in edges(study)}
    if not found:
        return []
    question = msgspec.structs.replace(study.question, cells=tuple(found), confirm=0)

    def law(spec: TrialSpec) -> Outcome:
        edge = found[Cell(layout=spec.layout, settings=spec.settings)]
        fits = spec.length_tokens <= edge.fit_tokens
        return Outcome.FIT if fits else Outcome.OUT_OF_MEMORY

    runner = TimedRunner(question, law, Clock(), timeout_s=question.timeout_s or float("inf"))
    finished = [each for each in search_cells(question, runner) if isinstance(each, TrialFinished)]
    return [
        (
            cell,
            _until_edge(question, [each for each in finished if each.cell == cell]),
            _until_edge(study.question, study.trials_of(cell)),
        )
        for cell in found
    ]


def _until_edge(question: Question, trials: Sequence[TrialFinished]) -> int:
    """Trials until both sides of the edge were seen."""
    told = [(trial.spec.length_tokens, trial.result) for trial in trials]
    for count in range(1, len(told) + 1):
        seen = [(length, result.outcome) for length, result in told[:count] if result is not None]
        fit = max((length for length, outcome in seen if outcome.is_fit), default=0)
        index = question.grid.index_at_most(fit) if fit else 0
        if any(
            outcome.is_memory and length == question.grid.length(index + 1)
            for length, outcome in seen
        ):
            return count
    return len(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A whole search without flags, simulated."""

    planned: Plan
    answers: tuple[CellAnswer, ...]
    longest_fit_tokens: int
    """Longest length that fit, in full or memory-only, also in cells without an answer."""
    trials: int
    took_s: float
    expected_s: float | None


def whole_search(model: str, kind_name: str, *, slower: float, **settings: object) -> Search:
    """What ``highwater find MODEL`` does on one GPU of a kind, and how long it takes."""
    request = request_from({"model": model, "gpus": [1], **settings}, keywords=True)
    planned = plan(request, _machine(kind_name))
    question, clock = planned.question, Clock()
    law = UpperFormula(shape=question.model.shape)
    runner = TimedRunner(question, law, clock, timeout_s=planned.timeout_s, slower=slower)
    assert planned.budget_s is not None  # noqa: S101
    budget = Budget(
        question,
        runner,
        planned.budget_s,
        timeout_s=planned.timeout_s,
        same_timeout=False,
        clock=clock,
    )
    answers: list[CellAnswer] = []
    trials, longest = 0, 0
    try:
        for event in search_cells(question, budget, may_start=budget.allows, order=budget.order):
            answers += [event.answer] if isinstance(event, CellAnswered) else []
            if isinstance(event, TrialFinished):
                trials += 1
                fits = event.result.outcome.is_fit
                longest = max(longest, event.spec.length_tokens if fits else 0)
    except BudgetSpentError:
        pass
    return Search(
        planned=planned,
        answers=tuple(answers),
        longest_fit_tokens=longest,
        trials=trials,
        took_s=clock.now_s,
        expected_s=expected_s(outlook(question)),
    )


def _machine(kind_name: str) -> Machine:
    kind = kind_of(kind_name)
    assert kind is not None  # noqa: S101
    gpu = Gpu(
        index=0,
        name=kind.name,
        memory_total_bytes=kind.usable_bytes,
        memory_used_bytes=0,
        compute_capability=(9, 0),
        processes=(),
    )
    return Machine(
        gpus=(gpu,),
        driver_version=None,
        cpu_cores=16,
        host_memory_total_bytes=2**40,
        host_memory_available_bytes=2**40,
        versions={},
    )


def _first_table() -> Iterator[str]:
    yield "| search | cell | trials at the edge, now | then |\n| --- | --- | --- | --- |"
    now: list[int] = []
    for path in sorted(HERE.glob("*.jsonl")):
        for cell, trials, recorded in played_again(highwater.open_study(path)):
            yield f"| {path.stem} | {cell.label} | {trials} | {recorded} |"
            now.append(trials)
    yield f"\n{len(now)} cells, median {median(now):g}, mean {sum(now) / len(now):.2f}, "
    yield f"{sum(each <= 2 for each in now)} with two trials"


def _second_table() -> Iterator[str]:
    yield "| model | GPU | said before | took | took, slower | trials | longest | trained in full |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for model in MODELS:
        for kind in KINDS:
            usual, slow = (whole_search(model, kind, slower=each) for each in (1.0, SLOWER))
            yield _row(model, kind, usual, slow)


def _row(model: str, kind: str, usual: Search, slow: Search) -> str:
    longest = usual.longest_fit_tokens
    in_full = max((answer.capacity_tokens or 0 for answer in usual.answers), default=0)
    cells = len(usual.planned.question.cells)
    unfinished = [
        f"{cells - len(each.answers)} of {cells} cells open" if len(each.answers) < cells else ""
        for each in (usual, slow)
    ]
    took = [
        " ".join(filter(None, (format_seconds(each.took_s), left)))
        for each, left in zip((usual, slow), unfinished, strict=True)
    ]
    said = format_seconds(usual.expected_s)
    figures = (said, *took, str(usual.trials), format_tokens(longest), format_tokens(in_full))
    return f"| {model} | {kind} | {' | '.join(figures)} |"


def main() -> None:
    """Print both tables."""
    print("\n".join((*_first_table(), "", *_second_table())))


if __name__ == "__main__":
    main()
