"""Allocator: PyTorch's CUDA caching allocator, simulated: what it reserves for a sequence of allocations, and whether that fits.

Rounding, pools, best fit, split and coalesce, one set of free blocks per stream, release of what is cached before giving up; native
segments (cudaMalloc) and expandable ones (pages mapped into an address range of each stream and pool). Nothing is allocated.
Among free blocks of one size the lowest address is taken, and the driver hands addresses out from the top down: the newest segment.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, function by function; names are its own where there is one. Checked at
every step of what an H200's allocator did: tests/unit/test_allocator_histories.py.
Not simulated: graph pools, ``max_split_size_mb``, the garbage collector.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

from highwater.units import MIB

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to multiples of this."""
SMALL_BYTES = MIB
"""The largest size of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
"""From here on a segment is as large as its first block, rounded up to ``ROUND_LARGE_BYTES``."""
ROUND_LARGE_BYTES = 2 * MIB
_TOP = LARGE_SEGMENT_BYTES << 28
"""Addresses are handed out from here down; below 2**53, so that the viewers of memory snapshots read them."""
_EXTENT_BYTES = LARGE_SEGMENT_BYTES << 22
"""Addresses that an expandable range takes: 80 TiB, more than any card has."""


class CapacityError(Exception):
    """The allocator could not serve an allocation within its capacity, after releasing all that was cached."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes, {allocated_bytes} allocated, {reserved_bytes} reserved")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A run of bytes: allocated, free, or (expandable) not mapped. Neighbours in its segment are ``before`` and ``after``."""

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    is_mapped: bool = True
    is_allocated: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True)
class _FreeBlocks:
    """Blocks of one stream and pool, ordered by size, then by address."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        key = (block.size, block.address)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: _Block) -> None:
        key = (block.size, block.address)
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def at_least(self, size: int) -> list[_Block]:
        """Blocks of this size or more, the best fit first."""
        return [self.blocks[key] for key in self.keys[bisect_left(self.keys, (size,)) :]]

    def all(self) -> list[_Block]:
        return [self.blocks[key] for key in self.keys]

    def by_address(self) -> list[_Block]:
        return sorted(self.blocks.values(), key=lambda block: block.address)


_Place = tuple[int, bool]
"""A stream, and whether the pool is the small one."""


