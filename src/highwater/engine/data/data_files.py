"""Data files: what the paths of ``--data`` hold, in an order that is the same everywhere, a digest
of their bytes, and their records, one after the other, never a whole file in memory.

A record knows its name, ``data.jsonl:17``, which every message about it begins with: the line of a
file of lines, the row of a table.
"""

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import from_json
from highwater.nouns.files import open_regular

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
        kind = _kind(path)
        if path.is_dir():
            inside = list(_inside(path, path.name))
        else:
            inside = [] if kind is None else [DataFile(path, path.name, kind)]
        if not inside:
            why = f"the folder {path} has no file of records or text"
            raise UsageError(
                why if path.is_dir() else f"{path} is of no kind that is read",
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


_ROWS = 256
"""Rows of a table that are in memory at a time."""
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""What texts of UTF-16 begin with."""
_LIST_BYTES = 1 << 30
"""The longest file that is one list, whose bytes are in memory while it is read."""
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
    file: DataFile
    read: set[str]
    """Names of the fields that somebody has read."""


def records(file: DataFile) -> Iterator[DataRecord]:
    """The records of a file, in its order.

    Raises UsageError, with the file and the line, for what cannot be read, and for a file of
    records that has none.
    """
    row = 0
    try:
        for row, fields in _ROW_READERS[file.kind](file):
            name = file.name if file.kind == "text" else f"{file.name}:{row}"
            whole = {field: _without_nulls(value) for field, value in fields.items()}
            yield DataRecord(whole, row, name, file, set())
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
    """A value without fields that are null, which tables have in rows that lack them."""
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value).items()
        return {name: _without_nulls(each) for name, each in fields if each is not None}
    if isinstance(value, list) and {*map(type, value)} & {dict, list}:
        return [_without_nulls(each) for each in value]
    return value


def command_without(file: DataFile, names: Sequence[str]) -> str:
    """A command that writes a file anew without these fields."""
    path, fields = quote(str(file.path)), " ".join(map(quote, names))
    if file.kind == "lines":
        each = "json.load(sys.stdin)" if _is_list(file) else _EACH_LINE
        return f"{_shown(file)} | python3 -c '{_PICKED.format(each)}' {fields} > without.jsonl"
    how = _COLUMNS_DROPPED[file.kind]
    return f"python3 -c 'import sys; {how}' {path} {fields}"


_PICKED = (
    "import json, sys; [print(json.dumps({{name: value for name, value in record.items() "
    "if name not in sys.argv}})) for record in {}]"
)
_EACH_LINE = "(json.loads(line) for line in sys.stdin if line.strip())"
_SAVED_WITHOUT = '(sys.argv[1]).remove_columns(sys.argv[2:]).save_to_disk("without")'
_COLUMNS_DROPPED: Mapping[DataKind, str] = {
    "parquet": "from pyarrow import parquet; parquet.write_table(parquet.read_table(sys.argv[1])"
    '.drop_columns(sys.argv[2:]), "without.parquet")',
    "arrow": f"import datasets; datasets.Dataset.from_file{_SAVED_WITHOUT}",
    "saved": f"import datasets; datasets.load_from_disk{_SAVED_WITHOUT}",
}


Rows = Iterator[tuple[int, Mapping[str, Any]]]


def _lines(file: DataFile) -> Rows:
    if _is_list(file):
        yield from _listed(file)
        return
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


def _is_list(file: DataFile) -> bool:
    """Whether a file of JSON is one list of records, as ``json.dump`` writes it."""
    with _opened(file.path) as stream:
        first = next(_unpacked(file, lambda: stream.read(1 << 16)), b"")
    return first.removeprefix(_BOM).lstrip().startswith(b"[")


def _listed(file: DataFile) -> Rows:
    """The records of one list, as bytes in memory until it is their turn."""
    pieces: list[bytes] = []
    with _opened(file.path) as stream:
        for piece in _unpacked(file, lambda: stream.read(1 << 20)):
            pieces.append(piece)
            if len(pieces) > _LIST_BYTES >> 20:
                raise UsageError(
                    f"{file.name} is one list of more than {_LIST_BYTES >> 20:,} MiB, which would "
                    "be in memory as a whole",
                    hint=f"write a record a line: `{_shown(file)} | {_TO_LINES} > lines.jsonl`",
                )
    data = b"".join(pieces).removeprefix(_BOM)
    _text(data, file, file.name)
    try:
        for number, record in enumerate(from_json(data, list[msgspec.Raw]), 1):
            yield number, from_json(record, dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{file.name} is no list of records: {error}",
            hint=f"look at it: `{_shown(file)} | python3 -m json.tool`",
        ) from error


def _raw_lines(file: DataFile) -> Iterator[bytes]:
    with _opened(file.path) as stream:
        yield from _unpacked(file, lambda: stream.readline())


def _unpacked(file: DataFile, read: Callable[[], bytes]) -> Iterator[bytes]:
    """What ``read`` gives until it gives nothing; UsageError for an archive that breaks off."""
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
    shown = _shown(file)
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


def _shown(file: DataFile) -> str:
    """A command that prints a file of text."""
    path = quote(str(file.path))
    return f"gzip -dc {path}" if file.path.suffix.lower() == ".gz" else f"cat {path}"


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
        is_file = file.kind == "arrow"
        opened = datasets.Dataset.from_file if is_file else datasets.load_from_disk
        table = opened(str(file.path))
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
