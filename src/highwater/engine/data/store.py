"""The store of a corpus: flat files of little-endian numbers in one folder, which every rank maps
into its memory; and the manifest of such a folder, or of a checkpoint: size and checksum of every
file in it.

A folder is written under another name, its manifest last, and renamed when all of it is on the
disk: a folder with its final name is whole, unless damaged later. Opening a corpus reads every byte
once to check this: a second for each 1 to 2 GB.
"""

import hashlib
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from highwater.engine.data.batches import UNTRAINED, Document
from highwater.engine.data.rendering import TokenDocument, Unit
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import (
    INDEX_BYTES,
    Record,
    digest,
    from_json,
    make_durable,
    open_regular,
    read_file,
    to_json,
    write_whole,
)
from highwater.nouns.corpus import Corpus

_SUMMARY = "corpus.json"
_NAMES = "names.json"
_AGAIN = "type the same command again: the data is tokenised once more"
_SMALL_VOCABULARY = 1 << 16
"""Largest vocabulary whose ids are stored in two bytes; larger ones take four."""
_TOKEN_FILES = {"trained": "u1", "logprobs": "<f4"}
"""Files, with their dtypes, of one number a token, besides ids."""
_DOCUMENT_FILES = {"units": "<i8", "files": "<i4", "rows": "<i8", "rewards": "<f8"}
"""Files, with their dtypes, of one number a document, besides offsets."""


class CorpusWriter:
    """Context manager that writes a corpus unit by unit; an unfinished corpus is removed."""

    def __init__(self, directory: Path, *, vocab_size: int) -> None:
        """``directory`` is made when the block begins; MachineError if that fails."""
        self._directory = directory
        ids_type = "<u2" if vocab_size <= _SMALL_VOCABULARY else "<u4"
        self._types = {"ids": ids_type, **_TOKEN_FILES, **_DOCUMENT_FILES, "offsets": "<i8"}
        self._open: dict[str, IO[bytes]] = {}
        self._groups: dict[tuple[int, str | int], int] = {}
        self._last_unit = -1
        self._is_ordered, self._has_logprobs, self._is_finished = True, False, False
        self.unit_documents = array("i")
        """Number of documents of each unit."""
        self.histogram: Counter[int] = Counter()
        """Number of documents by length in tokens, rounded up to a power of two."""
        names = ("documents", "units", "tokens", "trained_tokens", "longest_tokens")
        self.counts = dict.fromkeys(names, 0)
        """Counts so far, under the names that ``Corpus`` has for them."""
        self.apart = self.chats = self.given = 0
        """Numbers of documents with a prompt tokenised apart, from a chat template, and of ids."""

    def __enter__(self) -> Self:
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True)
            for name in self._types:
                self._open[name] = (self._directory / f"{name}.bin").open("wb")
        self._append("offsets", 0)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            with suppress(OSError):  # closing writes what is buffered, and the disk may be full
                stream.close()
        if not self._is_finished:
            shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, unit: Unit, *, file: int, row: int) -> None:
        """Write the documents of a unit, read from ``row`` of file number ``file``; units of one
        file with equal groups become one unit. Raises MachineError if the disk is full or fails.
        """
        number = self.counts["units"]
        if unit.group is not None:
            number = self._groups.setdefault((file, unit.group), number)
        if number == self.counts["units"]:
            self.counts["units"] += 1
            self.unit_documents.append(0)
        self._is_ordered &= number >= self._last_unit
        self._last_unit = number
        self.unit_documents[number] += len(unit.documents)
        with disk_errors(self._directory):
            for document in unit.documents:
                self._add(document, (number, file, row))

    def finish(self, summary: Corpus, names: Sequence[str]) -> None:
        """Write ``names`` of data files, ``summary`` and the manifest. Raises MachineError."""
        with disk_errors(self._directory):
            for stream in self._open.values():
                _flush(stream)
            if not self._has_logprobs:
                (self._directory / "logprobs.bin").unlink()
            if not self._is_ordered:
                _sort_by_unit(self._directory, self._types)
            write_whole(self._directory / _NAMES, to_json(list(names)).encode(), durably=True)
            text = to_json(summary, indent=2)
            write_whole(self._directory / _SUMMARY, text.encode(), durably=True)
            files = {path.name: record_of(path) for path in self._directory.iterdir()}
            write_manifest(self._directory, files)
        self._is_finished = True

    def _add(self, document: TokenDocument, where: tuple[int, int, int]) -> None:
        count = len(document.ids_L)
        logprobs_L = document.logprobs_L
        self._has_logprobs |= logprobs_L is not None
        self._append("ids", document.ids_L)
        self._append("trained", document.trained_L)
        self._append("logprobs", np.full(count, np.nan) if logprobs_L is None else logprobs_L)
        for name, value in zip(_DOCUMENT_FILES, (*where, document.reward), strict=True):
            self._append(name, value)
        self.apart += document.is_apart
        self.chats += document.is_chat
        self.given += document.is_given
        self.counts["documents"] += 1
        self.counts["tokens"] += count
        self.counts["trained_tokens"] += int(np.count_nonzero(document.trained_L[1:]))
        self.counts["longest_tokens"] = max(self.counts["longest_tokens"], count)
        self.histogram[1 << (count - 1).bit_length()] += 1
        self._append("offsets", self.counts["tokens"])

    def _append(self, name: str, values: Any) -> None:
        self._open[name].write(np.asarray(values, dtype=self._types[name]).tobytes())


