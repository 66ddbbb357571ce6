"""Model place: find a model by its name, in a directory, the Hub's cache, the catalog, or the Hub.
They are searched in this order; the first with a ``config.json`` is used.

The catalog has a row for each model in ``catalog/models.json``, and its shape in
``catalog/models/NAME/config.json``. The Hub's cache is read by its layout,
``models--ORG--NAME/refs/main`` and ``snapshots/REVISION``, which needs no package. Models not in
the cache are fetched by ``huggingface_hub`` if it is installed; it is imported nowhere else. Only
one JSON file is fetched: no code of a model is run. Source:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from highwater.errors import ModelError
from highwater.model.families import REFUSED, TRAINED, UNCOMPARED, WRAPPERS, family_by_name
from highwater.nouns.codec import Record, packaged, read_file
from highwater.nouns.declaration import ALIKE

_OFFERED = 3
"""Number of names that an error offers in place of an unknown one."""
_VERSION = re.compile(r"([a-z]{3,})[-_]?(\d+(?:\.\d+)?)(?![\d.]*[bm]\b)")
"""A family and its version in a name: ``qwen2.5``, ``gemma-4``; no match for a size."""
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?)b\b")
"""A size in a name: ``7b``."""


class CatalogModel(Record, frozen=True, kw_only=True):
    """One model of the catalog."""

    name: str
    """Name in tables and log paths."""
    hub_id: str | None = None
    """Id on the Hugging Face Hub; None for a model that is not on it."""
    also: tuple[str, ...] = ()
    """Hub ids of models with exactly the same shape: instruction-tuned, renamed, distilled."""
    aliases: tuple[str, ...] = ()
    """Other names: short ones, and ids of multimodal models whose text model this is; by these the
    catalog's ``config.json`` is opened."""
    published_parameters: float | None = None
    """Parameters in billions, according to its card or paper."""
    source: str
    """Where its ``config.json`` comes from."""

    @property
    def directory(self) -> Path:
        """Directory in the package with the model's ``config.json``."""
        return Path(__file__).parent / "catalog" / "models" / self.name

    @property
    def hub_ids(self) -> tuple[str, ...]:
        """All Hub ids of models with this shape."""
        return (*(() if self.hub_id is None else (self.hub_id,)), *self.also)


@cache
def model_catalog() -> tuple[CatalogModel, ...]:
    """Return the models whose shape ships with the package, in the order of its file."""
    return packaged("model/catalog/models.json", tuple[CatalogModel, ...])


def catalog_names() -> list[str]:
    """Return the names of the models whose shape ships with the package, in alphabetical order."""
    return sorted(model.name for model in model_catalog())


def catalog_model(name: str) -> tuple[str, CatalogModel] | None:
    """Find a model by catalog name, Hub id, or last part of an id, in any case; returns the
    catalog's spelling of the name, and the model. None if there is no such model.
    """
    return _spellings().get(name.lower())


def near_names(name: str) -> list[str]:
    """Return catalog names similar to an unknown one, or of its family and version, one for each
    model: the same family first, then the nearest version and size. For an id, only ids.
    """
    typed = name.lower()
    known = [each for each in _spellings() if ("/" in each) == ("/" in typed)]
    alike = get_close_matches(typed, known, n=len(known), cutoff=ALIKE)
    family, version, size = _told_by(typed)
    akin = [each for each in known if family and _told_by(each)[:2] == (family, version)]
    far = {
        each: (own[0] != family, abs(own[1] - version), abs(own[2] - size) if size else 0)
        for each in (*alike, *akin)
        if (own := _told_by(each))
    }
    by_model: dict[str, str] = {}
    for each in sorted(far, key=far.__getitem__):
        spelled, model = _spellings()[each]
        by_model.setdefault(model.name, spelled)
    return list(by_model.values())[:_OFFERED]


def _told_by(name: str) -> tuple[str, float, float]:
    """Family, version and billions of parameters in a name; empty or 0 if not in it."""
    version, size = _VERSION.search(name), _BILLIONS.search(name)
    family, number = version.groups() if version else ("", 0)
    return family, float(number), float(size[1]) if size else 0.0


