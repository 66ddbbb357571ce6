"""The page of published sentences: every row says what shows it, and each test it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "published.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| sentence |")
]


def test_every_row_has_a_sentence_and_what_shows_it_or_why_nothing_does() -> None:
    assert len(ROWS) > 150
    for row in ROWS:
        assert len(row) == 3, row
        assert all(row), row
        assert re.match(r"`[^`]+`|not shown: .{20}", row[1]), row
    without = sum(row[1].startswith("not shown: ") for row in ROWS)
    assert f"**Of {len(ROWS)} rows" in PAGE
    assert f"; {without} are not shown" in PAGE


def test_every_named_test_and_script_exists() -> None:
    named = set(re.findall(r"`(tests/[^`:]+)::(\w+)`", PAGE))
    assert len(named) > 100
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)
    for script in re.findall(r"python (docs/\S+\.py)", PAGE):
        assert (ROOT / script).is_file(), script
