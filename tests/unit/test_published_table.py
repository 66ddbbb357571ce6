"""The page of published sentences: every row names what shows it, and each test it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "published.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| sentence |")
]


def test_every_row_has_a_sentence_and_what_shows_it():
    assert len(ROWS) > 150
    for row in ROWS:
        assert len(row) == 3, row
        assert all(row), row
        shown, differs = row[1:]
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", shown), row
        assert not re.search(r"\bnot shown\b", differs), row
    assert f"**Each of {len(ROWS)} rows" in PAGE


def test_every_named_test_and_script_exists():
    named = set(re.findall(r"`(tests/[^`:]+)::(\w+)`", PAGE))
    assert len(named) > 100
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)
    for script in re.findall(r"python (docs/\S+\.py)", PAGE):
        assert (ROOT / script).is_file(), script
