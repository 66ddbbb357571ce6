"""HTML as tests of pages read it: elements, attributes, texts and rows."""

import re
from html.parser import HTMLParser

LARGEST_BYTES = 1_500_000
"""Of a page that can be handed around."""
_VOID = {"meta", "br", "hr", "img", "input", "link"}


def markdown_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table of a Markdown page, as they are written."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


class Page(HTMLParser):
    """A page, read; fails for a tag that closes another, and for one that is never closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        """Each with the element that it stands in."""
        self.rows: list[list[str]] = []
        """Of all tables."""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((self._open[-1], data))
            if self._open[-1] in ("td", "th"):
                self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> str:
        return " ".join(data for tag, data in self.texts if tag in tags)
