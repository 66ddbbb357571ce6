"""Affine: one trace for every length. Where the events of two lengths differ in bytes alone, those are lines over the tokens.

A step whose tensors are whole, with no tiles and no chunks, allocates the same things in the same order at any length. Kept small:
what repeats from layer to layer compresses to almost nothing.
"""

from highwater.prediction.allocator import round_size
from highwater.spec.codec import Noun
from highwater.spec.events import Allocate, Enter, Event, EventLog, Free, ReleaseCached


class Kind(Noun, frozen=True, kw_only=True):
    """An allocation that occurs again and again: ``fixed_bytes + bytes_per_token x tokens``."""

    fixed_bytes: int
    bytes_per_token: int
    stream: int
    operator: int
    module: int


class AffineLog(Noun, frozen=True, kw_only=True):
    """Events of one rank for any number of tokens of its micro-batch."""

    schema_version: int = 1
    versions: dict[str, str]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[Kind, ...]
    phases: tuple[str, ...]
    events: tuple[int, ...]
    """Allocate kind n: n. Free what was allocated d allocations ago: -d. Enter phase p: ``len(kinds) + p``; after the last phase,
    release what is cached."""

    def at(self, tokens: int) -> EventLog:
        """The log of a micro-batch of so many tokens on the rank."""
        first_phase, release = len(self.kinds), len(self.kinds) + len(self.phases)
        sizes = self._sizes(tokens)
        events: list[Event] = []
        count = 0
        for code in self.events:
            if code < 0:
                events.append(Free(count + code + 1))
            elif code < first_phase:
                count += 1
                kind = self.kinds[code]
                events.append(Allocate(count, sizes[code], kind.stream, kind.operator, kind.module))
            else:
                events.append(ReleaseCached() if code == release else Enter(self.phases[code - first_phase]))
        return EventLog(
            source="traced", versions=self.versions, operators=self.operators, modules=self.modules, events=tuple(events)
        )

    def least_bytes(self, tokens: int) -> int:
        """The most that is alive at once, in whole blocks: with less, no allocator has a place for it."""
        blocks = [round_size(size) if size else 0 for size in self._sizes(tokens)]
        allocated: list[int] = []
        alive = most = 0
        for code in self.events:
            if code < 0:
                alive -= allocated[code]
            elif code < len(blocks):
                allocated.append(blocks[code])
                alive += blocks[code]
                most = max(most, alive)
        return most

    def _sizes(self, tokens: int) -> list[int]:
        """Of each kind."""
        return [kind.fixed_bytes + kind.bytes_per_token * tokens for kind in self.kinds]


def affine(logs: dict[int, EventLog]) -> AffineLog:
    """The lines through logs of two lengths or more, by tokens. Raises ValueError where the logs are not on lines."""
    (few, low), (many, high), *others = sorted(logs.items())
    if len(low.events) != len(high.events):
        raise ValueError(f"{len(low.events)} events at {few} tokens, {len(high.events)} at {many}")
    kinds: dict[Kind, int] = {}
    phases: dict[str, int] = {}
    coded: list[int | str] = []
    numbers: dict[int, int] = {}
    for one, other in zip(low.events, high.events, strict=True):
        match one, other:
            case Allocate(), Allocate():
                numbers[one.id] = len(numbers) + 1
                coded.append(kinds.setdefault(_kind(one, other, few, many), len(kinds)))
            case Free(), Free():
                coded.append(numbers[one.id] - len(numbers) - 1)
            case Enter(), Enter() if one.phase == other.phase:
                phases.setdefault(one.phase, len(phases))
                coded.append(one.phase)
            case ReleaseCached(), ReleaseCached():
                coded.append("")
            case _:
                raise ValueError(f"{one} at {few} tokens, {other} at {many}")
    after = {"": len(kinds) + len(phases)} | {phase: len(kinds) + number for phase, number in phases.items()}
    found = AffineLog(
        versions=low.versions,
        operators=low.operators,
        modules=low.modules,
        kinds=tuple(kinds),
        phases=tuple(phases),
        events=tuple(after[code] if isinstance(code, str) else code for code in coded),
    )
    for tokens, log in ((few, low), (many, high), *others):
        if _sizes(found.at(tokens)) != _sizes(log):
            raise ValueError(f"the log of {tokens} tokens is not on the line through those of {few} and {many}")
    return found


def _kind(one: Allocate, other: Allocate, few: int, many: int) -> Kind:
    slope, rest = divmod(other.bytes - one.bytes, many - few)
    if rest or one.stream != other.stream:
        raise ValueError(f"{one.bytes} bytes at {few} tokens, {other.bytes} at {many}: no whole number of bytes a token")
    return Kind(
        fixed_bytes=one.bytes - slope * few, bytes_per_token=slope, stream=one.stream, operator=one.operator, module=one.module
    )


def _sizes(log: EventLog) -> list[int]:
    return [event.bytes for event in log.events if isinstance(event, Allocate)]
