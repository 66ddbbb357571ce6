"""Cluster: a user's description of GPUs that need not be in this machine.

``4xA100-80GB``, ``H200-141GB``, ``2x8xH100-80GB`` of two machines, or ``8`` of this machine's kind.
"""

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import NamedTuple

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import (
    MOST_GPUS_OF_A_MACHINE,
    MOST_GPUS_PREDICTED,
    USUAL_GPUS_OF_A_MACHINE,
)
from highwater.nouns.hardware import (
    OLDEST_CAPABILITY,
    Gpu,
    GpuKind,
    Machine,
    gpu_catalog,
    kind_of,
    lacking,
)
from highwater.units import GIB, binary_size, format_bytes, parse_bytes, parse_memory

_NAMED = re.compile(r"(?:(\d+)\s*[xX×*]\s*)?(.+)")
_OF_A_MACHINE = re.compile(r"(\d+)(?:\s*[xX×*]\s*(.+))?")
"""Text after the number of machines: the GPUs of each, and their kind."""
_EXAMPLE = "`--gpus 4xA100-80GB`"
_DIGITS = 9
_COUNT_BEHIND = re.compile(r"(\D.*(?=:)|\d{4}(?=:)|\D.*\d.*?)\s*[:xX×*]\s*(\d+)")
"""A kind and then its count: ``A100:4``, as SkyPilot has them, or ``A100x4``."""
_UNLISTED = {
    r"(nvidia )?(dgx ?spark|gb10)": ("has its host's memory, which no driver tells", "119GiB"),
    r"(nvidia )?gb300( .*)?": ("is B300 beside a CPU, whose driver nobody has read", "B300"),
    r"(apple )?m\d( (pro|max|ultra))?": ("is Apple's, and shares its host's memory", "16GiB"),
    r"(.*\b)?(ascend|910[abc]|gaudi ?\d?|tpu ?(v\d\w*)?|v\d[ep]|trainium ?\d?)\b.*": (
        "is of neither NVIDIA nor AMD, whose libraries alone are known",
        "60GiB",
    ),
}
"""Names that the catalog does not have, why, and for an example a memory, or a kind like it."""
_COUNT_ALONE = re.compile(rf"(\d{{1,{_DIGITS}}})\s*[xX×*]")
"""A count that no kind follows."""
_SIZE = re.compile(r"(\d{2,3})(?:gi?b?)?")
"""A word of a GPU's name that says how much memory it has: ``80GB``."""
_SAID_SIZE = re.compile(r"\b(\d{1,3})gi?b\b")
"""A size of memory anywhere in a GPU's name, with its unit."""
_SOLD = re.compile(r"\s*(\d{1,3})\s*gb?\s*", re.IGNORECASE)
"""A size of memory as cards are sold by: ``24GB``."""
_UNKNOWN_GIB = 16
"""Memory in the example for a GPU of unknown memory, in GiB."""
_LEAST_BYTES = GIB
"""Least memory of a GPU: less is a number without its unit."""
_SAME_FROM = 0.9
"""Least share of the size in a card's name that its driver reports."""
_NUMBER = re.compile(r"([a-z ]*)(\d+)([a-z]*)")
"""A card's name: letters, its number, letters right behind it: ``l 40 s``, ``rtx 4090``."""
_FORMS = ("sxm", "pcie", "nvl")
"""Letters behind a number that name how a card is built, and not another card."""
_WORD, _ALIKE = 3, 0.6
"""Fewest letters of a word that may be mistyped, and its least similarity (0 to 1) to be meant."""


