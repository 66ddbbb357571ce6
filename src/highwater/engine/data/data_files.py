"""Data files: what the paths of ``--data`` hold, in an order that is the same everywhere, and a
digest of their bytes.

The manifest of a checkpoint, or a corpus: size and checksum of every file in its folder, written
last.

Where it is, everything else was on the disk before it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Literal, NamedTuple

import msgspec

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import Record, digest, from_json, to_json
from highwater.nouns.files import INDEX_BYTES, open_regular, read_file

DataKind = Literal["lines", "parquet", "arrow", "text", "saved"]
"""JSON lines, Parquet, a table of ``datasets``, one document of plain text, or a folder that
``datasets`` saved whole."""
_KINDS: dict[str, DataKind] = {
    ".jsonl": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
}
_COMPRESSED: tuple[DataKind, ...] = ("lines", "text")
"""Kinds that may be compressed by gzip."""
KNOWN = ", ".join(_KINDS)
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files of ``datasets`` that have no records."""
_OWN_CACHE = "cache-"
"""How the names of files begin in which ``datasets`` keeps what it can compute again."""
_CHUNK_BYTES = 1 << 20


class DataFile(NamedTuple):
    """One file of records, or a saved folder."""

    path: Path
    name: str
    """As messages name it: from the last part of the path that was given."""
    kind: DataKind

    @property
    def parts(self) -> tuple[Path, ...]:
        """The files whose bytes it is made of."""
        if self.kind != "saved":
            return (self.path,)
        return tuple(
            each
            for each in sorted(self.path.iterdir())
            if not each.is_dir() and not each.name.startswith(_OWN_CACHE)
        )


class DataFiles(NamedTuple):
    """All files of a corpus."""

    files: tuple[DataFile, ...]
    left_out: tuple[str, ...]
    """Names of texts beside records, which describe them mostly and are not trained."""


def data_files(paths: Sequence[str]) -> DataFiles:
    """The files of these paths, folders with all that is below them, sorted.

    Raises UsageError for a path that is missing, unreadable, or of a kind that nobody reads, and
    for a folder without a file of records or text.
    """
    found: list[DataFile] = []
    left_out: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(
                f"no data at {path}", hint=f"look for it: `ls {quote(str(path.parent))}`"
            )
        inside = list(_inside(path, path.name)) if path.is_dir() else [_named(path)]
        if not inside:
            raise UsageError(
                f"the folder {path} has no file of records or text",
                hint=f"files that are read end in {KNOWN}, or .gz after .jsonl, .json or a text's",
            )
        if any(file.kind != "text" for file in inside):
            left_out += [file.name for file in inside if file.kind == "text"]
            inside = [file for file in inside if file.kind != "text"]
        found += inside
    for file in found:
        _refuse_unreadable(file)
    return DataFiles(_with_clear_names(found), tuple(left_out))


