"""Pages that need nothing else: the frame that all of them extend.

Text from outside stays text in them.
"""

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

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


def harmless(value: Any) -> Any:
    """Text without characters that a terminal or an editor would act upon.

    Escaping comes after this.
    """
    return plain_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def own(text: str) -> Markup:
    """Our own text: escaped, then ``code`` and **bold** as they are meant."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    # escaped above
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))  # noqa: S704
