"""Scaled trace: one trace for every length, and its replay with no event log between.

A step whose tensors are whole, with no tiles and no chunks, allocates the same things in the same
order at any length: bytes are lines over the tokens, with a ceiling for what a kernel takes.

``replay_scaled`` finds what ``replay`` does of ``trace.at(tokens)``, to the byte, in half the time:
a recommendation asks for dozens. What costs is calls: taking a block out of the cache and putting
one back are written out here as ``CachingAllocator`` has them, all else is its own.
"""

from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.allocator import (
    ADDRESS_BITS,
    SMALL_BYTES,
    CachingAllocator,
    MemoryBlock,
    MemoryPool,
    least_growing,
    round_size,
)
from highwater.memory.trace.replay import Replayed
from highwater.nouns.codec import Record
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


class Kind(Record, frozen=True, kw_only=True):
    """An allocation that occurs again and again: ``fixed_bytes + bytes_per_tokens[0] x tokens /
    bytes_per_tokens[1]``, rounded down, and no more than ``most_bytes``.
    """

    fixed_bytes: int
    bytes_per_tokens: tuple[int, int]
    most_bytes: int | None
    """Most bytes of such an allocation; None: there is no end to it."""
    stream: int
    operator: int
    module: int


class ScaledTrace(Record, frozen=True, kw_only=True):
    """Events of one rank for any number of tokens of its micro-batch."""

    schema_version: int = 1
    versions: dict[str, str]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[Kind, ...]
    phases: tuple[str, ...]
    events: tuple[int, ...]
    """Allocate kind n: n. Free what was allocated d allocations ago: -2d; give it back before
    another stream has done with it: 1 - 2d. Enter phase p: ``len(kinds) + p``; after the last
    phase, release what is cached."""

    def at(self, tokens: int) -> EventLog:
        """The log of a micro-batch of so many tokens on the rank."""
        first_phase, release = len(self.kinds), len(self.kinds) + len(self.phases)
        sizes = self.sizes(tokens)
        events: list[TraceEvent] = []
        count = 0
        for code in self.events:
            if code < 0:
                ended = count + 1 - (1 - code) // 2
                events.append(GiveBack(ended) if code % 2 else Free(ended))
            elif code < first_phase:
                count += 1
                kind = self.kinds[code]
                events.append(Allocate(count, sizes[code], kind.stream, kind.operator, kind.module))
            else:
                events.append(
                    ReleaseCached() if code == release else Enter(self.phases[code - first_phase])
                )
        return EventLog(
            source="traced",
            versions=self.versions,
            operators=self.operators,
            modules=self.modules,
            events=tuple(events),
        )

    def least_bytes(self, tokens: int) -> int:
        """Most bytes alive at once, in whole blocks: with less no allocator has a place for it."""
        blocks = [round_size(size) if size else 0 for size in self.sizes(tokens)]
        changes = (*blocks, *(-block for block in reversed(blocks)))
        alive = accumulate(map(changes.__getitem__, _changes(self.events, len(blocks))))
        return max(alive, default=0)

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of an allocation of each kind."""
        lines = (
            kind.fixed_bytes + kind.bytes_per_tokens[0] * tokens // kind.bytes_per_tokens[1]
            for kind in self.kinds
        )
        return [
            line if kind.most_bytes is None else min(line, kind.most_bytes)
            for line, kind in zip(lines, self.kinds, strict=True)
        ]


@lru_cache(maxsize=64)
def _changes(events: tuple[int, ...], kinds: int) -> list[int]:
    """Changes of what is alive by event: n adds an allocation of kind n, -1 - n takes one away."""
    allocated: list[int | None] = []
    found = []
    for code in events:
        if code < 0:
            kind = allocated[code >> 1]
            allocated[code >> 1] = None
            if kind is not None:
                found.append(-1 - kind)
        elif code < kinds:
            allocated.append(code)
            found.append(code)
    return found


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
        if _renumbered(found.at(tokens)) != _renumbered(log):
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


def replay_scaled(
    trace: ScaledTrace, tokens: int, *, allocator: Allocator, capacity_bytes: int | None = None
) -> tuple[Replayed, int]:
    """Replay a micro-batch of so many tokens on the rank, on an empty device that has room for the
    workspaces at least. What is alive at the peak is left out: the second value is how many events
    come before it.
    """
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes
    )
    for size in CUBLAS_WORKSPACES_BYTES:
        device.allocate(size)
    sizes = [round_size(size) if size else 0 for size in trace.sizes(tokens)]
    is_expandable, kinds, phases = device.is_expandable, len(sizes), trace.phases
    pools: list[MemoryPool | None] = [None] * kinds
    # blocks; handles, of what was given back; None once free
    live: list[MemoryBlock | int | None] = []
    allocated, fits = device.allocated_bytes, True
    phase, phase_bytes, by_phase = "setup", 0, dict[str, int]()
    peak_bytes, peak_phase, peak_at = allocated, phase, 0
    for number, code in enumerate(trace.events):
        if 0 <= code < kinds:
            size = sizes[code]
            if size:
                pool = pools[code]
                if pool is None:
                    pool = device.pool(trace.kinds[code].stream, is_small=size <= SMALL_BYTES)
                    pools[code] = pool
                keys, ordered = pool.free.keys, pool.free.ordered
                best = bisect_left(keys, size << ADDRESS_BITS)
                if best < len(keys):
                    if is_expandable:
                        best = least_growing(ordered, best)
                    del keys[best]
                    block = ordered.pop(best)
                else:
                    block = device.new_block(pool, size)
                    if block is None:
                        fits, peak_phase, peak_at = False, phase, number
                        break
                rest = block.size - size
                if rest >= pool.least_rest_bytes:
                    before, address = block.before, block.address
                    part = MemoryBlock(address, size, pool, True, True, before, block)
                    if before is not None:
                        before.after = part
                    block.before = part
                    block.address = address = address + size
                    block.size = rest
                    key = (rest << ADDRESS_BITS) + address
                    index = bisect_left(keys, key)
                    keys.insert(index, key)
                    ordered.insert(index, block)
                    live.append(part)
                    allocated += size
                else:
                    block.is_allocated = True
                    live.append(block)
                    allocated += block.size
            else:
                live.append(None)
            if allocated > phase_bytes:
                by_phase[phase] = phase_bytes = allocated
                if allocated >= peak_bytes:
                    peak_bytes, peak_phase, peak_at = allocated, phase, number + 1
        elif code < 0:
            block = live[code >> 1]
            if block is None:
                continue
            if isinstance(block, int):
                if not code & 1 and device.is_held(block):
                    device.free(block)
                continue
            size = block.size
            allocated -= size
            if code & 1:
                live[code >> 1] = device.awaited(block)
                continue
            live[code >> 1] = None
            free = block.pool.free
            keys, ordered = free.keys, free.ordered
            before, after = block.before, block.after
            if before is not None and before.is_mapped and not before.is_allocated:
                index = bisect_left(keys, (before.size << ADDRESS_BITS) + before.address)
                del keys[index]
                del ordered[index]
                block.address = before.address
                size += before.size
                block.before = before = before.before
                if before is not None:
                    before.after = block
            if after is not None and after.is_mapped and not after.is_allocated:
                index = bisect_left(keys, (after.size << ADDRESS_BITS) + after.address)
                del keys[index]
                del ordered[index]
                size += after.size
                block.after = after = after.after
                if after is not None:
                    after.before = block
            block.size = size
            block.is_allocated = False
            key = (size << ADDRESS_BITS) + block.address
            index = bisect_left(keys, key)
            keys.insert(index, key)
            ordered.insert(index, block)
        elif code < kinds + len(phases):
            phase = phases[code - kinds]
            phase_bytes = by_phase.get(phase, 0)
        else:
            device.release_cached()
    replayed = Replayed(
        fits=fits,
        phase=peak_phase,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        retries=device.retries,
        allocated_by_phase=by_phase,
        alive=(),
    )
    return replayed, peak_at