class Cluster(Record, frozen=True, kw_only=True):
    """GPUs of one kind that a prediction is about, which need not be in this machine."""

    gpus: int
    device_name: str
    device_bytes: int
    """Memory of one GPU, as its driver reports it."""
    compute_capability: tuple[int, int] = OLDEST_CAPABILITY
    """The kind's compute capability; where no kind is named, that of the oldest that trains."""
    machines: int = 1
    """Machines with equally many of the GPUs."""
    host_bytes: int | None = None
    """Host memory of this machine, if its own GPUs are meant; else None."""

    @property
    def machine_gpus(self) -> int:
        """GPUs of each machine."""
        return self.gpus // self.machines

    @property
    def typed(self) -> str:
        """Text of ``--gpus`` for this cluster: ``2x8xH100-80GB``; unlisted kinds are left out."""
        known = self.device_name if kind_of(self.device_name) else None
        return _typed(self.gpus, known, machines=self.machines)

    def on_one_machine(self) -> "Cluster":
        """The GPUs of one machine of the cluster."""
        return self.replace(gpus=self.machine_gpus, machines=1)

    def machine(self) -> Machine:
        """A machine with these GPUs, to plan on; what else it has is unknown or 0."""
        gpu = Gpu(
            index=0,
            name=self.device_name,
            memory_total_bytes=self.device_bytes,
            memory_used_bytes=0,
            compute_capability=self.compute_capability,
            processes=(),
        )
        return Machine(
            gpus=(gpu,) * self.gpus,
            driver_version=None,
            cpu_cores=self.gpus,
            host_memory_total_bytes=0,
            host_memory_available_bytes=0,
            versions={},
        )


def cluster(text: str | None, *, gpu_memory_bytes: int | None, machine: Machine | None) -> Cluster:
    """Read ``--gpus`` and ``--gpu-memory``: a count, a kind of the catalog, or both, after an
    optional number of machines with that count each. ``machine`` is this machine, if it was probed:
    a count without a kind, or no text, means its GPUs. Raises UsageError for an unknown kind, or a
    kind whose memory is unknown; MachineError for a kind that cannot train.
    """
    named = _parse(text)
    if gpu_memory_bytes is not None:
        refuse_small_gpu(gpu_memory_bytes)
    found = _cluster(named, gpu_memory_bytes, machine)
    return found.replace(machines=_machines(found.gpus, named.machines))


class _Named(NamedTuple):
    """The parts of a ``--gpus`` text."""

    machines: int = 1
    gpus: int | None = None
    """Number on all machines together; None where no number was typed."""
    kind: str | None = None


def _cluster(named: _Named, gpu_memory_bytes: int | None, machine: Machine | None) -> Cluster:
    count, name = named.gpus, named.kind
    if name is not None:
        kind = _kind(name, named, gpu_memory_bytes)
        memory_bytes = kind.usable_bytes if gpu_memory_bytes is None else gpu_memory_bytes
        if memory_bytes is None:
            raise UsageError(
                f"the memory of {kind.name} is not in the catalog",
                hint=f"add {own_memory(kind.name)}",
            )
        return Cluster(
            gpus=count or 1,
            device_name=kind.name,
            device_bytes=memory_bytes,
            compute_capability=kind.compute_capability,
        )
    if gpu_memory_bytes is not None:
        return Cluster(
            gpus=count or 1, device_name=nameless(gpu_memory_bytes), device_bytes=gpu_memory_bytes
        )
    if machine is None or not machine.gpus:
        raise UsageError(
            "no GPU is here, and none is named",
            hint=f"name some: {_EXAMPLE}, or `--gpus 4 --gpu-memory 80GiB`",
        )
    here = machine.gpus[0]
    return Cluster(
        gpus=count or len(machine.gpus),
        device_name=here.name,
        device_bytes=min(g.memory_total_bytes for g in machine.gpus),
        compute_capability=here.compute_capability,
        host_bytes=machine.host_bytes,
    )


def gpus_listed(text: str | None) -> tuple[str, ...]:
    """The GPUs that a text lists: ``A100,8xH100`` names ``A100`` and ``8xH100``."""
    return () if text is None else tuple(filter(None, re.split(r"\s*[,+]\s*", text.strip())))