@dataclass(slots=True, kw_only=True)
class CachingAllocator:
    """One device's allocator. ``allocate`` gives a handle, ``free`` takes it back; the figures are PyTorch's, in bytes."""

    is_expandable: bool = False
    capacity_bytes: int | None = None
    """What may be reserved; None: a card without end."""
    is_share: bool = False
    """The capacity is a share of the card that the process set itself (``set_per_process_memory_fraction``): then a request is
    measured against it as the segment that it would take, also where expandable pages would take less."""
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    """Times that all cached blocks were released to serve an allocation."""
    _free: dict[_Place, _FreeBlocks] = field(default_factory=dict)
    _unmapped: dict[_Place, _FreeBlocks] = field(default_factory=dict)
    _live: dict[int, _Block] = field(default_factory=dict)
    _awaited: dict[int, None] = field(default_factory=dict)
    """Given back and not free yet."""
    _next_handle: int = 0
    _lowest_address: int = _TOP

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """Serve ``size`` bytes on a stream; returns the handle to free them by. Raises CapacityError."""
        rounded = round_size(size)
        place = (stream, rounded <= SMALL_BYTES)
        block = self._best_fit(place, rounded) or self._new_block(place, rounded)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._new_block(place, rounded)
        if block is None:
            raise CapacityError(size, self.allocated_bytes, self.reserved_bytes)
        block = self._split(block, rounded)
        block.is_allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._next_handle += 1
        self._live[self._next_handle] = block
        return self._next_handle

    def free(self, handle: int) -> None:
        """Give an allocation back to the cache. Raises KeyError for a handle that is not alive."""
        block = self._live.pop(handle)
        if handle in self._awaited:
            del self._awaited[handle]
        else:
            self.allocated_bytes -= block.size
        block.is_allocated = False
        self._merge(block, block.before)
        self._merge(block, block.after)
        self._free_blocks(block).add(block)

    def give_back(self, handle: int) -> None:
        """No longer allocated, but used on another stream: free when ``free`` says so, or when memory runs short."""
        self.allocated_bytes -= self._live[handle].size
        self._awaited[handle] = None

    def is_held(self, handle: int) -> bool:
        """Not free yet: memory has not run short since it was given back."""
        return handle in self._live

    def place_of(self, handle: int) -> tuple[int, int]:
        """Address and rounded bytes of an allocation that is alive."""
        block = self._live[handle]
        return block.address, block.size

    def release_cached(self) -> None:
        """Wait for what other streams use, then give the device back every free native segment, and every free whole page
        (synchronize_and_free_events, release_cached_blocks).
        """
        for handle in tuple(self._awaited):
            self.free(handle)
        for is_small in (False, True):
            for (_, small), free in list(self._free.items()):
                if small is not is_small:
                    continue
                for block in free.all():
                    if block.is_expandable:
                        self._unmap(block)
                    elif block.before is None and block.after is None:
                        free.remove(block)
                        self._reserve(-block.size)

    def _best_fit(self, place: _Place, size: int) -> _Block | None:
        """The smallest free block that holds it; among expandable ones, the one that can grow the least."""
        candidates = self._free.setdefault(place, _FreeBlocks()).at_least(size)
        if not candidates:
            return None
        best = candidates[0]
        if self.is_expandable:
            for other in candidates[1:]:
                if _growable_size(other) >= _growable_size(best):
                    break
                best = other
        self._free[place].remove(best)
        return best

    def _new_block(self, place: _Place, size: int) -> _Block | None:
        """A block from the device; None where the capacity does not hold it."""
        segment_bytes = segment_size(size)
        is_checked = self.is_share or not self.is_expandable
        if is_checked and self._exceeds(segment_bytes):
            return None
        if self.is_expandable:
            return self._grown_block(place, size)
        self._reserve(segment_bytes)
        return _Block(self._addresses(segment_bytes), segment_bytes, place[0], place[1], is_expandable=False)

    def _grown_block(self, place: _Place, size: int) -> _Block | None:
        """Map pages until a free block is large enough (try_allocate_expandable_block)."""
        block = self._growth_start(place, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None  # noqa: S101 -- _growth_start saw the room
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        self._free_blocks(block).remove(block)
        return block

    def _growth_start(self, place: _Place, size: int) -> _Block:
        """Where free or unmapped neighbours have room for ``size``; a new address range where none has (find_expandable_block)."""
        for unmapped in self._unmapped.setdefault(place, _FreeBlocks()).by_address():
            before = unmapped.before
            start = before if before is not None and not before.is_allocated else unmapped
            if _room_from(start, size):
                return start
        start = self._addresses(_EXTENT_BYTES)
        block = _Block(start, _EXTENT_BYTES, place[0], place[1], is_expandable=True, is_mapped=False)
        self._unmapped[place].add(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Give an unmapped block pages for ``size``, whole ones; the rest stays unmapped (map_block)."""
        page = _page_bytes(block)
        mapped = -(-size // page) * page
        if self._exceeds(mapped):
            return False
        unmapped = self._unmapped[block.stream, block.is_small]
        unmapped.remove(block)
        if mapped < block.size:
            rest = _Block(block.address + mapped, block.size - mapped, block.stream, block.is_small, True, is_mapped=False)
            _link(block, rest, block.after)
            block.size = mapped
            unmapped.add(rest)
        block.is_mapped = True
        self._merge(block, block.before)
        self._merge(block, block.after)
        self._free_blocks(block).add(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: _Block) -> None:
        """Take the whole pages out of a free block; what is left at its ends stays free (unmap_block)."""
        page = _page_bytes(block)
        start = -(-block.address // page) * page
        stop = (block.address + block.size) // page * page
        if start >= stop:
            return
        free = self._free_blocks(block)
        free.remove(block)
        if start > block.address:
            head = _Block(block.address, start - block.address, block.stream, block.is_small, True)
            _link(block.before, head, block)
            free.add(head)
        if stop < block.address + block.size:
            tail = _Block(stop, block.address + block.size - stop, block.stream, block.is_small, True)
            _link(block, tail, block.after)
            free.add(tail)
        block.address, block.size, block.is_mapped = start, stop - start, False
        self._merge(block, block.before)
        self._merge(block, block.after)
        self._unmapped[block.stream, block.is_small].add(block)
        self._reserve(start - stop)

    def _split(self, block: _Block, size: int) -> _Block:
        """The part of a block that is asked for; the rest is free again, unless it is too little (should_split)."""
        rest = block.size - size
        least = MIN_BLOCK_BYTES if block.is_small or self.is_expandable else SMALL_BYTES + 1
        if rest < least:
            return block
        part = _Block(block.address, size, block.stream, block.is_small, block.is_expandable)
        _link(block.before, part, block)
        block.address += size
        block.size = rest
        self._free_blocks(block).add(block)
        return part

    def _merge(self, block: _Block, neighbour: _Block | None) -> None:
        """Take a neighbour in that is free like this one, or unmapped like this one (try_merge_blocks)."""
        if neighbour is None or neighbour.is_allocated or neighbour.is_mapped != block.is_mapped:
            return
        where = self._free if neighbour.is_mapped else self._unmapped
        where[neighbour.stream, neighbour.is_small].remove(neighbour)
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size

    def _free_blocks(self, block: _Block) -> _FreeBlocks:
        return self._free.setdefault((block.stream, block.is_small), _FreeBlocks())

    def _exceeds(self, size: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _addresses(self, size: int) -> int:
        """A range that nobody had, below all others. A driver takes up ranges again that were given back: in none of the recorded
        histories does it matter whether and which.
        """
        self._lowest_address -= -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return self._lowest_address


def round_size(size: int) -> int:
    """What a request counts as."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """What a native segment for a block of this (rounded) size takes (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _page_bytes(block: _Block) -> int:
    return SMALL_SEGMENT_BYTES if block.is_small else LARGE_SEGMENT_BYTES


def _growable_size(block: _Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _room_from(block: _Block | None, size: int) -> bool:
    room = 0
    while block is not None and not block.is_allocated and room < size:
        room += block.size
        block = block.after
    return room >= size


def _link(*blocks: "_Block | None") -> None:
    """Make these neighbours, in this order."""
    for one, other in pairwise(blocks):
        if one is not None:
            one.after = other
        if other is not None:
            other.before = one
