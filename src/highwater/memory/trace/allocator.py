"""Allocator: a simulation of PyTorch's CUDA caching allocator, for reserved bytes and failures.

Rounding, pools, best fit, split and coalesce, one set of free blocks per stream, release of cached
segments before an error; native segments (cudaMalloc) and expandable ones (pages mapped into an
address range of each stream and pool). No memory is allocated. Among free blocks of equal size the
lowest address is taken; the driver hands addresses out from the top down, so the newest segment's.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, function by function; names in
parentheses are its own. Checked at every step against an H200's allocator:
tests/unit/test_allocator.py. Not simulated: graph pools, ``max_split_size_mb``, the
garbage collector.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from highwater.units import MIB

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to multiples of this."""
SMALL_BYTES = MIB
"""The largest request that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
"""Size from which a segment is as large as its first block, rounded to ``ROUND_LARGE_BYTES``."""
ROUND_LARGE_BYTES = 2 * MIB
_TOP = LARGE_SEGMENT_BYTES << 28
"""Top of the addresses; below 2**53, so that viewers of memory snapshots can read them."""
_EXTENT_BYTES = LARGE_SEGMENT_BYTES << 22
"""Size of an expandable address range: 80 TiB, more than any card has."""
ADDRESS_BITS = 53
"""Bits of an address: a block's size and address make one number."""


class CapacityError(Exception):
    """Raised where an allocation does not fit even after all cached blocks were released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes, {allocated_bytes} allocated, {reserved_bytes} reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A range of addresses: allocated, free, or (expandable) reserved without memory."""

    address: int
    size: int
    pool: "MemoryPool"
    is_mapped: bool = True
    is_allocated: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


@dataclass(slots=True)
class MemoryBlocks:
    """Blocks ordered by size, then by address."""

    ordered: list[MemoryBlock] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """Size and address of each block as one number, since a replay compares millions."""

    def add(self, block: MemoryBlock) -> None:
        """Insert a block in the order of size, then address."""
        key = (block.size << ADDRESS_BITS) + block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.ordered.insert(index, block)

    def remove(self, block: MemoryBlock) -> None:
        """Take out a block, whose size and address must not have changed since ``add``."""
        index = bisect_left(self.keys, (block.size << ADDRESS_BITS) + block.address)
        del self.keys[index]
        del self.ordered[index]


@dataclass(slots=True, kw_only=True)
class MemoryPool:
    """Free and unmapped blocks of one stream, either of small or of large requests."""

    is_small: bool
    least_rest_bytes: int
    """Fewest bytes left of a block that become a block of their own (should_split)."""
    free: MemoryBlocks = field(default_factory=MemoryBlocks)
    unmapped: MemoryBlocks = field(default_factory=MemoryBlocks)