def has_count(text: str) -> bool:
    """True if a text has a number of GPUs, or names no kind; false for ``A100``."""
    named = _parse(text)
    return named.kind is None or named.gpus is not None


def refuse_small_gpu(memory_bytes: int) -> None:
    """Raise UsageError for a memory below 1 GiB, which no GPU has."""
    if memory_bytes < _LEAST_BYTES:
        least = f"{format_bytes(_LEAST_BYTES)} is the least"
        problem = f"a GPU with a memory of {format_bytes(memory_bytes)}; {least}"
        raise UsageError(problem, hint="give its own, for example `--gpu-memory 80GiB`")


def card_memory(text: str, read: Callable[[str], int] = parse_memory) -> int:
    """Parse ``--gpu-memory``, to bytes. Raises UsageError for a nominal size that GPUs are sold by,
    ``24GB``: the driver of each such GPU reports less, and the hint says how much.
    """
    sold = _SOLD.fullmatch(text)
    most_bytes = int(sold[1]) * GIB if sold else 0
    cards = {
        kind.usable_bytes: kind.name
        for kind in reversed(gpu_catalog())
        if kind.usable_bytes and _SAME_FROM * most_bytes <= kind.usable_bytes <= most_bytes
        if not lacking(kind)
    }
    if not cards:
        return read(text)
    sizes = (f"`{_size(size)}` of {name}" for size, name in sorted(cards.items(), reverse=True))
    raise UsageError(
        f"memory size {text!r} is what cards are sold by, and their drivers report less",
        hint=f"name the card's own: {', '.join(sizes)}",
    )


def nameless(device_bytes: int) -> str:
    """Display name for GPUs of which only the memory, in bytes, is known."""
    return f"a GPU of {format_bytes(device_bytes)}"