class OpenCorpus:
    """A corpus with memory-mapped files: parts that are not read take no memory."""

    def __init__(
        self, directory: Path, summary: Corpus, names: Sequence[str], checked: Collection[str]
    ) -> None:
        """Map the ``checked`` files, which are undamaged; UsageError if the summary disagrees."""
        self.summary = summary
        self._names, self._directory, self._checked = names, directory, checked
        ids_path = directory / "ids.bin"
        is_small = ids_path.is_file() and ids_path.stat().st_size == 2 * summary.tokens
        of_tokens = {"ids": "<u2" if is_small else "<u4", **_TOKEN_FILES}
        if "logprobs.bin" not in checked:
            del of_tokens["logprobs"]
        self._column = {"offsets": self._mapped("offsets", "<i8", summary.documents + 1)}
        for types, count in ((of_tokens, summary.tokens), (_DOCUMENT_FILES, summary.documents)):
            self._column |= {name: self._mapped(name, types[name], count) for name in types}
        self.units: NDArray[np.int64] = self._column["units"]
        """Unit number of each document, ascending."""
        self.lengths: NDArray[np.int64] = np.diff(self._column["offsets"])
        """Tokens of each document."""
        if int(self._column["offsets"][-1]) != summary.tokens:
            raise _damaged(directory, "its documents have other lengths than it says")

    @property
    def largest_id(self) -> int:
        """Largest token id; every id is read to find it."""
        return int(self._column["ids"].max(initial=0))

    def document(self, number: int) -> Document:
        """Return a document for training; its group is the number of its unit."""
        where = slice(*self._column["offsets"][number : number + 2].tolist())
        ids_L = torch.from_numpy(self._column["ids"][where].astype(np.int64))
        is_trained_L = torch.from_numpy(self._column["trained"][where].astype(np.bool_))
        logprobs_L = None
        if "logprobs" in self._column:
            logprobs = np.array(self._column["logprobs"][where], dtype=np.float32)
            found_L = torch.from_numpy(logprobs)
            logprobs_L = None if bool(found_L.isnan().all()) else found_L
        return Document(
            ids_L,
            ids_L.where(is_trained_L, UNTRAINED),
            reward=float(self._column["rewards"][number]),
            group=int(self.units[number]),
            old_logprobs_L=logprobs_L,
        )

    def name_of(self, number: int) -> str:
        """Return a document's name, the location of its record: ``data.jsonl:17``."""
        file, row = (int(self._column[name][number]) for name in ("files", "rows"))
        return f"{self._names[file]}:{row}"

    def _mapped(self, name: str, kind: str, count: int) -> NDArray[Any]:
        path = self._directory / f"{name}.bin"
        size = path.stat().st_size if path.name in self._checked else None
        if size != count * np.dtype(kind).itemsize:
            raise _damaged(self._directory, f"{path.name} is not as long as its summary says")
        return np.memmap(path, dtype=kind, mode="r", shape=(count,))


