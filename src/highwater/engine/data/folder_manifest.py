"""The manifest of a checkpoint, or a corpus: size and checksum of every file in its folder, written
last.

Where it is, everything else was on the disk before it.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import Record, digest, from_json, to_json
from highwater.nouns.files import INDEX_BYTES, open_regular, read_file

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