@cache
def _spellings() -> dict[str, tuple[str, CatalogModel]]:
    """Map every name in lower case to its model; a model's own name precedes last parts of ids."""
    spellings: dict[str, tuple[str, CatalogModel]] = {}
    for model in model_catalog():
        spellings[model.name.lower()] = (model.name, model)
        spellings |= {each.lower(): (each, model) for each in model.hub_ids}
    for model in model_catalog():
        for each in model.aliases:
            for name in (each, each.rpartition("/")[2]):
                spellings.setdefault(name.lower(), (model.name, model))
        for each in model.hub_ids:
            short = each.rpartition("/")[2]
            spellings.setdefault(short.lower(), (short, model))
    return spellings


CONFIG = "config.json"
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REF_BYTES = 4096
_REVISION = re.compile(r"[0-9a-f]{7,64}")
_TRUE = frozenset(("1", "on", "yes", "true"))
_ANSWER_S = 5.0
"""Seconds that the Hub has to begin its answer, unless HF_HUB_ETAG_TIMEOUT gives another number."""
_INSTALL = "pip install -U huggingface_hub"
_LOGIN = "`hf auth login`, or set HF_TOKEN"


def is_hub_id(text: str) -> bool:
    """True if a text has the form of a Hub id, like ``Qwen/Qwen2.5-7B-Instruct``."""
    return _ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def cached_directory(hub_id: str) -> Path | None:
    """Return the directory of a model's current revision in the Hub's cache, or None."""
    folder = cache_folder(os.environ) / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = read_file(folder / "refs" / "main", most_bytes=_REF_BYTES).decode().strip()
        directory = folder / "snapshots" / revision
        is_there = _REVISION.fullmatch(revision) and (directory / CONFIG).is_file()
    except (OSError, ValueError):
        return None
    return directory if is_there else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's cache, found like ``huggingface_hub`` does."""
    home = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", f"{home}/huggingface")
    older = environment.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    named = environment.get("HF_HUB_CACHE", older)
    return Path(os.path.expandvars(named)).expanduser()


def fetched_directory(hub_id: str) -> Path:
    """Fetch a model's ``config.json`` into the Hub's cache, and return the directory that holds it.

    Raises ModelError if the Hub must not be asked or does not give the file: the hint is the
    command that fetches it, or what the Hub requires.
    """
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    switch = next((it for it in switches if os.environ.get(it, "").lower() in _TRUE), "")
    if switch:
        raise ModelError(
            f"{hub_id} is not in the Hub's cache, and {switch} is set: the Hub is not asked",
            hint=f"fetch it once: `env -u {switch} {fetch_command(hub_id)}`",
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"{hub_id} is not in the Hub's cache, and huggingface_hub is not installed, which "
            f"would fetch its {CONFIG}",
            hint=f"`{_INSTALL}`, then the same command",
        ) from error
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    page = f"{_endpoint()}/{hub_id}"
    try:
        # metadata first: a download retries for minutes if the Hub does not answer
        url = huggingface_hub.hf_hub_url(hub_id, CONFIG, endpoint=_endpoint())
        huggingface_hub.get_hf_file_metadata(url, timeout=_timeout_s())
        path = huggingface_hub.hf_hub_download(hub_id, CONFIG, endpoint=_endpoint())
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: the Hub gives its files to accounts that its owner has let in",
            hint=f"ask for access at {page}, then {_LOGIN}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hub has no model {hub_id!r}, or it is private and not yours",
            hint=f"check its spelling at {page}; for a private one {_LOGIN}",
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{hub_id} has no {CONFIG} on the Hub",
            hint="give the model that it was made from: adapters and GGUF files have none",
        ) from error
    # errors of the HTTP client, which differs between versions of huggingface_hub
    except Exception as error:
        raise ModelError(
            f"{hub_id} is not in the Hub's cache, and the Hub does not give it: "
            f"{_first_line(error)}",
            hint=f"where the network reaches the Hub: `{fetch_command(hub_id)}`",
        ) from error
    return Path(path).parent


def fetch_command(hub_id: str) -> str:
    """Return the command that fetches a model's ``config.json`` into the Hub's cache."""
    return f"hf download {hub_id} {CONFIG}"


