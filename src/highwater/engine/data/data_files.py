"""Data files: the files below the paths of ``--data``, in an order that is the same everywhere, a
digest of their bytes, and their records, one after the other, never a whole file in memory.

A record has a name, ``data.jsonl:17``, with which every message about it begins: the line of a file
of lines, or the row of a table. Lines are read here, and not by ``datasets``, which turns texts
into dates, gives a field one type in all records of a file, and names no line in its errors.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from highwater.engine.data.record_fields import DataRecord
from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import from_json, open_regular

DataKind = Literal["lines", "parquet", "arrow", "text", "saved"]
"""JSON lines, Parquet, a table of ``datasets``, a text as one document, a saved folder."""
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
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files of ``datasets`` that have no records."""
_OWN_CACHE = "cache-"
"""Prefix of the names of files that are a cache of ``datasets``."""
_CHUNK_BYTES = 1 << 20
_LIST_BYTES = 1 << 30
"""Largest file that is one JSON list, whose bytes are in memory while it is read."""
_TABLE_ROWS = 256
"""Rows of a table in memory at a time."""
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of texts in UTF-16."""


class DataFile(NamedTuple):
    """One file of records, or a folder that ``datasets`` saved."""

    path: Path
    name: str
    """Name in messages: the path from the last part of the given path on."""
    kind: DataKind
    number: int = 0
    """Index among the files of the corpus."""

    @property
    def parts(self) -> tuple[Path, ...]:
        """Files with its bytes: itself, or the files of a saved folder, without caches."""
        if self.kind != "saved":
            return (self.path,)
        return tuple(
            each
            for each in sorted(self.path.iterdir())
            if not each.is_dir() and not each.name.startswith(_OWN_CACHE)
        )

    @property
    def is_packed(self) -> bool:
        """True if the file is compressed by gzip."""
        return self.path.suffix.lower() == ".gz"

    @property
    def printed(self) -> str:
        """Shell command that prints the text in a file; it unpacks one compressed by gzip."""
        return f"{'gzip -dc' if self.is_packed else 'cat'} {quote(str(self.path))}"

    @property
    def is_list(self) -> bool:
        """True if a JSON file is one list of records, like a list that ``json.dump`` writes."""
        first = next(self.pieces(1 << 16), b"")
        return first.removeprefix(_BOM).lstrip().startswith(b"[")

    def command_without(self, names: Sequence[str]) -> str:
        """Return a shell command that writes JSON without these fields; empty for a table."""
        if self.kind != "lines":
            return ""
        fields = ", ".join(f".{json.dumps(name)}" for name in names)
        each = ".[] | " if self.is_list else ""
        return f"{self.printed} | jq -c {quote(f'{each}del({fields})')} > without.jsonl"

    def pieces(self, size: int | None = _CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the file's unpacked bytes, ``size`` at a time; None: a line at a time.

        Raises UsageError for a damaged or cut-off archive.
        """
        number = 0
        with open_regular(self.path) as file:
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if self.is_packed else file
            while True:
                number += 1
                try:
                    piece = stream.readline() if size is None else stream.read(size)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    raise UsageError(
                        f"{self.name}:{number} cannot be unpacked: {error}",
                        hint=f"copy the file anew; `gzip -t {quote(str(self.path))}` says whether "
                        "it is whole",
                    ) from error
                if not piece:
                    return
                yield piece


class DataFiles(NamedTuple):
    """All files of a corpus, and the names of text files beside records that are left out."""

    files: tuple[DataFile, ...]
    left_out: tuple[str, ...]
    """Names of text files beside records, which mostly describe these and are not trained."""


def data_files(paths: Sequence[str]) -> DataFiles:
    """Return the files at these paths, and all files below paths that are folders, sorted.

    Raises UsageError for a path that is missing, unreadable, or of an unknown kind, and for a
    folder without a file of records or text.
    """
    found: list[DataFile] = []
    left_out: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(
                f"no data at {path}", hint=f"look for it: `ls {quote(str(path.parent))}`"
            )
        inside = list(_inside(path, path.name))
        if not inside:
            why = f"the folder {path} has no file of records or text"
            raise UsageError(
                why if path.is_dir() else f"{path} is of no kind that is read",
                hint=f"files that are read end in {', '.join(_KINDS)}, or .gz after .jsonl, .json "
                "or a text's",
            )
        if any(file.kind != "text" for file in inside):
            left_out += [file.name for file in inside if file.kind == "text"]
            inside = [file for file in inside if file.kind != "text"]
        found += inside
    for path in (path for file in found for path in file.parts):
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
    names = Counter(file.name for file in found)
    clear = (file.name if names[file.name] == 1 else str(file.path) for file in found)
    return DataFiles(
        tuple(  # bytes of a name that are no text are escaped
            file._replace(name=name.encode("utf-8", "backslashreplace").decode(), number=number)
            for number, (file, name) in enumerate(zip(found, clear, strict=True))
        ),
        tuple(left_out),
    )


def bytes_digest(paths: Sequence[Path]) -> str:
    """Return the sha256 of the concatenated sha256 digests of the files, in order."""
    whole = hashlib.sha256()
    for path in paths:
        with open_regular(path) as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def _inside(path: Path, name: str) -> Iterator[DataFile]:
    """Yield a file of a known kind, or all such files below a folder, except hidden ones."""
    if not path.is_dir():
        is_packed = path.suffix.lower() == ".gz"
        kind = _KINDS.get((path.with_suffix("") if is_packed else path).suffix.lower())
        if kind is not None and (not is_packed or kind in _COMPRESSED):
            yield DataFile(path, name, kind)
        return
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield DataFile(path, name, "saved")
        return
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in path.iterdir() if (each / "state.json").is_file())
        if len(splits) > 1:  # one of them may be for evaluation
            first = "train" if "train" in splits else splits[0]
            raise UsageError(
                f"{path} has {len(splits)} splits: {', '.join(splits)}",
                hint=f"name the one to train on: `--data {quote(str(path / first))}`",
            )
    for each in sorted(path.iterdir()):
        is_about = each.name in _ABOUT_DATA or each.name.startswith(_OWN_CACHE)
        is_passed = each.is_symlink() if each.is_dir() else is_about
        if not each.name.startswith(".") and not is_passed:
            yield from _inside(each, f"{name}/{each.name}")


