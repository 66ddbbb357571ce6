"""Pages that need nothing else: the frame that all of them extend.

Text from outside stays text in them.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from highwater.pages.paths import without_folders
from highwater.pages.text import plain_lines


def page_template(name: str) -> Template:
    """A template of this folder.

    Everything in it is escaped but what the filter ``own`` marks in our own text.
    """
    environment = Environment(
        loader=PackageLoader("highwater", "pages/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=harmless,
    )
    environment.filters["own"] = own
    return environment.get_template(name)


def page_script(name: str) -> Markup:
    """A script of this folder, as a page has it in an element."""
    text = (files("highwater.pages") / "templates" / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 -- a file of ours


def script_text(text: str) -> Markup:
    """A JSON document, no character of which means anything in HTML."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 -- made harmless above


def paths_shortened(value: Any) -> Any:
    """The same, without folders in any of its texts."""
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, Mapping):
        return {name: paths_shortened(each) for name, each in value.items()}
    return [paths_shortened(each) for each in value] if isinstance(value, list | tuple) else value


def digest(script: str) -> str:
    """What the page's Content-Security-Policy allows that script by."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def harmless(value: Any) -> Any:
    """Text without characters that a terminal or an editor would act upon, and without folders.

    Escaping comes after this.
    """
    return (
        plain_lines(without_folders(value))
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def own(text: str) -> Markup:
    """Our own text: escaped, then ``code`` and **bold** as they are meant."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    # escaped above
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))  # noqa: S704