def _timeout_s() -> float:
    said = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(said) if said.isdecimal() else _ANSWER_S


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


_LONGEST_NAME = 120
"""Most characters of a name that an error repeats."""
_LIST = "`highwater models` lists the catalog"


class ModelPlace(NamedTuple):
    """Where a model was found by its name: directory, Hub id or catalog entry."""

    directory: Path
    """Absolute directory that holds the ``config.json``."""
    name: str
    """Short name: the directory's own, or the part of an id after the organisation."""
    opened_as: str | None = None
    """Name by which other programs open it: the directory's path, or the Hub id if it was named by
    one; None if only the catalog has it."""


def model_place(name: str) -> ModelPlace:
    """Find a model by a directory, a ``config.json``, a Hub id or a catalog name.

    Raises ModelError if there is no such model, or it cannot be read; the hint says how to get it.
    """
    try:
        directory = _named_directory(name)
    # a name too long, a folder without permission, or ``~user`` of no user
    except (OSError, RuntimeError) as error:
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
        opened_as = hub_id if is_hub_id(hub_id) else None
        return ModelPlace(model.directory.resolve(), hub_id.rpartition("/")[2], opened_as)
    return ModelPlace(_fetched(name).resolve(), name.rpartition("/")[2], name)


def _named_directory(name: str) -> Path | None:
    """Return the absolute directory of a name that is a path with a ``config.json``; None for other
    names. Raises ModelError for a directory without a ``config.json``, or with a pipe or a device
    in it, and for a path of another file.
    """
    path = Path(name).expanduser()
    if path.name == CONFIG and path.exists() and not path.is_dir():
        path = path.parent
    if (path / CONFIG).exists():
        for each in sorted(path.iterdir()):  # opening a pipe or a device would block
            if each.is_fifo() or each.is_char_device() or each.is_block_device():
                raise ModelError(
                    f"{each} is no regular file",
                    hint=f"see what it is, `ls -lL {quote(str(each))}`, and put the model's file "
                    "there",
                )
    if (path / CONFIG).is_file():
        directory = path.resolve()
        try:
            str(directory).encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the directory {directory} is not named in UTF-8",
                hint="rename it: a study has to name it",
            ) from error
        return directory
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
        hint=f"{_by_name(name) or _meant(near_names(name))}{_LIST}; a directory, or an id of the "
        "Hub such as `Qwen/Qwen3-0.6B`, is a model too",
    )


def _fetched(hub_id: str) -> Path:
    """Fetch a directory from the Hub; the hint of an error offers similar catalog names."""
    try:
        return fetched_directory(hub_id)
    except ModelError as error:
        told, base = _by_name(hub_id), catalog_model(hub_id.rpartition("/")[2])
        near = [base[0]] if base else near_names(hub_id)
        raise ModelError(error.problem, hint=f"{told or _meant(near)}{error.hint}") from error


_LIKE = 0.75
"""Least share of a model's parameters that a smaller one has to have to be offered for it."""


def _by_name(name: str) -> str:
    """Hint for an unknown model whose name begins with a trained family; empty if with none. Raises
    ModelError for a family that is not trained: ``Llama-4-Scout``.
    """
    family = family_by_name(name)
    if family is None:
        return ""
    if family not in TRAINED and family not in WRAPPERS:
        why, instead = REFUSED.get(family, UNCOMPARED)
        raise ModelError(
            f"{name[:_LONGEST_NAME]} is by its name of the family {family}, which is not "
            f"supported: {why}",
            hint=f"{instead}; `highwater models` lists the catalog and all families",
        )
    size = _told_by(name.lower())[2]
    like = (each for each in near_names(name) if _LIKE <= _told_by(each.lower())[2] / size <= 1)
    near = next(like, None) if size else None
    which = "the text model of its family" if family in WRAPPERS else "its family"
    said = f"{which}, {family}, trains: put its config.json here and name ./config.json instead"
    return f"{said}, or the like of it, `{near}`; " if near else f"{said}; "


def _meant(near: list[str]) -> str:
    """Return ``did you mean `Qwen3-4B`? ``; empty without similar names."""
    names = " or ".join(f"`{name}`" for name in near)
    return f"did you mean {names}? " if near else ""
