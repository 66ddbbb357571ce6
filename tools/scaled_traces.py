"""Scaled traces: the lines over tokens on which logs of one step lie, at any length.

A step whose tensors are whole, with no tiles and no chunks, allocates the same things in the same
order at any length: bytes are lines over the tokens, with a ceiling for what a kernel takes.
``docs/results/lab/trinity.py`` makes the traces so that come with the package.
"""

from fractions import Fraction

from highwater.memory.trace.replay import Kind, ScaledTrace
from highwater.nouns.events import (
    Allocate,
    Enter,
    EventLog,
    Free,
    GiveBack,
    ReleaseCached,
    TraceEvent,
)


def scaled_trace(logs: dict[int, EventLog]) -> ScaledTrace:
    """The lines through the two shortest logs, by tokens, with a ceiling where the longest is
    below: two logs show none. Raises ValueError where any log is not what is found here.
    """
    (few, low), (many, high), *others = sorted(logs.items())
    most, longest = others[-1] if others else (many, high)
    for tokens, log in logs.items():
        events = len(log.events)
        if events != len(low.events):
            raise ValueError(f"{len(low.events)} events at {few} tokens, {events} at {tokens}")
    kinds: dict[Kind, int] = {}
    phases: dict[str, int] = {}
    coded: list[int | str] = []
    numbers: dict[int, int] = {}
    for one, other, last in zip(low.events, high.events, longest.events, strict=True):
        match one, other:
            case Allocate(), Allocate() if isinstance(last, Allocate):
                numbers[one.id] = len(numbers) + 1
                kind = _kind({few: one, many: other, most: last})
                coded.append(kinds.setdefault(kind, len(kinds)))
            case Free(), Free():
                coded.append(2 * (numbers[one.id] - len(numbers) - 1))
            case GiveBack(), GiveBack():
                coded.append(2 * (numbers[one.id] - len(numbers) - 1) + 1)
            case Enter(), Enter() if one.phase == other.phase:
                phases.setdefault(one.phase, len(phases))
                coded.append(one.phase)
            case ReleaseCached(), ReleaseCached():
                coded.append("")
            case _:
                raise ValueError(f"{one} at {few} tokens, {other} at {many}")
    after = {phase: len(kinds) + number for phase, number in phases.items()}
    after[""] = len(kinds) + len(phases)
    found = ScaledTrace(
        versions=low.versions,
        operators=low.operators,
        modules=low.modules,
        kinds=tuple(kinds),
        phases=tuple(phases),
        events=tuple(after[code] if isinstance(code, str) else code for code in coded),
    )
    for tokens, log in ((few, low), (many, high), *others):
        if _renumbered(log_at(found, tokens)) != _renumbered(log):
            raise ValueError(
                f"the log of {tokens} tokens is not on the line through those of {few} and {many}"
            )
    return found


def _kind(seen: dict[int, Allocate]) -> Kind:
    """The kind of one allocation, seen at two lengths, or at three, the longest last."""
    (few, one), (many, other), *_ = seen.items()
    most, last = list(seen.items())[-1]
    slope = Fraction(other.bytes - one.bytes, many - few)
    fixed = one.bytes - slope * few
    line = int(fixed) + slope.numerator * most // slope.denominator
    if fixed.denominator > 1 or one.stream != other.stream:
        seen_bytes = f"{one.bytes} bytes at {few} tokens, {other.bytes} at {many}"
        raise ValueError(f"{seen_bytes}: no line through whole bytes")
    return Kind(
        fixed_bytes=int(fixed),
        bytes_per_tokens=(slope.numerator, slope.denominator),
        most_bytes=last.bytes if last.bytes < line else None,
        stream=one.stream,
        operator=one.operator,
        module=one.module,
    )


def _renumbered(log: EventLog) -> list[tuple[object, ...]]:
    """The events of a log, allocations numbered in their order, whatever their ids."""
    numbers: dict[int, int] = {}
    found: list[tuple[object, ...]] = []
    for event in log.events:
        match event:
            case Allocate():
                numbers[event.id] = len(numbers)
                found.append((event.bytes, event.stream))
            case Free() | GiveBack():
                found.append((type(event), numbers[event.id]))
            case Enter():
                found.append((event.phase,))
            case _:
                found.append(())
    return found


def log_at(trace: ScaledTrace, tokens: int) -> EventLog:
    """The log of a micro-batch of so many tokens on the rank."""
    first_phase, release = len(trace.kinds), len(trace.kinds) + len(trace.phases)
    sizes = trace.sizes(tokens)
    events: list[TraceEvent] = []
    count = 0
    for code in trace.events:
        if code < 0:
            ended = count + 1 - (1 - code) // 2
            events.append(GiveBack(ended) if code % 2 else Free(ended))
        elif code < first_phase:
            count += 1
            kind = trace.kinds[code]
            events.append(Allocate(count, sizes[code], kind.stream, kind.operator, kind.module))
        else:
            events.append(
                ReleaseCached() if code == release else Enter(trace.phases[code - first_phase])
            )
    return EventLog(
        source="traced",
        versions=trace.versions,
        operators=trace.operators,
        modules=trace.modules,
        events=tuple(events),
    )