def records(file: DataFile) -> Iterator[DataRecord]:
    """Yield the records of a file, in its order.

    Raises UsageError, with file and line, for a record that cannot be read, and for a file without
    records; MachineError if the disk fails.
    """
    row = 0
    try:
        for row, fields in _ROW_READERS[file.kind](file):
            name = file.name if file.kind == "text" else f"{file.name}:{row}"
            whole = {field: _without_nulls(value) for field, value in fields.items()}
            yield DataRecord(whole, row, name, file.number, file.command_without, set())
    except OSError as error:
        raise MachineError(
            f"{file.name} could not be read past record {row}: {error}",
            hint=f"try to read it: `wc -c {quote(str(file.path))}`",
        ) from error
    if not row:
        raise UsageError(
            f"{file.name} has no record", hint="leave the file out, or write a record a line in it"
        )


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields: tables have nulls in rows that lack a field."""
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value).items()
        return {name: _without_nulls(each) for name, each in fields if each is not None}
    if isinstance(value, list) and {*map(type, value)} & {dict, list}:
        return [_without_nulls(each) for each in value]
    return value


Rows = Iterator[tuple[int, Mapping[str, Any]]]


def _lines(file: DataFile) -> Rows:
    if file.is_list:
        yield from _listed(file)
        return
    for number, line in enumerate(file.pieces(None), 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        text = _text(line, file, f"{file.name}:{number}").strip()
        if not text:
            continue
        try:
            yield number, from_json(text, dict[str, Any])
        except msgspec.DecodeError as error:
            problem = f"{file.name}:{number} is no record of JSON: {error}"
            hint = f"look at it: `{file.printed} | sed -n {number}p`"
            if text == "{" and number == 1:
                problem = f"{file.name}:1 is a record that goes on in the next line"
                to_line = f"{file.printed} | python3 -m json.tool --no-indent > lines.jsonl"
                hint = f"write it in one line: `{to_line}`"
            raise UsageError(problem, hint=hint) from error


def _listed(file: DataFile) -> Rows:
    """Yield the records of one list, whose bytes are all in memory; each is decoded in turn."""
    pieces: list[bytes] = []
    for piece in file.pieces():
        pieces.append(piece)
        if len(pieces) > _LIST_BYTES // _CHUNK_BYTES:
            raise UsageError(
                f"{file.name} is one list of more than {_LIST_BYTES >> 20:,} MiB, which would be "
                "in memory as a whole",
                hint=f"write a record a line: `{file.printed} | jq -c '.[]' > lines.jsonl`",
            )
    data = b"".join(pieces).removeprefix(_BOM)
    _text(data, file, file.name)
    try:
        for number, record in enumerate(from_json(data, list[msgspec.Raw]), 1):
            yield number, from_json(record, dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{file.name} is no list of records: {error}",
            hint=f"look at it: `{file.printed} | python3 -m json.tool`",
        ) from error


def _text(data: bytes, file: DataFile, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        source = f"{file.printed} | iconv" if file.is_packed else f"iconv {quote(str(file.path))}"
        unpacked = file.path.with_suffix("") if file.is_packed else file.path
        is_wide = data.startswith(_UTF_16)
        code, meant = ("utf-16", "UTF-16") if is_wide else ("latin1", "Latin-1 for example")
        raise UsageError(
            f"{name} is not UTF-8: the byte 0x{data[error.start]:02x} at {error.start}",
            hint=f"write it anew, from {meant}: `{source} -f {code} -t utf-8 > "
            f"{quote(f'utf8{unpacked.suffix}')}`",
        ) from error


def _document(file: DataFile) -> Rows:
    """Yield a text file as one record, with all its bytes in memory."""
    yield 1, {"text": _text(b"".join(file.pieces()).removeprefix(_BOM), file, file.name)}


def _table(file: DataFile) -> Rows:
    """Yield the rows of a Parquet file, or of a table of ``datasets``, from number 1."""
    package = "pyarrow" if file.kind == "parquet" else "datasets"
    if find_spec(package) is None:
        raise UsageError(
            f"{file.name} is read by {package}, which is not installed here",
            hint=f"`pip install {package}`",
        )
    import pyarrow

    row = 0
    try:
        for row, fields in enumerate(_table_rows(file), 1):
            yield row, fields
    except (pyarrow.ArrowException, UnicodeDecodeError, FileNotFoundError) as error:
        raise UsageError(
            f"{file.name}:{row + 1} cannot be read: {' '.join(str(error).split())}",
            hint="copy the file anew, or leave it out",
        ) from error


def _table_rows(file: DataFile) -> Iterator[Mapping[str, Any]]:
    if file.kind == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(file.path) as table:
            for batch in table.iter_batches(batch_size=_TABLE_ROWS):
                yield from batch.to_pylist()
        return
    import datasets

    opened = datasets.Dataset.from_file if file.kind == "arrow" else datasets.load_from_disk
    yield from cast(Any, opened(str(file.path)).with_format(None))


_ROW_READERS: Mapping[DataKind, Callable[[DataFile], Rows]] = {
    "lines": _lines,
    "text": _document,
    **dict.fromkeys(("parquet", "arrow", "saved"), _table),
}
