"""Constants: what a GPU's memory is spent on besides tensors, as read on one machine by ``highwater doctor --measure``."""

import msgspec

from highwater.spec.codec import Noun


class Reading(Noun, frozen=True, kw_only=True):
    """What one more thing took when it was used first. The largest of all ranks."""

    name: str
    outside_bytes: int
    """By the driver, beyond what the caching allocator holds."""
    allocator_bytes: int
    """Kept alive in the caching allocator."""


class Constants(Noun, frozen=True, kw_only=True):
    """Readings of one process for each of ``gpus`` GPUs of a kind, in the order in which things were used."""

    schema_version: int = 1
    device_name: str
    gpus: int
    versions: dict[str, str]
    readings: tuple[Reading, ...]

    def outside_bytes(self, *names: str) -> int:
        """Of these readings together; those that this number of GPUs does not have count as 0."""
        return sum(reading.outside_bytes for reading in self.readings if reading.name in names)

    @property
    def context_bytes(self) -> int:
        """Outside the allocator, of everything but NCCL."""
        return sum(reading.outside_bytes for reading in self.readings if reading.name not in OF_NCCL)


NCCL_GROUP = ("NCCL group", "NCCL collectives")
"""Readings of one communicator and its first collectives."""
NCCL_ALL_TO_ALL = "NCCL all-to-all"
"""What the first all-to-all adds to it."""
OF_NCCL = (*NCCL_GROUP, NCCL_ALL_TO_ALL, "second NCCL group", "its all-to-all")
CUBLAS_WORKSPACES = ("cuBLAS", "cuBLAS, backward")
"""Readings that the caching allocator keeps for as long as the process lives."""


class MeasuredConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction reads of the document that ``highwater doctor --measure --json`` prints."""

    schema_version: int
    constants: tuple[Constants, ...]
    """By number of GPUs."""