def _parse(text: str | None) -> _Named:
    if text is None:
        return _Named()
    first, *others = re.split(r"\s*[,+]\s*", text)
    if others:
        problem = f"{text!r}: GPUs of two kinds are not predicted together"
        raise UsageError(problem, hint=f"ask for each alone: `--gpus {first}`")
    behind = _COUNT_BEHIND.fullmatch(text.strip())
    text = text if behind is None else f"{behind[2]}x{behind[1]}"
    is_card = text.strip().isdecimal() and kind_by_number(text.strip()) is not None
    if text.strip().isdecimal() and not is_card:
        return _Named(gpus=_counted(text, text))
    match = _NAMED.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} names no GPUs", hint=f"for example {_EXAMPLE}")
    count = None if match[1] is None else _counted(match[1], text)
    within = _OF_A_MACHINE.fullmatch(match[2])
    is_kind = within is None or (within[2] is None and int(within[1]) > MOST_GPUS_PREDICTED)
    if count is None or within is None or is_kind:  # `2x4090`: a card by its number
        return _Named(gpus=count, kind=match[2])
    own = _counted(within[1], text)
    if own > MOST_GPUS_OF_A_MACHINE or count * own > MOST_GPUS_PREDICTED:
        fewer = min(own, MOST_GPUS_OF_A_MACHINE)
        machines = min(count, MOST_GPUS_PREDICTED // fewer)
        most = _typed(fewer * machines, within[2], machines=machines)
        raise UsageError(
            f"{text!r}: a machine has {MOST_GPUS_OF_A_MACHINE} GPUs at the most, and a prediction "
            f"is about up to {MOST_GPUS_PREDICTED}",
            hint=f"for example `--gpus {most}`",
        )
    return _Named(machines=count, gpus=count * own, kind=within[2])


def _counted(digits: str, text: str) -> int:
    if len(digits) > _DIGITS or not 1 <= int(digits) <= MOST_GPUS_PREDICTED:
        raise UsageError(
            f"{text!r}: a prediction is about 1 to {MOST_GPUS_PREDICTED} GPUs",
            hint=f"for example {_EXAMPLE}",
        )
    return int(digits)


def _kind(name: str, named: _Named, gpu_memory_bytes: int | None) -> GpuKind:
    """The GPU kind by its catalog or driver name. Raises UsageError for one that is unknown
    or of different memory, MachineError for one that cannot train.
    """
    kinds = {kind.name.lower(): kind for kind in gpu_catalog()}
    said = re.sub(r"[\s_-]+", " ", name.lower()).strip()
    found = kinds.get(name.lower()) or kind_of(name) or kind_by_number(name)
    for pattern, (why, like) in _UNLISTED.items():
        if found is None and re.fullmatch(pattern, said):
            kind = kinds.get(like.lower())
            gpus = _typed(named.gpus or 1, kind and kind.name, machines=named.machines)
            size = f"name what tensors may take, for {like} `--gpus {gpus} --gpu-memory {like}`"
            hint = f"use `--gpus {gpus}`" if kind else size
            raise UsageError(f"{name} {why}", hint=hint)
    counted = _COUNT_ALONE.fullmatch(name) if named.gpus is None else None
    gpus = min(max(1, int(counted[1])), MOST_GPUS_OF_A_MACHINE) if counted else named.gpus
    asked = named._replace(gpus=gpus)
    near = found or _near(name)
    if near is not None and (missing := lacking(near)):  # of a near one, whose name is next
        size = f"{(near.usable_bytes or 0) / GIB:.2f}GiB"
        words = _typed(gpus or 1, None, machines=named.machines)
        hint = f"use `--gpus {words} --gpu-memory {size}`, a GPU of its size that has both: fp16 "
        hint += "and SDPA's memory-efficient attention take as much"
        raise MachineError(f"{near.name} has no {' and no '.join(missing)}", hint=hint)
    if found is None:
        raise UsageError(
            f"the catalog has no GPU {name!r}; `highwater gpus` lists those that it has",
            hint=_meant(near, asked, gpu_memory_bytes, name),
        )
    size = _contradicting_size(name, found)
    if size is not None:
        family = (kind for kind in kinds.values() if _family(kind.name) == _family(found.name))
        sizes = [kind for kind in family if _has(kind, size)]
        problem = f"{name!r} has {size} GB, and the catalog's {found.name} has not"
        hint = _meant(sizes[0] if sizes else None, asked, gpu_memory_bytes, f"{size}GB")
        raise UsageError(problem, hint=hint)
    return found


def _contradicting_size(name: str, kind: GpuKind) -> int | None:
    """The size in GB in ``name`` that no GPU of this kind has; None if there is no such size."""
    matches = map(_SIZE.fullmatch, re.split(r"[\s-]+", name.lower()))
    said = (int(match[1]) for match in matches if match)
    own = (size for size in said if size not in kind.host_gigabytes)
    return next((size for size in own if not _has(kind, size)), None)


def _has(kind: GpuKind, size: int) -> bool:
    """True if the kind is sold with ``size`` GB: by its memory, or if unknown by its name."""
    if kind.usable_bytes is None:
        return "gb" not in kind.name.lower() or f"{size}gb" in kind.name.lower()
    return _SAME_FROM * size * GIB < kind.usable_bytes <= size * GIB


def _near(name: str) -> GpuKind | None:
    """The kind that an unlisted name may mean: with the same number and almost the same letters."""
    typed = _numbered(name)
    if typed is None:
        return None
    kinds = [
        kind
        for kind in gpu_catalog()
        if kind.usable_bytes and _contradicting_size(name, kind) is None
    ]
    return next((kind for kind in kinds if _is_meant(kind, *typed)), None)


def kind_by_number(name: str) -> GpuKind | None:
    """The only kind whose name contains this four-digit number: ``4090``; None without one."""
    having = [kind for kind in gpu_catalog() if re.search(rf"\b{re.escape(name)}\b", kind.name)]
    return having[0] if re.fullmatch(r"\d{4}", name) and len(having) == 1 else None


def _numbered(name: str) -> tuple[str, str, str] | None:
    """A GPU's number, and the letters before and right after it; None if a name has no number."""
    match = _NUMBER.match(re.sub(r"[^a-z0-9]+", " ", name.lower()).strip())
    return None if match is None else (match[1].replace(" ", ""), match[2], match[3])


def _is_meant(kind: GpuKind, before: str, number: str, behind: str) -> bool:
    own = _numbered(kind.name)
    if own is None or own[1] != number or own[2] != (behind if behind not in _FORMS else ""):
        return False
    ratio = SequenceMatcher(None, own[0], before).ratio()
    return own[0] == before or (min(len(own[0]), len(before)) >= _WORD and ratio >= _ALIKE)


def _family(name: str) -> str:
    """The family of a kind's name: ``h100`` of ``H100-80GB``; all of it without a digit."""
    first = name.lower().partition("-")[0]
    return first if any(letter.isdecimal() for letter in first) else name.lower()


def _meant(kind: GpuKind | None, asked: _Named, gpu_memory_bytes: int | None, name: str) -> str:
    """Hint for an unknown kind ``name``: the most similar kind, or else ``--gpu-memory``."""
    if gpu_memory_bytes is None and kind is not None and kind.usable_bytes is not None:
        alike = [each for each in gpu_catalog() if _family(each.name) == _family(name)] or [kind]
        named = (
            _typed(asked.gpus, each.name, machines=asked.machines) if asked.gpus else each.name
            for each in alike
        )
        return f"use {' or '.join(f'`--gpus {each}`' for each in named)}"
    gpus = f"--gpus {_typed(asked.gpus or 1, None, machines=asked.machines)} "
    if gpu_memory_bytes is not None:
        return f"name its memory, `{gpus}--gpu-memory {_size(gpu_memory_bytes)}`"
    return f"name {own_memory(name, gpus)}"


def own_memory(name: str, gpus: str = "") -> str:
    """A hint to type for a GPU not in the catalog: ``--gpu-memory`` with the size in its name,
    taken as 10⁹ bytes each so as not to exceed the real memory; else what `nvidia-smi` shows.
    ``gpus``: flags before it.
    """
    said = _SAID_SIZE.search(name.lower())
    if said is None:
        return (
            "the memory that `nvidia-smi` shows of it, for one of "
            f"{_UNKNOWN_GIB} GiB `{gpus}--gpu-memory {_UNKNOWN_GIB}GiB`"
        )
    size = binary_size(int(said[1]) * 10**9)
    return f"its memory, `{gpus}--gpu-memory {size}` or what `nvidia-smi` shows of it"


def _typed(gpus: int, kind: str | None, *, machines: int = 1) -> str:
    """Text for ``--gpus``."""
    machines = _machines(gpus, machines)
    counts = (machines, gpus // machines) if machines > 1 else (gpus,)
    return "x".join((*map(str, counts), *((kind,) if kind else ())))


def _machines(gpus: int, named: int) -> int:
    """The machines that were named; if none were, as many as so many GPUs need, mostly of 8."""
    if named > 1 or gpus <= MOST_GPUS_OF_A_MACHINE:
        return named
    usual = (USUAL_GPUS_OF_A_MACHINE, *range(MOST_GPUS_OF_A_MACHINE, 0, -1))
    return gpus // next(own for own in usual if gpus % own == 0)


def _size(count: int) -> str:
    """Text of a size as a user types it: ``60.5GiB``, or the exact number of bytes."""
    spellings = (f"{count / GIB:.{digits}g}" for digits in (6, 15))
    exact = (
        f"{text}GiB"
        for text in spellings
        if text.replace(".", "").isdecimal() and parse_bytes(f"{text}GiB") == count
    )
    return next(exact, str(count))
