"""What the reference trainer does that its shipped traces have not, each tried on all 80 cells of
the published A100 table.

``python docs/results/lab/hypotheses.py`` (no GPU, no trace; eight minutes on one CPU core)
edits the events of the shipped traces, replays them, and prints a row for each. Sources:
Trinity-RFT's ``trainer/verl/fsdp_workers.py`` and ``scripts/context_length_test``;
``torch.distributed.fsdp``.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.formula.layers import Step
from highwater.memory.predictor import edge
from highwater.memory.trace.allocator import CachingAllocator, CapacityError
from highwater.memory.trace.replay import replay
from highwater.nouns.events import (
    Allocate,
    Enter,
    EventLog,
    Free,
    GiveBack,
    ReleaseCached,
    TraceEvent,
)
from highwater.nouns.settings import Allocator
from highwater.nouns.study import Cell, Question
from highwater.trainers.trinity import OUTSIDE_BYTES, bundled_trace
from highwater.units import GIB

sys.path += [str(Path(__file__).parents[3] / folder) for folder in ("tools", "benchmarks")]
from scaled_traces import log_at
from table_accuracy import CapacityTable, read_capacity_table

TABLE = Path(__file__).parents[3] / "tests" / "data" / "published_capacity_a100_80gb.csv"
ALLOCATORS: tuple[Allocator, ...] = ("native", "expandable")
ASKED = [("Qwen3-14B", 4, 2), ("Qwen3-14B", 4, 4)]
"""Model, GPUs and SP of the cells that replay has more than a step too long."""
COMPUTE = 0
"""Stream of the traces; others gather units, reduce gradients and narrow shards."""

Edit = Callable[[EventLog, int], EventLog]
"""Of the events of a trial on so many GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A row of the table."""

    name: str
    edit: Edit
    first_step_retries: int | None = None
    """The most of them that a trial may have and fit; None: any."""
    retries: int | None = None
    later_bytes: int = 0
    """Bytes outside the allocator that NCCL takes only after the first backward pass, and keeps."""


def main() -> None:
    """Print the table."""
    table = read_capacity_table(TABLE)
    print(
        "| tried | vanilla: exact | within one step | env: exact | within one step | 14B, 4 GPUs, "
        "4,096: SP 2 needs | SP 4 needs |"
    )
    print("|---|---|---|---|---|---|---|")
    for hypothesis in HYPOTHESES:
        scores = [table_accuracy(table, hypothesis, allocator) for allocator in ALLOCATORS]
        needs = [
            ""
            if hypothesis.retries
            or hypothesis.later_bytes
            or hypothesis.first_step_retries is not None
            else f"{need:.1f}"
            for need in (needed_gib(table, hypothesis, *asked) for asked in ASKED)
        ]
        print(
            "|",
            " | ".join(
                [hypothesis.name, *(str(number) for pair in scores for number in pair), *needs]
            ),
            "|",
            flush=True,
        )
    print(f"\n{save_share(table):.0%} of a step's peak is the most that the final save allocates")


def table_accuracy(
    table: CapacityTable, hypothesis: Hypothesis, allocator: Allocator
) -> tuple[int, int]:
    """Cells that are exact, and within one step of the grid."""
    offs: list[int] = []
    for question, cell, known in replayed_cells(table):
        if cell.settings.allocator != allocator:
            continue
        known_index = question.grid.index_at_most(known)
        limit_bytes = capacity_bytes(question, cell)

        def fits(
            index: int,
            question: Question = question,
            cell: Cell = cell,
            limit_bytes: int = limit_bytes,
        ) -> bool:
            return holds(hypothesis, question, cell, question.grid.length(index), limit_bytes)

        size = max(1, question.size_of(cell))
        offs.append(edge(min(size, max(1, known_index)), size, fits) - known_index)
    return offs.count(0), sum(abs(off) <= 1 for off in offs)


def holds(
    hypothesis: Hypothesis, question: Question, cell: Cell, length_tokens: int, limit_bytes: int
) -> bool:
    """Whether a trial fits, by this hypothesis."""
    log = hypothesis.edit(events_of(question, cell, length_tokens), cell.layout.gpus)
    allocator = cell.settings.allocator
    found = replay(log, allocator=allocator, capacity_bytes=limit_bytes)
    if not found.fits or (hypothesis.retries is not None and found.retries > hypothesis.retries):
        return False
    if (
        hypothesis.later_bytes
        and reserved_after_backward(log, allocator, limit_bytes + hypothesis.later_bytes)
        > limit_bytes
    ):
        return False
    if hypothesis.first_step_retries is None:
        return True
    first = msgspec.structs.replace(
        log, events=tuple(itertools.chain.from_iterable(events for _, events in first_step(log)))
    )
    return (
        replay(first, allocator=allocator, capacity_bytes=limit_bytes).retries
        <= hypothesis.first_step_retries
    )


def reserved_after_backward(log: EventLog, allocator: Allocator, capacity_bytes: int) -> int:
    """What the allocator holds when the first update begins; all that it may where it ran out
    before.
    """
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes, is_share=False
    )
    for size in CUBLAS_WORKSPACES_BYTES:
        device.allocate(size)
    handles: dict[int, int] = {}
    try:
        for event in itertools.takewhile(lambda event: event != Enter("optimizer"), log.events):
            match event:
                case Allocate() if event.bytes:
                    handles[event.id] = device.allocate(event.bytes, stream=event.stream)
                case GiveBack() if event.id in handles:
                    device.give_back(handles[event.id])
                case Free() if event.id in handles and device.is_held(handles[event.id]):
                    device.free(handles[event.id])
                case ReleaseCached():
                    device.release_cached()
                case _:
                    pass
    except CapacityError:
        return capacity_bytes
    return device.reserved_bytes


def needed_gib(
    table: CapacityTable, hypothesis: Hypothesis, model: str, gpus: int, ulysses: int
) -> float:
    """What a native allocator needs for the shortest length; to a tenth, as if more memory never
    were too little.
    """
    question, cell = next(
        (question, cell)
        for question, cell, _ in replayed_cells(table)
        if question.model.name == model and cell.settings.allocator == "native"
        if (cell.layout.gpus, cell.layout.ulysses_degree) == (gpus, ulysses)
    )
    log = hypothesis.edit(events_of(question, cell, question.grid.length(1)), gpus)
    low, high = (round(size * GIB) for size in (60, 100))
    while high - low > GIB / 20:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if replay(log, allocator="native", capacity_bytes=middle).fits
            else (middle, high)
        )
    return high / GIB


def save_share(table: CapacityTable) -> float:
    """The most, over all cells at the shortest length, that the save allocates, of what the steps
    do.
    """
    found = [
        replay(
            final_save(events_of(question, cell, question.grid.length(1)), cell.layout.gpus),
            allocator="native",
        )
        for question, cell, _ in replayed_cells(table)
        if cell.settings.allocator == "native" and cell.layout.gpus > 1
    ]
    return max(each.allocated_by_phase["save"] / each.peak_allocated_bytes for each in found)


def replayed_cells(table: CapacityTable) -> Iterator[tuple[Question, Cell, int]]:
    """Those with a shipped trace, and their published tokens."""
    for question in table.questions:
        for cell in question.cells:
            if bundled_trace(question.model.shape, cell) is not None:
                yield question, cell, table.known_tokens(question, cell)


def events_of(question: Question, cell: Cell, length_tokens: int) -> EventLog:
    """As shipped."""
    log = bundled_trace(question.model.shape, cell)
    assert log is not None, "asked for cells that have a trace"  # noqa: S101
    step = Step(question.model.shape, cell.settings, cell.layout, length_tokens)
    return log_at(log, step.tokens)


def memory_limit(question: Question) -> MemoryLimit:
    """The whole card."""
    assert question.device_total_bytes is not None, "the table's GPU is in the catalog"  # noqa: S101
    return MemoryLimit(device_bytes=question.device_total_bytes)


def capacity_bytes(question: Question, cell: Cell) -> int:
    """What is left of the card for the allocator."""
    return (
        memory_limit(question).device_bytes
        - question.margin_bytes
        - OUTSIDE_BYTES[cell.layout.context_degree > 1]
    )


def as_shipped(log: EventLog, _: int) -> EventLog:
    """Nothing else."""
    return log


def kept_between_steps(log: EventLog, _: int) -> EventLog:
    """Without ``torch.cuda.empty_cache`` after the model is built and after a step."""
    return with_events(log, [event for event in log.events if not isinstance(event, ReleaseCached)])


def weights_sent(log: EventLog, gpus: int) -> EventLog:
    """The weights go to the explorer before the first step and after each: every unit gathered in
    float32, its shard copied back (``FSDP.summon_full_params``, which writes back), then
    ``empty_cache``.
    """
    numbers = fresh(log)

    def send() -> list[TraceEvent]:
        return [
            *itertools.chain.from_iterable(gathered(unit, numbers, gpus) for unit in units(log)),
            ReleaseCached(),
        ]

    return before_steps(log, send) if gpus > 1 else log


def four_micro_batches(log: EventLog, gpus: int) -> EventLog:
    """And two more micro-batches a step: the trace's last, twice again."""
    log = weights_sent(log, gpus)
    numbers = fresh(log)
    events: list[TraceEvent] = []
    phases = split(log)
    for index, (phase, own) in enumerate(phases):
        events += own
        if phase == "backward" and phases[index + 1][0] == "optimizer":
            for _ in range(2):
                events += again([*phases[index - 1][1], *own], numbers)
    return with_events(log, events)


