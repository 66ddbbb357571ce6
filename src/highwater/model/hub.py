"""The Hugging Face Hub: its cache on this machine, and a ``config.json`` that is fetched into it.

The cache is read by its layout, ``models--ORG--NAME/refs/main`` and ``snapshots/REVISION``, which
needs no package. What is not in it ``huggingface_hub`` fetches where it is installed, imported here
and nowhere else, when nothing else has answered. It reads HF_ENDPOINT and HF_TOKEN, and runs no
code of a model's: one file of JSON is all that comes.
Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from highwater.errors import ModelError
from highwater.nouns.files import read_file

CONFIG = "config.json"
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REF_BYTES = 4096
_REVISION = re.compile(r"[0-9a-f]{7,64}")
_TRUE = frozenset(("1", "on", "yes", "true"))
_ANSWER_S = 5.0
"""Seconds that the Hub has to begin its answer, unless HF_HUB_ETAG_TIMEOUT says otherwise."""
_INSTALL = "pip install -U huggingface_hub"
_LOGIN = "`hf auth login`, or set HF_TOKEN"


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a model's id on the Hub: ``Qwen/Qwen2.5-7B-Instruct``."""
    return _ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def cached_directory(hub_id: str) -> Path | None:
    """The directory of a model's current revision in the Hub's cache; None where there is none with
    a ``config.json``.
    """
    folder = cache_folder(os.environ) / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = read_file(folder / "refs" / "main", most_bytes=_REF_BYTES).decode().strip()
        directory = folder / "snapshots" / revision
        is_there = _REVISION.fullmatch(revision) and (directory / CONFIG).is_file()
    except (OSError, ValueError):
        return None
    return directory if is_there else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where the Hub's cache is, as ``huggingface_hub`` finds it."""
    home = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", f"{home}/huggingface")
    older = environment.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    named = environment.get("HF_HUB_CACHE", older)
    return Path(os.path.expandvars(named)).expanduser()


def fetched_directory(hub_id: str) -> Path:
    """Fetch the ``config.json`` of a model into the Hub's cache; the directory that then holds it.

    Raises ModelError where the Hub is not to be asked, or does not give the file: the hint is the
    command that fetches it, or what the Hub asks for.
    """
    switch = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(name)), "")
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
    try:
        # asked first, for a download tries again for minutes where nobody answers
        url = huggingface_hub.hf_hub_url(hub_id, CONFIG, endpoint=_endpoint())
        huggingface_hub.get_hf_file_metadata(url, timeout=_timeout_s())
        path = huggingface_hub.hf_hub_download(hub_id, CONFIG, endpoint=_endpoint())
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: the Hub gives its files to accounts that its owner has let in",
            hint=f"ask for access at {_page(hub_id)}, then {_LOGIN}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hub has no model {hub_id!r}, or it is private and not yours",
            hint=f"check its spelling at {_page(hub_id)}; for a private one {_LOGIN}",
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{hub_id} has no {CONFIG} on the Hub",
            hint="give the model that it was made from: adapters and GGUF files have none",
        ) from error
    # whichever client for HTTP a version of huggingface_hub has, its errors come through
    except Exception as error:
        raise ModelError(
            f"{hub_id} is not in the Hub's cache, and the Hub does not give it: "
            f"{_first_line(error)}",
            hint=f"where the network reaches the Hub: `{fetch_command(hub_id)}`",
        ) from error
    return Path(path).parent


def fetch_command(hub_id: str) -> str:
    """The command that puts a model's ``config.json`` into the Hub's cache."""
    return f"hf download {hub_id} {CONFIG}"


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE


def _timeout_s() -> float:
    said = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(said) if said.isdecimal() else _ANSWER_S


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _page(hub_id: str) -> str:
    return f"{_endpoint()}/{hub_id}"


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
