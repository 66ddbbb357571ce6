"""Breakdown: a GPU's memory in the parts that a prediction names: terms, the phases of a step in
which they are alive, and the footprint of one GPU.
"""

import msgspec

from highwater.nouns.codec import Record

LOSS = "loss"
"""Name of the phase in which logits are: another trainer has others there."""
WORKSPACES = "workspaces of cuBLAS"
"""Name of the term that every phase on a GPU has: what a library keeps in the allocator."""


class Term(Record, frozen=True, kw_only=True):
    """One part of the memory, by its name."""

    name: str
    bytes: int


class Phase(Record, frozen=True, kw_only=True):
    """One moment of a step, and what is alive in it."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all terms together."""
        return sum(term.bytes for term in self.terms)


class Footprint(Record, frozen=True, kw_only=True):
    """Predicted memory of one GPU, and of the host over all of them."""

    phases: tuple[Phase, ...]
    outside: tuple[Term, ...]
    """Device memory that the allocator does not hold."""
    host: tuple[Term, ...]
    filled_share: float
    """Share of the allocator's memory that live tensors can fill."""
    cached_bytes: int = 0
    """Bytes that the allocator keeps besides, between its uses, and gives back where it has to:
    reserved, but not needed."""

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors at their peak."""
        return self.peak.bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator takes for the live tensors, and keeps."""
        return round(self.allocated_bytes / self.filled_share) + self.cached_bytes

    @property
    def besides(self) -> tuple[Term, ...]:
        """Terms of what is reserved besides the live tensors of the peak."""
        unfilled_bytes = self.reserved_bytes - self.cached_bytes - self.allocated_bytes
        return present(
            Term(name="what the allocator cannot fill", bytes=unfilled_bytes),
            Term(name="kept until memory runs short", bytes=self.cached_bytes),
        )

    @property
    def used(self) -> tuple[Term, ...]:
        """Terms of all that the driver reports at the peak: their sum is ``device_used_bytes``."""
        return (*self.peak.terms, *self.besides, *self.outside)

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that the allocator does not hold."""
        return sum(term.bytes for term in self.outside)

    @property
    def device_used_bytes(self) -> int:
        """Bytes in use as the driver reports them."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that a GPU has to have: one with less runs out of memory."""
        return self.device_used_bytes - self.cached_bytes

    def with_libraries(self, *, outside: tuple[Term, ...], workspaces_bytes: int) -> "Footprint":
        """The footprint with what libraries were measured to take in the place of what was
        predicted: outside the allocator, and cuBLAS's workspaces in it.
        """

        def measured(term: Term) -> Term:
            return Term(name=term.name, bytes=workspaces_bytes) if term.name == WORKSPACES else term

        phases = tuple(
            Phase(name=phase.name, terms=present(*map(measured, phase.terms)))
            for phase in self.phases
        )
        return msgspec.structs.replace(self, phases=phases, outside=outside)

    def within(self, room_bytes: int) -> "Footprint":
        """The footprint on a GPU with this much memory: nothing stays cached that there is no room
        for.
        """
        return msgspec.structs.replace(
            self, cached_bytes=max(0, min(self.cached_bytes, room_bytes - self.needed_bytes))
        )

    @property
    def host_bytes(self) -> int:
        """Bytes that the machine's memory has to have."""
        return sum(term.bytes for term in self.host)


def present(*terms: Term) -> tuple[Term, ...]:
    """The terms that are not zero."""
    return tuple(term for term in terms if term.bytes)