def open_corpus(directory: str | Path) -> OpenCorpus:
    """Open the corpus in a folder after checking every byte; UsageError if missing or damaged."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(f"no corpus at {directory}", hint=_AGAIN)
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest, manifest.files)
    except UsageError as error:
        raise UsageError(error.problem, hint=_AGAIN) from error
    try:
        summary = from_json(read_file(directory / _SUMMARY, most_bytes=INDEX_BYTES), Corpus)
        names = from_json(read_file(directory / _NAMES, most_bytes=INDEX_BYTES), list[str])
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(directory, str(error)) from error
    summary = summary.replace(directory=str(directory.resolve()))
    return OpenCorpus(directory, summary, names, manifest.files)


@contextmanager
def disk_errors(directory: Path) -> Generator[None]:
    """Context manager: turn an OSError into a MachineError that names the folder."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the corpus could not be written below {directory}: {error}",
            hint="make room there, or name another folder: `export XDG_CACHE_HOME=/path`",
        ) from error


def _sort_by_unit(directory: Path, types: dict[str, str]) -> None:
    """Rewrite every file of ``types`` (names, and NumPy's type of each), so that documents which a
    step has all or none of, a unit, are consecutive.
    """
    units = np.fromfile(directory / "units.bin", dtype="<i8")
    offsets = np.fromfile(directory / "offsets.bin", dtype="<i8")
    order = np.argsort(units, kind="stable")
    for name, kind in types.items():
        path, partial = directory / f"{name}.bin", directory / f"{name}.sorted"
        if not path.exists():
            continue
        with partial.open("wb") as stream:
            if name == "offsets":
                sorted_offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[order])])
                stream.write(sorted_offsets.astype(kind).tobytes())
            elif name in _DOCUMENT_FILES:
                stream.write(np.fromfile(path, dtype=kind)[order].tobytes())
            else:
                values = np.memmap(path, dtype=kind, mode="r")
                for document in order:
                    stream.write(values[offsets[document] : offsets[document + 1]].tobytes())
            _flush(stream)
        partial.replace(path)


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _damaged(directory: Path, what: str) -> UsageError:
    return UsageError(f"the corpus in {directory} is damaged: {what}", hint=_AGAIN)


MANIFEST_FILE = "manifest.json"


class FileRecord(Record, frozen=True, kw_only=True):
    """Size in bytes and checksum of one file of a corpus or a checkpoint."""

    size_bytes: int
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """Sizes and checksums of all files in a folder except the manifest, by relative path."""

    files: Mapping[str, FileRecord]
    files_digest: str
    """Digest of ``files``, by which a damaged manifest is told from damaged files."""


def record_of(path: Path) -> FileRecord:
    """Return the record of a file, whose bytes are all read."""
    with open_regular(path) as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=checksum)


def write_manifest(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest, and flush it and the folders' entries to the disk."""
    ordered = dict(sorted(files.items()))
    manifest = Manifest(files=ordered, files_digest=digest(ordered))
    write_whole(directory / MANIFEST_FILE, to_json(manifest, indent=2).encode(), durably=True)
    for folder in {directory, *(directory / name for name in map(os.path.dirname, files))}:
        make_durable(folder)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a folder; UsageError if it is missing or damaged."""
    path = directory / MANIFEST_FILE
    try:
        manifest = from_json(read_file(path, most_bytes=INDEX_BYTES), Manifest)
    except (OSError, msgspec.MsgspecError, HighwaterError) as error:
        raise damage(path, _why(error)) from error
    if digest(manifest.files) != manifest.files_digest:
        raise damage(path, "it is not as it was written")
    return manifest


def check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise UsageError for the first of these files that is missing or was changed."""
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
    """Return the error for a damaged file, with a general hint that callers may replace."""
    return UsageError(
        f"{path} is damaged: {why}", hint="go on from another checkpoint: `--resume-from`"
    )


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return "it is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
