"""Paths on a page: a page is handed around, and no folder of the machine that made it is on it.

Below the folder that one stands in a path is relative, below one's home it begins with ``~``; of
any other its last two parts are left.
"""

import os
import re
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w.~/:@…<-])/(?:[\w.@+-]+/)+[\w.@+-]*")
_SYSTEM = ("/bin/", "/dev/", "/path/", "/proc/", "/sys/", "/usr/bin/")
"""Folders that every machine has alike, among them that of a script's first line, and the example
``/path/to/model``."""
_KEPT_PARTS = 2


def without_folders(text: str) -> str:
    """The text with every absolute path in it shortened; all else as it is.

    ``/home/me/here/a.jsonl`` is ``a.jsonl`` where one stands in ``/home/me/here``, ``~/here/…`` of
    one's own home elsewhere; ``/opt/site-packages/torch/nn/linear.py`` is ``…/nn/linear.py``.
    """
    if "/" not in text:
        return text
    for folder, instead in _known_folders():
        text = re.sub(rf"(?<![\w.~/-]){re.escape(folder)}/", instead, text)
    return _ABSOLUTE.sub(_short, text)


def _known_folders() -> list[tuple[str, str]]:
    """The current folder and one's home, where these are nobody else's."""
    here, home = str(Path.cwd()), os.environ.get("HOME", "")
    known = [(here, "")] if here != "/" else []
    return [*known, (home.rstrip("/"), "~/")] if home.count("/") and home != "/" else known


def _short(match: re.Match[str]) -> str:
    path = match[0]
    if path.startswith(_SYSTEM):
        return path
    parts = path.strip("/").split("/")
    end = "/" if path.endswith("/") else ""
    return f"…/{'/'.join(parts[-_KEPT_PARTS:])}{end}"
