"""Constants: what a GPU's memory is spent on besides tensors.

They are read on one machine by ``highwater doctor --measure``.
"""

import msgspec

from highwater.nouns.codec import Record


class Reading(Record, frozen=True, kw_only=True):
    """Bytes that one more thing took when it was used first. The largest of all ranks."""

    name: str
    outside_bytes: int
    """Bytes by the driver, beyond what the caching allocator holds."""
    allocator_bytes: int
    """Bytes kept alive in the caching allocator."""


class Constants(Record, frozen=True, kw_only=True):
    """Readings of one process for each of ``gpus`` GPUs of a kind, in the order of first use."""

    schema_version: int = 1
    device_name: str
    gpus: int
    versions: dict[str, str]
    readings: tuple[Reading, ...]

    def outside_bytes(self, *names: str) -> int:
        """Bytes of these readings together; of one that there is not for so many GPUs 0."""
        return sum(reading.outside_bytes for reading in self.readings if reading.name in names)

    @property
    def context_bytes(self) -> int:
        """Bytes outside the allocator, of everything but NCCL."""
        others = (reading for reading in self.readings if reading.name not in OF_NCCL)
        return sum(reading.outside_bytes for reading in others)


NCCL_GROUP = ("NCCL group", "NCCL collectives")
"""Readings of one communicator and its first collectives."""
NCCL_ALL_TO_ALL = "NCCL all-to-all"
"""The reading of what the first all-to-all adds to the communicator."""
OF_NCCL = (*NCCL_GROUP, NCCL_ALL_TO_ALL, "second NCCL group", "its all-to-all")
CUBLAS_WORKSPACES = ("cuBLAS", "cuBLAS, backward")
"""Readings that the caching allocator keeps for as long as the process lives."""


MEASURED_SCHEMA_VERSION = 1
"""Version of the document of ``highwater doctor --json``, as it is written and read."""


class MeasuredConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction reads of the document that ``highwater doctor --measure --json`` prints."""

    schema_version: int
    constants: tuple[Constants, ...]
    """Constants by number of GPUs."""