@dataclass(slots=True, kw_only=True)
class CachingAllocator:
    """A model of PyTorch's caching allocator of one GPU: the same rounding and splitting."""

    is_expandable: bool = False
    capacity_bytes: int | None = None
    """Bytes that may be reserved; None: unlimited."""
    is_share: bool = False
    """True if the process set the capacity itself, as a share of the card
    (``set_per_process_memory_fraction``): then a request is checked by the size of its native
    segment, even if expandable pages would take less."""
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    """Number of times that all cached blocks were released to serve an allocation."""
    _pools: dict[tuple[int, bool], MemoryPool] = field(default_factory=dict)
    """Pools by stream and ``is_small``."""
    _live: dict[int, MemoryBlock] = field(default_factory=dict)
    _awaited: dict[int, None] = field(default_factory=dict)
    """Handles that were given back, but are not free yet."""
    _next_handle: int = 0
    _lowest_address: int = _TOP

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """Allocate ``size`` bytes on a stream and return a handle. Raises CapacityError."""
        rounded = round_size(size)
        block = self.take(self.pool(stream, is_small=rounded <= SMALL_BYTES), rounded)
        if block is None:
            raise CapacityError(size, self.allocated_bytes, self.reserved_bytes)
        return self.handle(block)

    def take(self, pool: MemoryPool, size: int) -> MemoryBlock | None:
        """Take a block of ``size`` rounded bytes from a pool; None if the GPU is full."""
        free = pool.free
        keys = free.keys
        best = bisect_left(keys, size << ADDRESS_BITS)
        if best < len(keys):
            if self.is_expandable:
                best = _least_growing(free.ordered, best)
            del keys[best]
            block = free.ordered.pop(best)
        else:
            block = self._new_block(pool, size)
            if block is None:
                self.retries += 1
                self.release_cached()
                block = self._new_block(pool, size)
            if block is None:
                return None
        rest_bytes = block.size - size
        if rest_bytes >= pool.least_rest_bytes:
            before = block.before
            part = MemoryBlock(block.address, size, pool, True, True, before, block)
            if before is not None:
                before.after = part
            block.before = part
            block.address += size
            block.size = rest_bytes
            free.add(block)
            block = part
        else:
            block.is_allocated = True
        self.allocated_bytes = allocated_bytes = self.allocated_bytes + block.size
        if allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated_bytes
        return block

    def free(self, handle: int) -> None:
        """Return an allocation to the cache. Raises KeyError for a handle that is not alive."""
        block = self._live.pop(handle)
        if handle in self._awaited:
            del self._awaited[handle]
            self.allocated_bytes += block.size  # ``give_back`` subtracted it already
        self.put(block)

    def put(self, block: MemoryBlock) -> None:
        """Return to the cache a block that ``take`` allocated."""
        self.allocated_bytes -= block.size
        block.is_allocated = False
        before, after = block.before, block.after
        if before is not None and not before.is_allocated:
            self._merge(block, before)
        if after is not None and not after.is_allocated:
            self._merge(block, after)
        block.pool.free.add(block)

    def pool(self, stream: int, *, is_small: bool) -> MemoryPool:
        """The blocks of a stream for small or large requests; an empty pool at first."""
        pool = self._pools.get((stream, is_small))
        if pool is None:
            splits = is_small or self.is_expandable
            pool = self._pools[stream, is_small] = MemoryPool(
                is_small=is_small,
                least_rest_bytes=MIN_BLOCK_BYTES if splits else SMALL_BYTES + 1,
            )
        return pool

    def give_back(self, handle: int) -> None:
        """Stop counting an allocation, but keep its block, which another stream still uses, until
        ``free`` is called or memory runs out.
        """
        self.allocated_bytes -= self._live[handle].size
        self._awaited[handle] = None

    def handle(self, block: MemoryBlock) -> int:
        """Make a handle, as of ``allocate``, for a block that ``take`` allocated."""
        self._next_handle += 1
        self._live[self._next_handle] = block
        return self._next_handle

    def is_held(self, handle: int) -> bool:
        """True until the allocation is freed, also if it was given back early."""
        return handle in self._live

    def place_of(self, handle: int) -> tuple[int, int]:
        """Address and rounded bytes of a live allocation. Raises KeyError if it is not live."""
        block = self._live[handle]
        return block.address, block.size

    def release_cached(self) -> None:
        """Free the blocks that other streams used, then return every free native segment and every
        free whole page to the device (synchronize_and_free_events, release_cached_blocks).
        """
        for handle in tuple(self._awaited):
            self.free(handle)
        for pool in sorted(
            self._pools.values(), key=lambda pool: pool.is_small
        ):  # large ones first
            for block in list(pool.free.ordered):
                if self.is_expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.free.remove(block)
                    self._reserve(-block.size)

    def _new_block(self, pool: MemoryPool, size: int) -> MemoryBlock | None:
        """A free block in new memory from the device; None if it exceeds the capacity."""
        segment_bytes = segment_size(size)
        is_checked = self.is_share or not self.is_expandable
        if is_checked and self._exceeds(segment_bytes):
            return None
        if self.is_expandable:
            return self._grown_block(pool, size)
        self._reserve(segment_bytes)
        return MemoryBlock(self._addresses(segment_bytes), segment_bytes, pool)

    def _grown_block(self, pool: MemoryPool, size: int) -> MemoryBlock | None:
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

    def _growth_start(self, pool: MemoryPool, size: int) -> MemoryBlock:
        """The first block that has room for ``size`` together with the free or unmapped blocks
        after it; else the block of a new address range (find_expandable_block).
        """
        for unmapped in sorted(pool.unmapped.ordered, key=lambda block: block.address):
            before = unmapped.before
            start = before if before is not None and not before.is_allocated else unmapped
            if _room_from(start, size):
                return start
        block = MemoryBlock(self._addresses(_EXTENT_BYTES), _EXTENT_BYTES, pool, is_mapped=False)
        pool.unmapped.add(block)
        return block

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Map a block's first pages for ``size`` (map_block); False if they exceed the capacity."""
        page = _page_bytes(block.pool)
        mapped = -(-size // page) * page
        if self._exceeds(mapped):
            return False
        unmapped = block.pool.unmapped
        unmapped.remove(block)
        if mapped < block.size:
            unmapped.add(_cut(block, block.address + mapped))
        block.is_mapped = True
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.free.add(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        """Unmap the whole pages within a free block; its ends stay free (unmap_block)."""
        page = _page_bytes(block.pool)
        start = -(-block.address // page) * page
        stop = (block.address + block.size) // page * page
        if start >= stop:
            return
        free = block.pool.free
        free.remove(block)
        if start > block.address:
            head, block = block, _cut(block, start)
            free.add(head)
        if stop < block.address + block.size:
            free.add(_cut(block, stop))
        block.is_mapped = False
        self._merge(block, block.before)
        self._merge(block, block.after)
        block.pool.unmapped.add(block)
        self._reserve(start - stop)

    def _merge(self, block: MemoryBlock, neighbour: MemoryBlock | None) -> None:
        """Merge a neighbour into a block if both are free or both unmapped (try_merge_blocks)."""
        if neighbour is None or neighbour.is_allocated or neighbour.is_mapped != block.is_mapped:
            return
        pool = block.pool
        (pool.free if neighbour.is_mapped else pool.unmapped).remove(neighbour)
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
        """Start of a new address range, below all others; ranges are not reused."""
        self._lowest_address -= -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return self._lowest_address


def round_size(size: int) -> int:
    """Bytes of the block for a request: a multiple of ``MIN_BLOCK_BYTES``."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """Bytes of a native segment for a block of this (rounded) size (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _page_bytes(pool: MemoryPool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES


def _least_growing(ordered: list[MemoryBlock], best: int) -> int:
    """Index in ``ordered`` of the first block, from ``best`` on, that cannot outgrow the next."""
    least = _growable_size(ordered[best])
    for index in range(best + 1, len(ordered)):
        size = _growable_size(ordered[index])
        if size >= least:
            return index - 1
        least = size
    return len(ordered) - 1


def _growable_size(block: MemoryBlock) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _room_from(block: MemoryBlock | None, size: int) -> bool:
    room = 0
    while block is not None and not block.is_allocated and room < size:
        room += block.size
        block = block.after
    return room >= size


def _cut(block: MemoryBlock, address: int) -> MemoryBlock:
    """Cut a block that is not allocated at an address; returns the part from there on."""
    size = block.address + block.size - address
    rest = MemoryBlock(address, size, block.pool, block.is_mapped)
    _link(rest, block.after)
    _link(block, rest)
    block.size -= size
    return rest


def _link(one: MemoryBlock | None, other: MemoryBlock | None) -> None:
    """Make two blocks neighbours, ``one`` before ``other``; None is the end of a segment."""
    if one is not None:
        one.after = other
    if other is not None:
        other.before = one
