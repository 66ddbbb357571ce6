"""Where a model lies that somebody named: a directory, the Hub's cache, the catalog, or the Hub.

They are looked at in this order, and the first that has a ``config.json`` is the model's.
"""

from pathlib import Path
from shlex import quote
from typing import NamedTuple

from highwater.errors import ModelError
from highwater.model.hub import CONFIG, cached_directory, fetched_directory, is_hub_id
from highwater.model.model_catalog import catalog_model, near_names

_LONGEST_NAME = 120
"""Characters of a name that an error repeats."""
_LIST = "`highwater models` lists the catalog"


class ModelPlace(NamedTuple):
    """What a name means."""

    directory: Path
    """Absolute directory that holds the ``config.json``."""
    name: str
    """The short name: of a directory its own, of an id what follows the organisation."""
    opened_as: str | None = None
    """What other programs open it by: its directory's path, or its id on the Hub where it was named
    by one; None where the catalog alone has it."""


def model_place(name: str) -> ModelPlace:
    """The place of a model that is named by a directory, a ``config.json``, an id on the Hub or a
    catalog name.

    Raises ModelError where nothing is there, or what is there cannot be read; the hint says how to
    come by it.
    """
    try:
        directory = _named_directory(name)
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name too long, a folder without rights; a home that nobody has
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"no model {name[:_LONGEST_NAME]!r}: {said}",
            hint="give a directory that can be read, or `Qwen3-0.6B`",
        ) from error
    if directory is not None:
        return ModelPlace(directory, directory.name, str(directory))
    if not is_hub_id(name):
        return _catalog_place(name)
    cached = cached_directory(name)
    if cached is not None:
        return ModelPlace(cached.resolve(), name.rpartition("/")[2], name)
    known = catalog_model(name)
    if known is not None:
        hub_id, model = known
        return ModelPlace(model.directory.resolve(), hub_id.rpartition("/")[2], hub_id)
    return ModelPlace(_fetched(name).resolve(), name.rpartition("/")[2], name)


def _named_directory(name: str) -> Path | None:
    """The absolute directory of a name that is a path with a ``config.json``; None of any other.

    Raises ModelError for a directory without one or with a pipe or a device in it, and for another
    file.
    """
    path = Path(name).expanduser()
    if path.name == CONFIG and path.exists() and not path.is_dir():
        path = path.parent
    if (path / CONFIG).exists():
        _refuse_irregular(path)
    if (path / CONFIG).is_file():
        return _of_utf_8(path.resolve())
    if path.is_dir() and catalog_model(name) is None:
        raise ModelError(
            f"{path} has no config.json",
            hint=f"give the directory of a Hugging Face model, or `Qwen3-0.6B`; {_LIST}",
        )
    if path.is_file():
        raise ModelError(
            f"{path} is a file, and not a config.json",
            hint="give the directory of a Hugging Face model, or its config.json",
        )
    return None


def _refuse_irregular(directory: Path) -> None:
    """Raise ModelError for a pipe or a device where a model's files are: who opens it waits."""
    for path in sorted(directory.iterdir()):
        if path.is_fifo() or path.is_char_device() or path.is_block_device():
            raise ModelError(
                f"{path} is no regular file",
                hint=f"see what it is, `ls -lL {quote(str(path))}`, and put the model's file there",
            )


def _of_utf_8(directory: Path) -> Path:
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"the directory {directory} is not named in UTF-8",
            hint="rename it: a study has to name it",
        ) from error
    return directory


def _catalog_place(name: str) -> ModelPlace:
    known = catalog_model(name)
    if known is not None:
        spelled, model = known
        return ModelPlace(model.directory.resolve(), spelled)
    base = name.rstrip("/").rpartition("/")[2]
    if base != name and catalog_model(base) is not None:
        raise ModelError(
            f"no model {name!r}: not a directory", hint=f"the catalog calls it `{base}`"
        )
    raise ModelError(
        f"no model {name[:_LONGEST_NAME]!r}: not a directory, not in the catalog",
        hint=f"{_meant(near_names(name))}{_LIST}; a directory, or an id of the Hub such as "
        "`Qwen/Qwen3-0.6B`, is a model too",
    )


def _fetched(hub_id: str) -> Path:
    """The directory of what the Hub gives; where it gives nothing the hint names what is near in
    the catalog, too.
    """
    try:
        return fetched_directory(hub_id)
    except ModelError as error:
        base = catalog_model(hub_id.rpartition("/")[2])
        near = [base[0]] if base else near_names(hub_id)
        raise ModelError(error.problem, hint=f"{_meant(near)}{error.hint}") from error


def _meant(near: list[str]) -> str:
    """``did you mean `Qwen3-4B`? ``; empty where nothing is near."""
    names = " or ".join(f"`{name}`" for name in near)
    return f"did you mean {names}? " if near else ""