def final_save(log: EventLog, gpus: int) -> EventLog:
    """After the last step: the sharded state, the root gathered throughout and every tensor cloned
    once; then the whole state, a unit at a time on the GPU.
    """
    if gpus == 1:
        return log
    numbers = fresh(log)
    root, *layers = units(log)
    events: list[TraceEvent] = [*log.events, Enter("save")]
    whole = next(numbers)
    events.append(Allocate(whole, root.bytes, COMPUTE, 0))
    for unit in layers:
        events += gathered(unit, numbers, gpus, copies=unit.tensors)
    for size in root.tensors:
        events += held(size, numbers)
    events.append(Free(whole))
    for unit in (root, *layers):
        events += gathered(unit, numbers, gpus, copies=())
    return with_events(log, events)


@dataclass(frozen=True, slots=True)
class Unit:
    """What FSDP1 gathers at once, in float32."""

    bytes: int
    tensors: tuple[int, ...]
    """Bytes of each."""


def units(log: EventLog) -> list[Unit]:
    """The root first, as ``named_modules`` has it; read from how the trace builds them: their
    tensors, then the vector of them.
    """
    found: list[Unit] = []
    tensors: list[int] = []
    actor = itertools.takewhile(lambda event: not isinstance(event, Enter), log.events)
    for event in actor:
        if isinstance(event, Allocate):
            operator = log.operators[event.operator]
            if operator == "aten.cat.default":
                found.append(Unit(event.bytes, tuple(tensors)))
                tensors = []
            elif operator == "aten.empty_like.default":
                tensors.append(event.bytes)
    return [found[-1], *found[:-1]]


