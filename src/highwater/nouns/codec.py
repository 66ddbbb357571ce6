"""Records to JSON and back, one strict codec for every file and document; and the digest by which a
question or a trial is known again, whatever settings are added later (docs/decisions/026).

Files are read only if they are regular, and up to a bound: a pipe would be waited for without end,
a device would fill the memory. They are written whole or not at all.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from highwater.errors import UsageError
from highwater.units import MIB, format_bytes

T = TypeVar("T")
_fields_of = cache(msgspec.structs.fields)  # it evaluates every annotation of the type anew


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True
):
    """Base of every record: immutable, keyword-only, unknown fields refused when read."""

    def replace(self, **changes: Any) -> Self:
        """A copy of the record with some fields changed; it is validated again."""
        return msgspec.structs.replace(self, **changes)


def to_json(value: object, *, indent: int = 0) -> str:
    """JSON text of a record, keys in declaration order: equal values give equal text."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Decode JSON as a record of type ``kind``. Raises msgspec.ValidationError for missing or
    unknown fields and wrong types, msgspec.DecodeError for text that is not JSON, and
    HighwaterError for values that the record refuses.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error


def packaged(name: str, kind: type[T]) -> T:
    """Read a record from a JSON file of this package: ``nouns/catalog/gpus.json``."""
    return from_json(Path(__file__).parents[1].joinpath(name).read_bytes(), kind)


def to_builtins(value: object) -> Any:
    """The record as plain dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def from_builtins(value: object, kind: type[T]) -> T:
    """Make a record of type ``kind`` from dicts and lists; raises the errors of ``from_json``."""
    return msgspec.convert(value, type=kind)


def digest(value: object) -> str:
    """16 hexadecimal digits that name a value: equal values, equal digests, on any machine."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


_IN_EVERY_KEY: Mapping[str, frozenset[str]] = {
    "Settings": frozenset(
        (
            *("strategy", "allocator", "loss", "entropy", "offload", "objective", "critic"),
            *("sequences_per_micro_batch", "token_budget_tokens"),
            *("recompute", "mlp_tiles", "rope", "save_hf", "checkpoint"),
        )
    ),
    "Layout": frozenset(("gpus", "ulysses_degree", "ring_degree", "replicate_degree")),
    "Model": frozenset(("rope",)),
    "ModelShape": frozenset(("experts", "experts_per_token")),
    "Question": frozenset(
        (
            *("method", "confirm", "margin_bytes", "steps", "micro_batches", "data"),
            *("simulated", "proof", "timeout_s"),
        )
    ),
    "TrialSpec": frozenset(
        ("memory_budget_bytes", "steps", "micro_batches", "seed", "data", "attention_depth")
    ),
}
"""Fields that are in a key even at their defaults, by record: those that were there when the first
keys were written down. Nothing is ever added: a field that came later is in a key only where it
differs from its default, so that what was asked before it came is still the same question. For the
same reason the default of a recorded field never changes."""


def key_of(value: msgspec.Struct, *, without: tuple[str, ...], blank: tuple[str, ...] = ()) -> str:
    """The digest of a record: equal records, equal keys, on any machine and in any later version.
    Fields named in ``without`` or ``blank``, of this record or of any within it, are not part of
    its identity: the former are left out, the latter are null.
    """
    return digest(_identified(value, without, blank))


def _identified(value: Any, without: tuple[str, ...], blank: tuple[str, ...]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_identified(each, without, blank) for each in value]
    if not isinstance(value, msgspec.Struct):
        return to_builtins(value)
    names = (kind.__name__ for kind in type(value).__mro__)
    always = next((_IN_EVERY_KEY[name] for name in names if name in _IN_EVERY_KEY), frozenset())
    identified: dict[str, Any] = {}
    for field in _fields_of(type(value)):
        own = getattr(value, field.name)
        if field.name not in without and (field.name in always or not _is_default(own, field)):
            said = None if field.name in blank else _identified(own, without, blank)
            identified[field.encode_name] = said
    return identified


def _is_default(own: Any, field: msgspec.structs.FieldInfo) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return own == field.default_factory()
    return field.default is not msgspec.NODEFAULT and own == field.default


SETTINGS_BYTES = MIB
"""Most bytes of a file of settings or capacities; the published table has 12 KiB."""
CONFIG_BYTES = 16 * MIB
"""Most bytes of a ``config.json``, or of ``predict --json``; the largest have a few MiB."""

INDEX_BYTES = 1024 * MIB
"""Most bytes of a JSON document in a checkpoint or a corpus: its manifest, its index, its state. An
index of 100,000 pieces has about 20 MiB, a state of a million steps as much."""


def record_in(path: Path, kind: type[T], *, called: str, what: str, hint: str) -> T:
    """Read a user's JSON file as ``kind``; errors call it ``called``, and say it is no ``what``."""
    try:
        return from_json(read_file(path, most_bytes=CONFIG_BYTES), kind)
    except OSError as error:
        problem = f"the {called} {path} cannot be read: {error.strerror}"
        raise UsageError(problem, hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not {what}: {error}", hint=hint) from error


def read_file(path: Path, *, most_bytes: int) -> bytes:
    """Content of a regular file of at most ``most_bytes``; OSError for any other file."""
    content = bytearray()
    with open_regular(path) as file:
        # in pieces: to read up to a bound at once takes memory for all of it
        is_longer = os.fstat(file.fileno()).st_size > most_bytes
        while not is_longer and (piece := file.read(MIB)):
            content += piece
            is_longer = len(content) > most_bytes
    if is_longer:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return bytes(content)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; raises OSError for a folder, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        refuse_irregular(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def refuse_irregular(descriptor: int, path: Path) -> None:
    """Raise OSError if an opened file is a folder, a pipe or a device."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def write_whole(path: Path, content: bytes, *, durably: bool = False) -> None:
    """Write a file atomically, though other processes may write it at the same time. ``durably``:
    also sync the file and its name to the disk; then only one process at a time may write it.
    """
    writer = "" if durably else f".{os.getpid()}"
    partial = path.with_name(f"{path.name}{writer}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durably:
        make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """Sync a folder's entries to the disk, which a file's own fsync leaves out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
