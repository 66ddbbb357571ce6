"""What is left of an answer when nothing in it is a time, a measured figure or a temporary path."""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

LONG_CHARACTERS = 20_000
"""A longer text is kept as its digest: pages, mostly."""
MEASURED = re.compile(
    r"(_s|_at|_seconds|per_s|mfu|_flops|time|pid|host|stderr|log_tail|device_used\w*)$"
    r"|^(peak|available|free|rss|measured|context|others|used)_?\w*bytes\w*$|^versions$|_bytes_by_"
)
"""Keys of figures that no two real trials have alike."""
PLACES: dict[Path, str] = {}
"""Folders of this run, and what they are called in every answer."""


def text(said: str, folder: Path) -> str:
    """A text without the paths that every run, and every checkout, has of its own."""
    import highwater

    package = Path(highwater.__file__).parent
    for path, name in (
        (folder, "FOLDER"),
        *PLACES.items(),
        (package, "PACKAGE"),
        (Path.cwd(), "ROOT"),
        (Path(__file__).parents[2], "ROOT"),
        (Path(sys.executable).parent, "BIN"),
    ):
        said = said.replace(str(path), name)
    return said


def short(said: str) -> str:
    """A text that is kept whole, or what tells it from others."""
    if len(said) <= LONG_CHARACTERS:
        return said
    return f"{len(said)} characters, {digest(said.encode())}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def content(path: Path, folder: Path) -> Any:
    """What a file holds: what it says, its text, or a digest."""
    # torch writes the time and a number of its own into what it pickles, and we its digest
    # into a manifest; logs have times.
    if path.name in (".metadata", "manifest.json", ".lock") or path.suffix == ".log":
        return "there"
    try:
        if path.suffix == ".jsonl" or path.name in ("training.json", "corpus.json"):
            return document(text(path.read_text("utf-8"), folder))
        if path.suffix != ".bin":
            return short(text(path.read_text("utf-8"), folder))
    except UnicodeDecodeError:
        pass
    return f"{path.stat().st_size} bytes, {digest(path.read_bytes())}"


def files(directory: Path, folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(directory)): content(path, folder)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def structure(value: Any) -> Any:
    """A document of a real trial: all that it says, and of what was measured only that it was."""
    if isinstance(value, dict):
        return {
            key: type(each).__name__ if MEASURED.search(key) else structure(each)
            for key, each in value.items()
        }
    return [structure(each) for each in value] if isinstance(value, list) else value


def document(said: str) -> Any:
    for read in (json.loads, lambda lines: [json.loads(line) for line in lines.splitlines()]):
        try:
            return structure(read(said))
        except ValueError:
            continue
    return said