def gathered(
    unit: Unit, numbers: Iterator[int], gpus: int, copies: Sequence[int] | None = None
) -> list[TraceEvent]:
    """Whole, copied from one after the other, freed; without ``copies``: its shard is."""
    number = next(numbers)
    copied = itertools.chain.from_iterable(
        held(size, numbers) for size in (copies if copies is not None else [unit.bytes // gpus])
    )
    return [Allocate(number, unit.bytes, COMPUTE, 0), *copied, Free(number)]


def held(size: int, numbers: Iterator[int]) -> list[TraceEvent]:
    """For a moment."""
    number = next(numbers)
    return [Allocate(number, size, COMPUTE, 0), Free(number)]


def again(events: Sequence[TraceEvent], numbers: Iterator[int]) -> list[TraceEvent]:
    """The same with allocations of its own; what it frees of others' is gone already."""
    own: dict[int, int] = {}
    found: list[TraceEvent] = []
    for event in events:
        match event:
            case Allocate():
                own[event.id] = next(numbers)
                found.append(msgspec.structs.replace(event, id=own[event.id]))
            case Free() | GiveBack():
                found += [type(event)(own[event.id])] if event.id in own else []
            case _:
                found.append(event)
    return found


def before_steps(log: EventLog, more: Callable[[], list[TraceEvent]]) -> EventLog:
    """With more events before each step and after the last."""
    parts = ([*more(), *own] if phase == "experience" else own for phase, own in split(log))
    return with_events(log, [*itertools.chain.from_iterable(parts), *more()])


def first_step(log: EventLog) -> list[tuple[str, list[TraceEvent]]]:
    """What comes before the second one."""
    phases = split(log)
    second = [index for index, (phase, _) in enumerate(phases) if phase == "experience"][1]
    return phases[:second]


def split(log: EventLog) -> list[tuple[str, list[TraceEvent]]]:
    """Events by phase, the one that begins it first."""
    phases: list[tuple[str, list[TraceEvent]]] = [("setup", [])]
    for event in log.events:
        if isinstance(event, Enter):
            phases.append((event.phase, []))
        phases[-1][1].append(event)
    return phases


def fresh(log: EventLog) -> Iterator[int]:
    """Numbers that no allocation has."""
    return itertools.count(1 + max(event.id for event in log.events if isinstance(event, Allocate)))


def with_events(log: EventLog, events: Sequence[TraceEvent]) -> EventLog:
    """The same log of other events."""
    return msgspec.structs.replace(log, events=tuple(events))


HYPOTHESES = (
    Hypothesis(name="as shipped", edit=as_shipped),
    Hypothesis(name="cache kept between steps", edit=kept_between_steps),
    Hypothesis(name="weights sent to the explorer", edit=weights_sent),
    Hypothesis(name="the same, four micro-batches", edit=four_micro_batches),
    Hypothesis(name="as shipped, final save", edit=final_save),
    Hypothesis(
        name="as shipped, 0.5 GiB outside taken after the first backward pass",
        edit=as_shipped,
        later_bytes=GIB // 2,
    ),
    Hypothesis(
        name="as shipped, 1 GiB outside taken after the first backward pass",
        edit=as_shipped,
        later_bytes=GIB,
    ),
    Hypothesis(
        name="as shipped, 2 GiB outside taken after the first backward pass",
        edit=as_shipped,
        later_bytes=2 * GIB,
    ),
    Hypothesis(
        name="as shipped, no retry in the first step (no cause known)",
        edit=as_shipped,
        first_step_retries=0,
    ),
    Hypothesis(
        name="as shipped, at most three retries (no cause known)", edit=as_shipped, retries=3
    ),
)


if __name__ == "__main__":
    main()
