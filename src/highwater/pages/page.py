"""Self-contained pages: the frame that all share, which escapes text from outside.

Pages are passed on to others, so they show no folder of the machine that made them: a path is
relative below the working folder, begins with ``~`` below the user's home, else has two parts.
"""

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup, escape

from highwater.pages.table import markdown_table
from highwater.pages.text import escaped, fenced, plain, plain_lines
from highwater.units import counted, format_bytes, format_rate, format_seconds, format_tokens

if TYPE_CHECKING:
    from jinja2 import Environment

_ABSOLUTE = re.compile(r"(?<![\w.~/:@…<-])/(?:[\w.@+-]+/)+[\w.@+-]*")
_SYSTEM = ("/bin/", "/dev/", "/path/", "/proc/", "/sys/", "/usr/bin/")
"""Folders that are alike on every machine, such as a script's, and ``/path/to/model``."""
_KEPT_PARTS = 2


def without_folders(text: str) -> str:
    """Shorten every absolute path in a text: ``/home/me/here/a.jsonl`` becomes ``a.jsonl`` if the
    working folder is ``/home/me/here``, else ``~/here/a.jsonl`` if the home is ``/home/me``, and
    ``/opt/site-packages/torch/nn/linear.py`` becomes ``…/nn/linear.py``.
    """
    if "/" not in text:
        return text
    here, home = str(Path.cwd()), os.environ.get("HOME", "")
    known = [(here, "")] if here != "/" else []  # a working folder of `/` would shorten every path
    known += [(home.rstrip("/"), "~/")] if home.count("/") and home != "/" else []
    for folder, instead in known:
        text = re.sub(rf"(?<![\w.~/-]){re.escape(folder)}/", instead, text)
    return _ABSOLUTE.sub(_short, text)


def _short(match: re.Match[str]) -> str:
    path = match[0]
    if path.startswith(_SYSTEM):
        return path
    parts = path.strip("/").split("/")
    end = "/" if path.endswith("/") else ""
    return f"…/{'/'.join(parts[-_KEPT_PARTS:])}{end}"


Form = Literal["html", "md", "text"]


def drawn_page(template: str, /, *, form: Form = "html", **values: object) -> str:
    """Render a template as HTML, Markdown or plain text; all values but ``own`` are escaped."""
    text = _templates(form).get_template(template).render(values, form=form)
    if form == "html":
        return text
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n").replace(_LINE_END, "\n") + "\n"


def template_lines(template: str, macro: str, /, **values: object) -> tuple[str, ...]:
    """Render a template's macro that writes a list, and return its items, each on one line."""
    module = _templates("text").get_template(template).make_module(values)
    items = re.split(r"^- ", getattr(module, macro)(), flags=re.MULTILINE)
    return tuple(str(_on_one_line(item)) for item in items[1:])


@lru_cache
def _templates(form: Form) -> "Environment":
    # imported here: only pages need it
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made: Callable[[str], str] = {
        "html": lambda text: plain_lines(without_folders(text)),
        "md": lambda text: _made_safe(escaped(text)),
        "text": lambda text: _made_safe(plain(text)),
    }[form]

    def finalize(value: object) -> object:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return made(str(value)) if is_text else value

    environment = Environment(
        loader=PackageLoader("highwater", "pages/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    filters: dict[str, Any] = {
        "plain": plain,
        "bytes": format_bytes,
        "tokens": format_tokens,
        "seconds": format_seconds,
        "rate": format_rate,
        "counted": counted,
        "json": json.dumps,
        "own": own if form == "html" else _on_one_line,
        "entities": lambda text: _made_safe(html.escape(plain(text))),
        "fenced": lambda text, language: _made_safe(
            fenced(text, language).replace("\n", _LINE_END)
        ),
        "rows": lambda table: _made_safe(markdown_table(table)),
        "tight": lambda text: _made_safe("\n".join(filter(str.strip, text.splitlines()))),
    }
    environment.filters.update(filters)
    return environment


_LINE_END = "\0"
"""Line end inside fenced text, which keeps its blank lines; texts never contain it."""


def _made_safe(text: str) -> Markup:
    """Mark text as safe whose parts are escaped already, or that a fence encloses."""
    return Markup(text)  # noqa: S704


def _on_one_line(text: str) -> Markup:
    return _made_safe(re.sub(r"\s*\n\s*", " ", text).strip())


def page_script(name: str) -> Markup:
    """Read a script from ``templates/``, to be put into an HTML element without escaping."""
    text = (files("highwater.pages") / "templates" / name).read_text(encoding="utf-8")
    return _made_safe(text)


def script_text(text: str) -> Markup:
    """JSON with ``<``, ``>`` and ``&`` escaped, so that HTML reads nothing in it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _made_safe(text)


def paths_shortened(value: Any) -> Any:
    """Shorten the paths in all texts of a value."""
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, Mapping):
        return {name: paths_shortened(each) for name, each in value.items()}
    return [paths_shortened(each) for each in value] if isinstance(value, list | tuple) else value


def digest(script: str) -> str:
    """SHA-256 of a script in base64, for the page's Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def own(text: str) -> Markup:
    """Escape text of this package, and render its ``code`` and **bold**."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(str(_on_one_line(text)))))
    return _made_safe(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))
