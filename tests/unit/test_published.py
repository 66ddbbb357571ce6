"""Published tables: what is no capacity table is refused, and why is said."""

import re

import pytest

from highwater.errors import HighwaterError
from highwater.nouns.published import read_capacity_table, table_capacities


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpu,settings\n", "it has no column gpus, sp, model, max_model_len"),
        ("gpu,settings,gpus,sp,model,max_model_len\n", "it has no row"),
        ("gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,vanilla,1\n", "line 2 lacks"),
        (
            "gpu,settings,gpus,sp,model,max_model_len\n,vanilla,1,1,Qwen3-0.6B,4096\n",
            "line 2 lacks a gpu",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,magic,1,1,Qwen3-0.6B,4096\n",
            "settings 'magic' are none of",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,env,1,1,Qwen3-0.6B,-1\n",
            "line 2 has a capacity of -1",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,env,1,1,Qwen3-0.6B,16777217\n",
            "line 2 has a capacity of 16777217",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,env,one,1,Qwen3-0.6B,4096\n",
            "line 2: gpus 'one' is no whole number",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,env,2,3,Qwen3-0.6B,4096\n",
            "3 does not divide 2 GPUs",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\nA100-80GB,env,1,1,Qwen9-9B,4096\n",
            "no model 'Qwen9-9B'",
        ),
        (
            "gpu,settings,gpus,sp,model,max_model_len\n"
            "A100-80GB,env,2,1,Qwen3-0.6B,4096\nA100-80GB,env,2,2,Qwen3-0.6B,8192\n"
            "A100-80GB,env,2,1,Qwen3-0.6B,8192\n",
            "lines 2 and 4 are both about A100-80GB, env, 2 GPUs, Qwen3-0.6B: 4096 and 8192",
        ),
    ],
)
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
