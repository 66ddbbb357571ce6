"""What others published: their table, their searches, and what was shown of their system."""

import re

import msgspec
import pytest

import tables
from highwater.errors import HighwaterError, UsageError
from highwater.memory.capacity_table import table_capacities
from highwater.nouns.study import Cell
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.search.scheduler import search_cells
from highwater.search.start_length import unknown_trainer_line
from highwater.trials.simulated import SimulatedRunner
from places import DATA, RESULTS, ROOT
from table_accuracy import CapacityTable, read_capacity_table
from trial_specs import answers_among

PUBLISHED_A100 = DATA / "published_capacity_a100_80gb.csv"


@pytest.fixture(scope="module")
def table() -> CapacityTable:
    return read_capacity_table(PUBLISHED_A100)


def simulated(table: CapacityTable) -> SimulatedRunner:
    """A runner in which a length fits if it is no longer than its cell's published capacity."""
    capacities = {(model, cell): known for (_, model, cell), known in table.capacity_tokens.items()}

    def law(spec: TrialSpec) -> Outcome:
        known = capacities[spec.model_name, Cell(layout=spec.layout, settings=spec.settings)]
        return Outcome.FIT if spec.length_tokens <= known else Outcome.OUT_OF_MEMORY

    return SimulatedRunner(law)


@pytest.mark.parametrize(("method", "most_trials"), [("linear", 426), ("bisect", 260)])
def test_our_answers_are_the_published_ones(table, method, most_trials):
    runner = simulated(table)
    trials = 0
    for question in table.questions:
        asked = msgspec.structs.replace(question, method=method)
        for answer in answers_among(search_cells(asked, runner, line_of=unknown_trainer_line)):
            trials += answer.trials
            assert answer.capacity_tokens == table.known_tokens(question, answer.cell)
    assert trials <= most_trials, "246 by bisection when this was written; 224 are inevitable"


@pytest.mark.parametrize("reordering", [sorted, reversed], ids=["by layout", "last rung first"])
def test_the_order_of_the_cells_hardly_matters(table, reordering):
    runner = simulated(table)
    trials = 0
    for question in table.questions:
        layouts = list(dict.fromkeys(cell.layout for cell in question.cells))
        by_layout = sorted(question.cells, key=lambda cell: layouts.index(cell.layout))
        cells = reversed(question.cells) if reordering is reversed else by_layout
        asked = msgspec.structs.replace(question, cells=tuple(cells))
        events = search_cells(asked, runner, line_of=unknown_trainer_line)
        trials += sum(answer.trials for answer in answers_among(events))
    assert trials <= 280


def test_a_cell_that_is_unknown_is_left_out_and_a_missing_file_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "gpu,settings,gpus,sp,model,max_model_len,yarn\n"
        "H20-96GB,env+offload,1,1,Qwen3-4B,,0\n"
        "H20-96GB,env+offload,2,1,Qwen3-4B,28672,0\n"
    )
    [question] = read_capacity_table(path).questions
    assert [cell.layout.gpus for cell in question.cells] == [2]
    with pytest.raises(UsageError, match=r"none\.csv cannot be read"):
        read_capacity_table(tmp_path / "none.csv")


@pytest.mark.parametrize(("content", "said"), tables.table("capacity_tables", "refused"))
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
    known = [table.known_tokens(question, question.cells[0]) for question in table.questions]
    assert known == [4096, 8192]


PAGE = (RESULTS / "published.md").read_text()
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
    named = set(re.findall(r"`(tests/[^`:]+)::(\w+)`", PAGE))
    assert len(named) > 100
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)
    for script in re.findall(r"python (docs/\S+\.py)", PAGE):
        assert (ROOT / script).is_file(), script