def bytes_digest(paths: Sequence[Path]) -> str:
    """sha256 of the bytes of files one after the other, each with how many they are."""
    whole = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        with open_regular(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                one.update(chunk)
        whole.update(one.digest())
    return whole.hexdigest()


def _named(path: Path) -> DataFile:
    kind = _kind(path)
    if kind is None:
        raise UsageError(
            f"{path} is of no kind that is read",
            hint=f"files that are read end in {KNOWN}, or .gz after .jsonl, .json or a text's",
        )
    return DataFile(path, path.name, kind)


def _kind(path: Path) -> DataKind | None:
    """The kind of a file by its name; None: nobody reads it."""
    if path.suffix.lower() != ".gz":
        return _KINDS.get(path.suffix.lower())
    kind = _KINDS.get(path.with_suffix("").suffix.lower())
    return kind if kind in _COMPRESSED else None


def _inside(folder: Path, name: str) -> Iterator[DataFile]:
    """Files below a folder that have a kind, sorted by name; what is hidden is left out."""
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield DataFile(folder, name, "saved")
        return
    if (folder / "dataset_dict.json").is_file():
        _refuse_several_splits(folder)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _inside(path, f"{name}/{path.name}")
        elif not path.is_dir() and _is_data(path) and (kind := _kind(path)) is not None:
            yield DataFile(path, f"{name}/{path.name}", kind)


def _is_data(path: Path) -> bool:
    return path.name not in _ABOUT_DATA and not path.name.startswith(_OWN_CACHE)


def _refuse_several_splits(folder: Path) -> None:
    """Raise UsageError where ``datasets`` saved several splits: one of them is for tests."""
    splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
    if len(splits) > 1:
        first = "train" if "train" in splits else splits[0]
        raise UsageError(
            f"{folder} has {len(splits)} splits: {', '.join(splits)}",
            hint=f"name the one to train on: `--data {quote(str(folder / first))}`",
        )


def _refuse_unreadable(file: DataFile) -> None:
    for path in file.parts:
        try:
            open_regular(path).close()
        except PermissionError as error:
            raise UsageError(
                f"{path} may not be read", hint=f"let it be read: `chmod u+r {quote(str(path))}`"
            ) from error
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read: {error.strerror}",
                hint=f"see what it is, `ls -lL {quote(str(path))}`, and name a file",
            ) from error


def _with_clear_names(files: Sequence[DataFile]) -> tuple[DataFile, ...]:
    """The files, those of one name by their whole paths; bytes that are no text are escaped."""
    names = Counter(file.name for file in files)
    clear = (file.name if names[file.name] == 1 else str(file.path) for file in files)
    return tuple(
        file._replace(name=name.encode("utf-8", "backslashreplace").decode("utf-8"))
        for file, name in zip(files, clear, strict=True)
    )


MANIFEST_FILE = "manifest.json"


class FileRecord(Record, frozen=True, kw_only=True):
    """What one file has to be."""

    size_bytes: int
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """All files of a folder but this one, by their paths in it."""

    files: Mapping[str, FileRecord]
    files_digest: str
    """Digest of the above: of a damaged manifest it does not say that the files are."""


def record_of(path: Path) -> FileRecord:
    """What a file is; its bytes are read."""
    with open_regular(path) as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=checksum)


def write_manifest(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest, onto the disk, and the folders' names of their files."""
    ordered = dict(sorted(files.items()))
    manifest = Manifest(files=ordered, files_digest=digest(ordered))
    write_durably(directory / MANIFEST_FILE, to_json(manifest, indent=2))
    for folder in {directory, *(directory / name for name in map(os.path.dirname, files))}:
        make_durable(folder)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a folder; UsageError where there is none, or it is damaged."""
    path = directory / MANIFEST_FILE
    try:
        manifest = from_json(read_file(path, most_bytes=INDEX_BYTES), Manifest)
    except (OSError, msgspec.MsgspecError, HighwaterError) as error:
        raise damage(path, _why(error)) from error
    if digest(manifest.files) != manifest.files_digest:
        raise damage(path, "it is not as it was written")
    return manifest


def check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise UsageError for the first of these files that is missing, or not as it was written."""
    for name in names:
        path, expected = directory / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size == expected.size_bytes and record_of(path) == expected:
                continue
        except OSError as error:
            raise damage(path, _why(error)) from error
        if size != expected.size_bytes:
            raise damage(path, f"it has {size:,} bytes of {expected.size_bytes:,}")
        raise damage(path, "its checksum is another than when it was written")


def damage(path: Path, why: str) -> UsageError:
    """What is said of a damaged file; whoever knows another checkpoint has a better hint."""
    return UsageError(
        f"{path} is damaged: {why}", hint="go on from another checkpoint: `--resume-from`"
    )


def write_durably(path: Path, text: str) -> None:
    """Write a file onto the disk, under a name of its own until it is there."""
    unnamed = path.with_name(f"{path.name}.tmp")
    with unnamed.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unnamed.replace(path)
    make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """Have the names in a folder on the disk; a file's own fsync leaves its name out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return "it is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
