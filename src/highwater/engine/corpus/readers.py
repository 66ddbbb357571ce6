"""Readers: the records of a data file, one after the other, never the whole file in memory.

A record knows its name, ``data.jsonl:17``, which every message about it begins with: the line of a
file of lines, the row of a table.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import IO, Any, NamedTuple, cast

import msgspec

from highwater.engine.corpus.data_files import DataFile, DataKind
from highwater.errors import MachineError, UsageError
from highwater.spec.codec import from_json
from highwater.spec.files import open_regular

_ROWS = 256
"""Rows of a table that are in memory at a time."""
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""What texts of UTF-16 begin with."""
_TO_LINES = (
    "python3 -c 'import json, sys; [print(json.dumps(record)) for record in json.load(sys.stdin)]'"
)


class DataRecord(NamedTuple):
    """One record, and where it stands."""

    fields: Mapping[str, Any]
    row: int
    """The line in its file, or the row, from 1."""
    name: str
    """``data.jsonl:17``."""


def records(file: DataFile) -> Iterator[DataRecord]:
    """The records of a file, in its order.

    Raises UsageError, with the file and the line, for what cannot be read, and for a file of
    records that has none.
    """
    row = 0
    try:
        for row, fields in _ROW_READERS[file.kind](file):
            name = file.name if file.kind == "text" else f"{file.name}:{row}"
            yield DataRecord(fields, row, name)
    except OSError as error:
        raise MachineError(
            f"{file.name} could not be read past record {row}: {error}",
            hint=f"try to read it: `wc -c {quote(str(file.path))}`",
        ) from error
    if not row:
        raise UsageError(
            f"{file.name} has no record", hint="leave the file out, or write a record a line in it"
        )


Rows = Iterator[tuple[int, Mapping[str, Any]]]


def _lines(file: DataFile) -> Rows:
    for number, line in enumerate(_raw_lines(file), 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        text = _text(line, file, f"{file.name}:{number}").strip()
        if not text:
            continue
        try:
            yield number, from_json(text, dict[str, Any])
        except msgspec.DecodeError as error:
            raise _no_record(file, number, text, error) from error


def _raw_lines(file: DataFile) -> Iterator[bytes]:
    with _opened(file.path) as stream:
        yield from _unpacked(file, lambda: stream.readline())


def _unpacked(file: DataFile, read: Callable[[], bytes]) -> Iterator[bytes]:
    """What ``read`` gives until it gives nothing; raises UsageError for an archive that breaks
    off.
    """
    number = 0
    while True:
        number += 1
        try:
            piece = read()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(
                f"{file.name}:{number} cannot be unpacked: {error}",
                hint=f"copy the file anew; `gzip -t {quote(str(file.path))}` says whether it is "
                "whole",
            ) from error
        if not piece:
            return
        yield piece


def _opened(path: Path) -> IO[bytes]:
    file = open_regular(path)
    return cast(IO[bytes], gzip.open(file)) if path.suffix.lower() == ".gz" else file


def _text(data: bytes, file: DataFile, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        path = quote(str(file.path))
        is_packed = file.path.suffix.lower() == ".gz"
        source = f"gzip -dc {path} | iconv" if is_packed else f"iconv {path}"
        unpacked = file.path.with_suffix("") if is_packed else file.path
        is_wide = data.startswith(_UTF_16)
        code, meant = ("utf-16", "UTF-16") if is_wide else ("latin1", "Latin-1 for example")
        raise UsageError(
            f"{name} is not UTF-8: the byte 0x{data[error.start]:02x} at {error.start}",
            hint=f"write it anew, from {meant}: `{source} -f {code} -t utf-8 > "
            f"{quote(f'utf8{unpacked.suffix}')}`",
        ) from error


def _no_record(file: DataFile, number: int, text: str, error: Exception) -> UsageError:
    path = quote(str(file.path))
    shown = f"gzip -dc {path}" if file.path.suffix.lower() == ".gz" else f"cat {path}"
    if text.startswith("["):
        return UsageError(
            f"{file.name}:{number} is a list, and not one record a line",
            hint=f"write a record a line: `{shown} | {_TO_LINES} > lines.jsonl`",
        )
    if text == "{" and number == 1:
        return UsageError(
            f"{file.name}:1 is a record that goes on in the next line",
            hint="write it in one line: "
            f"`{shown} | python3 -m json.tool --no-indent > lines.jsonl`",
        )
    return UsageError(
        f"{file.name}:{number} is no record of JSON: {error}",
        hint=f"look at it: `{shown} | sed -n {number}p`",
    )


def _document(file: DataFile) -> Rows:
    """A file of text as one record. Its bytes are in memory: the document is a whole."""
    with _opened(file.path) as stream:
        data = b"".join(_unpacked(file, lambda: stream.read(1 << 20)))
    text = _text(data.removeprefix(_BOM), file, file.name)
    yield 1, {"text": text}


def _parquet(file: DataFile) -> Rows:
    _refuse_without("pyarrow", file)
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            for batch in table.iter_batches(batch_size=_ROWS):
                for fields in batch.to_pylist():
                    row += 1
                    yield row, fields
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _broken_table(file, row, error) from error


def _arrow(file: DataFile) -> Rows:
    _refuse_without("datasets", file)
    import datasets
    import pyarrow

    row = 0
    try:
        table = (
            datasets.Dataset.from_file(str(file.path))
            if file.kind == "arrow"
            else datasets.load_from_disk(str(file.path))
        )
        for fields in cast(Any, table.with_format(None)):
            row += 1
            yield row, fields
    except (pyarrow.ArrowException, UnicodeDecodeError, FileNotFoundError) as error:
        raise _broken_table(file, row, error) from error


def _broken_table(file: DataFile, row: int, error: Exception) -> UsageError:
    return UsageError(
        f"{file.name}:{row + 1} cannot be read: {' '.join(str(error).split())}",
        hint="copy the file anew, or leave it out",
    )


def _refuse_without(package: str, file: DataFile) -> None:
    if find_spec(package) is None:
        raise UsageError(
            f"{file.name} is read by {package}, which is not installed here",
            hint=f"`pip install {package}`",
        )


_ROW_READERS: Mapping[DataKind, Callable[[DataFile], Rows]] = {
    "lines": _lines,
    "text": _document,
    "parquet": _parquet,
    "arrow": _arrow,
    "saved": _arrow,
}
