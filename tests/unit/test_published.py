"""What others published: their table, their searches, and what was shown of their system."""

import re
from pathlib import Path

import pytest

from highwater.errors import HighwaterError
from highwater.nouns.capacities import read_capacity_table, table_capacities
from tables import table


@pytest.mark.parametrize(("content", "said"), table("capacity_tables", "refused"))
def test_what_is_no_capacity_table_is_refused(content, said, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(HighwaterError, match=re.escape(said)):
        table_capacities(path)


def test_the_same_cells_of_two_kinds_of_gpu_have_their_own_answers(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "gpu,settings,gpus,sp,model,max_model_len\n"
        "A100-80GB,env,1,1,Qwen3-0.6B,4096\nB200,env,1,1,Qwen3-0.6B,8192\n"
    )
    table = read_capacity_table(path)
    assert [table.known_tokens(question, question.cells[0]) for question in table.questions] == [
        4096,
        8192,
    ]


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
