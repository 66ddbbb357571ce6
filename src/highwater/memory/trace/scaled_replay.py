"""Scaled replay: a scaled trace through the simulated allocator, with no event log between them.

What ``replay`` finds of ``trace.at(tokens)``, to the byte, in half the time: a recommendation asks
for dozens. Nearly every event takes a block out of the cache or puts one back, and what that costs
is calls: those two are written out here as ``CachingAllocator`` has them, all else is its own.
"""

from bisect import bisect_left

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
from highwater.memory.trace.scaled_trace import ScaledTrace
from highwater.nouns.settings import Allocator


def replay_scaled(
    trace: ScaledTrace,
    tokens: int,
    *,
    allocator: Allocator,
    capacity_bytes: int | None = None,
) -> tuple[Replayed, int]:
    """Replay a micro-batch of so many tokens on the rank, on an empty device that has room for the
    workspaces at least.

    What is alive at the peak is left out: the second value is how many events come before it.
    """
    device = CachingAllocator(
        is_expandable=allocator == "expandable", capacity_bytes=capacity_bytes
    )
    for size in CUBLAS_WORKSPACES_BYTES:
        device.allocate(size)
    sizes = [round_size(size) if size else 0 for size in trace.sizes(tokens)]
    is_expandable, kinds, phases = device.is_expandable, len(sizes), trace.phases
    pools: list[MemoryPool | None] = [None] * kinds
    live: list[
        MemoryBlock | int | None
    ] = []  # blocks; handles, of what was given back; None once free
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
