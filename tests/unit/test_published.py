"""Published tables: what is no capacity table is refused, and why is said."""

import re

import pytest

from highwater.errors import HighwaterError
from highwater.nouns.published import read_capacity_table, table_capacities
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
