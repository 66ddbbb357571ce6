"""Host memory of machines elsewhere: what one with GPUs of a kind usually has.

``catalog/hosts.json`` has them as data, so that an answer about GPUs that are not here can say
whether its states fit beside them. This machine's own is read, never taken from here.
"""

import json
from functools import cache
from importlib.resources import files

from highwater.nouns.codec import Record, from_builtins
from highwater.nouns.hardware import kind_of
from highwater.units import GIB

THIS_MACHINE = "this machine"
"""The name of the machine whose memory was read, and not taken from the catalog."""


class Host(Record, frozen=True, kw_only=True):
    """A machine as it is rented or built."""

    kind: str
    """Its GPUs, by the catalog's name."""
    gpus: int
    """GPUs that it has; of one that is not divided, at the most."""
    host_gib: int
    """Host memory of the whole machine, in GiB."""
    machine: str
    """The vendor's name for it."""
    source: str
    is_divided: bool = True
    """Whether who uses some of its GPUs has as much of its memory: a desktop has one owner."""


class HostMemory(Record, frozen=True, kw_only=True):
    """Host memory that a machine is taken to have."""

    host_bytes: int
    """For the GPUs that were asked about, on one machine."""
    machine: str
    """The machine that it is of, with the share where not all of its GPUs are used."""
    source: str


@cache
def host_catalog() -> tuple[Host, ...]:
    """Every machine whose host memory is known, by kind and number of GPUs."""
    text = (files("highwater.nouns") / "catalog" / "hosts.json").read_text(encoding="utf-8")
    return tuple(from_builtins(entry, Host) for entry in json.loads(text))


def default_host(device_name: str, gpus: int) -> HostMemory | None:
    """Host memory of one machine with so many GPUs of a driver's name, or the catalog's.

    That of the smallest machine with as many; of a larger one the share of its GPUs. None of a kind
    or a number that no machine of the catalog has: ``gpus`` of several machines are asked about by
    those of each.
    """
    kind = kind_of(device_name)
    known = [host for host in host_catalog() if kind is not None and host.kind == kind.name]
    large = [host for host in known if host.gpus >= gpus > 0]
    if not large:
        return None
    host = min(large, key=lambda each: each.gpus)
    if not host.is_divided or host.gpus == gpus:
        return HostMemory(host_bytes=host.host_gib * GIB, machine=host.machine, source=host.source)
    return HostMemory(
        host_bytes=host.host_gib * GIB * gpus // host.gpus,
        machine=f"{gpus} of {host.gpus} GPUs of {host.machine}",
        source=host.source,
    )
