"""Allocator: PyTorch's CUDA caching allocator, simulated: what it reserves for a sequence of
allocations, and whether that fits.

Rounding, pools, best fit, split and coalesce, one set of free blocks per stream, release of what is
cached before giving up; native segments (cudaMalloc) and expandable ones (pages mapped into an
address range of each stream and pool). Nothing is allocated. Among free blocks of one size the
lowest address is taken, and the driver hands addresses out from the top down: the newest segment.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, function by function; names are its own
where there is one. Checked at every step of what an H200's allocator did:
tests/unit/test_allocator_histories.py. Not simulated: graph pools, ``max_split_size_mb``, the
garbage collector.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from highwater.units import MIB

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to multiples of this."""
SMALL_BYTES = MIB
"""The largest size of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
"""Size from which on a segment is as large as its first block, rounded up to
``ROUND_LARGE_BYTES``."""
ROUND_LARGE_BYTES = 2 * MIB
_TOP = LARGE_SEGMENT_BYTES << 28
"""Addresses are handed out from here down; below 2**53, so that the viewers of memory snapshots
read them."""
_EXTENT_BYTES = LARGE_SEGMENT_BYTES << 22
"""Addresses that an expandable range takes: 80 TiB, more than any card has."""


class CapacityError(Exception):
    """The allocator could not serve an allocation within its capacity, after releasing all that was
    cached.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes, {allocated_bytes} allocated, {reserved_bytes} reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A run of bytes: allocated, free, or (expandable) not mapped. Neighbours in its segment are
    ``before`` and ``after``.
    """

    address: int
    size: int
    pool: "_Pool"
    is_expandable: bool
    is_mapped: bool = True
    is_allocated: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(slots=True)
class _Blocks:
    """Blocks by size, then by address."""

    ordered: list[tuple[int, int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        insort(self.ordered, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.ordered[bisect_left(self.ordered, (block.size, block.address))]

    def first_of(self, size: int) -> int:
        """The index of the smallest block that holds ``size``; behind the last where none does."""
        return bisect_left(self.ordered, (size,))

    def all(self) -> list[_Block]:
        return [block for _, _, block in self.ordered]

    def by_address(self) -> list[_Block]:
        return sorted(self.all(), key=lambda block: block.address)


@dataclass(slots=True, kw_only=True)
class _Pool:
    """What one stream has free for small blocks, or for large ones, and what of its expandable
    ranges is not mapped.
    """

    is_small: bool
    free: _Blocks = field(default_factory=_Blocks)
    unmapped: _Blocks = field(default_factory=_Blocks)


class _Pools(dict[tuple[int, bool], _Pool]):
    """Pools by stream, and by whether they are for small blocks; a new one is empty."""

    def __missing__(self, place: tuple[int, bool]) -> _Pool:
        pool = self[place] = _Pool(is_small=place[1])
        return pool


@dataclass(slots=True, kw_only=True)
class CachingAllocator:
    """One device's allocator. ``allocate`` gives a handle, ``free`` takes it back; the figures are
    PyTorch's, in bytes.
    """

    is_expandable: bool = False
    capacity_bytes: int | None = None
    """Bytes that may be reserved; None: a card without end."""
    is_share: bool = False
    """Whether the capacity is a share of the card that the process set itself
    (``set_per_process_memory_fraction``): then a request is measured against it as the segment that
    it would take, also where expandable pages would take less."""
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    """Times that all cached blocks were released to serve an allocation."""
    _pools: _Pools = field(default_factory=_Pools)
    _live: dict[int, _Block] = field(default_factory=dict)
    _awaited: dict[int, None] = field(default_factory=dict)
    """Handles that were given back and are not free yet."""
    _next_handle: int = 0
    _lowest_address: int = _TOP

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """Serve ``size`` bytes on a stream; returns the handle to free them by. Raises
        CapacityError.
        """
        rounded = round_size(size)
        pool = self._pools[stream, rounded <= SMALL_BYTES]
        block = self._best_fit(pool, rounded) or self._new_block(pool, rounded)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._new_block(pool, rounded)
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
        block.pool.free.add(block)

    def give_back(self, handle: int) -> None:
        """Count an allocation no more, but keep its block, which another stream uses: it is free
        when ``free`` says so, or when memory runs short.
        """
        self.allocated_bytes -= self._live[handle].size
        self._awaited[handle] = None

    def is_held(self, handle: int) -> bool:
        """Whether an allocation is not free yet; of one that was given back, whether memory has not
        run short since.
        """
        return handle in self._live

    def place_of(self, handle: int) -> tuple[int, int]:
        """Address and rounded bytes of an allocation that is alive."""
        block = self._live[handle]
        return block.address, block.size

    def release_cached(self) -> None:
        """Wait for what other streams use, then give the device back every free native segment, and
        every free whole page (synchronize_and_free_events, release_cached_blocks).
        """
        for handle in tuple(self._awaited):
            self.free(handle)
        for is_small in (False, True):
            for pool in self._pools.values():
                if pool.is_small is not is_small:
                    continue
                for block in pool.free.all():
                    if block.is_expandable:
                        self._unmap(block)
                    elif block.before is None and block.after is None:
                        pool.free.remove(block)
                        self._reserve(-block.size)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that holds it; among expandable ones, the one that can grow the
        least.
        """
        ordered, best = pool.free.ordered, pool.free.first_of(size)
        if best == len(ordered):
            return None
        if self.is_expandable:
            while best + 1 < len(ordered) and _growable_size(ordered[best + 1][2]) < _growable_size(
                ordered[best][2]
            ):
                best += 1
        return ordered.pop(best)[2]

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        """A block from the device; None where the capacity does not hold it."""
        segment_bytes = segment_size(size)
        is_checked = self.is_share or not self.is_expandable
        if is_checked and self._exceeds(segment_bytes):
            return None
        if self.is_expandable:
            return self._grown_block(pool, size)
        self._reserve(segment_bytes)
        return _Block(self._addresses(segment_bytes), segment_bytes, pool, is_expandable=False)

    def _grown_block(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages until a free block is large enough (try_allocate_expandable_block)."""
        block = self._growth_start(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            assert following is not None  # noqa: S101 -- _growth_start saw the room
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        block.pool.free.remove(block)
        return block

    def _growth_start(self, pool: _Pool, size: int) -> _Block:
        """The block from which on free or unmapped neighbours have room for ``size``; that of a new
        address range where none has (find_expandable_block).
        """
        for unmapped in pool.unmapped.by_address():
            before = unmapped.before
            start = before if before is not None and not before.is_allocated else unmapped
            if _room_from(start, size):
                return start
        block = _Block(
            self._addresses(_EXTENT_BYTES), _EXTENT_BYTES, pool, is_expandable=True, is_mapped=False
        )
        pool.unmapped.add(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Give an unmapped block pages for ``size``, whole ones; the rest stays unmapped
        (map_block).
        """
        page = _page_bytes(block.pool)
        mapped = -(-size // page) * page
        if self._exceeds(mapped):
            return False
        unmapped = block.pool.unmapped
        unmapped.remove(block)
        if mapped < block.size:
            rest = _Block(
                block.address + mapped,
                block.size - mapped,
                block.pool,
                is_expandable=True,
                is_mapped=False,
            )
            _link(rest, block.after)
            _link(block, rest)
            block.size = mapped
            unmapped.add(rest)
        block.is_mapped = True
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.free.add(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: _Block) -> None:
        """Take the whole pages out of a free block; what is left at its ends stays free
        (unmap_block).
        """
        page = _page_bytes(block.pool)
        start = -(-block.address // page) * page
        stop = (block.address + block.size) // page * page
        if start >= stop:
            return
        free = block.pool.free
        free.remove(block)
        if start > block.address:
            head = _Block(block.address, start - block.address, block.pool, is_expandable=True)
            _link(block.before, head)
            _link(head, block)
            free.add(head)
        if stop < block.address + block.size:
            tail = _Block(stop, block.address + block.size - stop, block.pool, is_expandable=True)
            _link(tail, block.after)
            _link(block, tail)
            free.add(tail)
        block.address, block.size, block.is_mapped = start, stop - start, False
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.unmapped.add(block)
        self._reserve(start - stop)

    def _split(self, block: _Block, size: int) -> _Block:
        """The part of a block that is asked for; the rest is free again, unless it is too little
        (should_split).
        """
        rest = block.size - size
        least = MIN_BLOCK_BYTES if block.pool.is_small or self.is_expandable else SMALL_BYTES + 1
        if rest < least:
            return block
        part = _Block(block.address, size, block.pool, block.is_expandable)
        _link(block.before, part)
        _link(part, block)
        block.address += size
        block.size = rest
        block.pool.free.add(block)
        return part

    def _merge(self, block: _Block, neighbour: _Block | None) -> None:
        """Take a neighbour in that is free like this one, or unmapped like this one
        (try_merge_blocks).
        """
        if neighbour is None or neighbour.is_allocated or neighbour.is_mapped != block.is_mapped:
            return
        (neighbour.pool.free if neighbour.is_mapped else neighbour.pool.unmapped).remove(neighbour)
        if neighbour is block.before:
            block.address = neighbour.address
            _link(neighbour.before, block)
        else:
            _link(block, neighbour.after)
        block.size += neighbour.size

    def _exceeds(self, size: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _addresses(self, size: int) -> int:
        """The start of an address range that nobody had, below all others. A driver takes up ranges
        again that were given back: in none of the recorded histories does it matter whether and
        which.
        """
        self._lowest_address -= -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return self._lowest_address


def round_size(size: int) -> int:
    """Bytes that a request counts as."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """Bytes of a native segment for a block of this (rounded) size (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _page_bytes(pool: _Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES


def _growable_size(block: _Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _room_from(block: _Block | None, size: int) -> bool:
    room = 0
    while block is not None and not block.is_allocated and room < size:
        room += block.size
        block = block.after
    return room >= size


def _link(one: _Block | None, other: _Block | None) -> None:
    """Make these neighbours, in this order."""
    if one is not None:
        one.after = other
    if other is not None:
        other.before = one
