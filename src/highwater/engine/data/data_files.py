"""Data files: what the paths of ``--data`` hold, in an order that is the same everywhere, and a
digest of their bytes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Literal, NamedTuple

from highwater.errors import UsageError
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
